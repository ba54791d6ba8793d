"""Views of an image: channels first or last, and split into attention windows.

Legend: B batch, N windows, h heads, L tokens of a window (w^2), d channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[int, int]  # rows or columns (before, after)


def channels_first(x_BHWC: Tensor) -> Tensor:
    """Return a view of (B, H, W, C) as (B, C, H, W)."""
    return x_BHWC.permute(0, 3, 1, 2)


def channels_last(x_BCHW: Tensor) -> Tensor:
    """Return a view of (B, C, H, W) as (B, H, W, C)."""
    return x_BCHW.permute(0, 2, 3, 1)


Shape = tuple[int, int, int, int, int, int, int]  # B, four sizes of rows and columns, heads, channels of a head


def window_shape(shape: torch.Size, window: int, dim_head: int, dilated: bool) -> Shape:
    """Return the shape (B, rows, rows, columns, columns, h, d) as which (B, H, W, h 3 d) is viewed.

    Each pair of rows or columns is windows x tokens, or tokens x windows if `dilated`.
    """
    batch, height, width, channels = shape
    down, right = height // window, width // window
    rows, columns = ((window, down), (window, right)) if dilated else ((down, window), (right, window))
    return (batch, *rows, *columns, channels // (3 * dim_head), dim_head)


def split_windows(qkv_BHWC: Tensor, shape: Shape, dilated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v, each (windows, heads, tokens, d)."""
    *image, heads, dim_head = shape
    qkv = qkv_BHWC.reshape(*image, heads, 3, dim_head)
    order = (6, 0, 2, 4, 5, 1, 3, 7) if dilated else (6, 0, 1, 3, 5, 2, 4, 7)
    qkv = qkv.permute(order)
    tokens = qkv.shape[5] * qkv.shape[6]
    q, k, v = qkv.reshape(3, -1, heads, tokens, dim_head).contiguous().unbind(0)
    return q, k, v


def split_one(x_BHWC: Tensor, shape: Shape, dilated: bool) -> Tensor:
    """Return (B, H, W, h d) as (windows, heads, tokens, d), the inverse of `join_windows`."""
    *image, heads, dim_head = shape
    order = (0, 2, 4, 5, 1, 3, 6) if dilated else (0, 1, 3, 5, 2, 4, 6)
    x = x_BHWC.reshape(*image, heads, dim_head).permute(order)
    return x.reshape(-1, heads, x.shape[4] * x.shape[5], dim_head)


def join_one(y_NhLd: Tensor, shape: Shape, dilated: bool) -> Tensor:
    """Return (windows, heads, tokens, d) in the order (B, rows, rows, columns, columns, h, d) of the image."""
    batch, r0, r1, c0, c1, heads, dim_head = shape
    order = (0, 4, 1, 5, 2, 3, 6) if dilated else (0, 1, 4, 2, 5, 3, 6)
    sizes = (batch, r1, c1, heads, r0, c0, dim_head) if dilated else (batch, r0, c0, heads, r1, c1, dim_head)
    return y_NhLd.reshape(sizes).permute(order)


def join_windows(y_NhLd: Tensor, shape: Shape, dilated: bool) -> Tensor:
    """Return (windows, heads, tokens, d) as (B, H, W, h d)."""
    batch, r0, r1, c0, c1, heads, dim_head = shape
    return join_one(y_NhLd, shape, dilated).reshape(batch, r0 * r1, c0 * c1, heads * dim_head)
