"""3 x 3 convolutions with half the multiplications (Winograd 1980; the form F(4, 3) of Lavin & Gray, arXiv:1509.09308).

Four rows of output depend on six rows of input through three rows of taps. Seen as products of polynomials, known at six
points instead of by their coefficients, that takes 6 multiplications in place of 12:

    y = A^T ( (G w) * (B^T x) ),   A^T (4, 6), G (6, 3), B^T (6, 6),

where each of the six * is a convolution along the row, done as three matrix products over channels. Both gradients follow:
dx is the correlation of dy with the taps reversed and transposed, and dw = G^T ( (A dy) * (B^T x) ).

A few rows are worked on at a time, while they are in the cache. There, channels are filled up to a multiple of 8 with zeros, for
which matrix products run faster. Legend: K the 6 points, J rows of a tile (4 of output, 6 of input), N tiles of a strip.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_like.nn import fused
from credit_like.nn.fused import Pair

POINTS = (0.0, 1.0, -1.0, 2.0, -0.5)  # and infinity: of the small ones these round best
OUT, TAPS = 4, 3
IN = OUT + TAPS - 1
STRIP = 2**18  # values of a strip of the image that are worked on at a time
LANES = 8


@functools.lru_cache(maxsize=16)
def _matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """B^T (6, 6), G (6, 3), A^T (4, 6): the product of polynomials of 3 and 4 coefficients at the points, transposed."""
    powers = torch.tensor(POINTS, dtype=torch.float64)[:, None] ** torch.arange(IN)

    def values(count: int) -> Tensor:
        at_infinity = torch.eye(count, dtype=torch.float64)[-1:]
        return torch.cat([powers[:, :count], at_infinity])

    b_t = torch.linalg.inv(values(IN)).t()
    scale = b_t.abs().amax(1, keepdim=True)  # what one factor loses the other gains
    return (b_t / scale).to(dtype), (values(TAPS) * scale).to(dtype), values(OUT).t().contiguous().to(dtype)


def _filled(channels: int) -> int:
    return -(-channels // LANES) * LANES


def _strips(rows: int, row: int) -> tuple[int, Iterator[tuple[int, int]]]:
    """Most tiles of a strip, and (first row of output, tiles) of each strip; `row`: values of a row of the image."""
    tiles = -(-rows // OUT)
    parts = -(-tiles // max(1, STRIP // (IN * row)))
    most = -(-tiles // parts)
    return most, ((first * OUT, min(most, tiles - first)) for first in range(0, tiles, most))


def _gather(x_HWC: Tensor, first: int, left: int, slab_JNWC: Tensor) -> None:
    """Row first + 4 n + j of the image, from column `left` on, into (j, n) of the slab; zeros for rows outside."""
    tiles, (height, width, channels) = slab_JNWC.shape[1], x_HWC.shape
    for j, rows_NWC in enumerate(slab_JNWC.unbind(0)):
        start = max(0, -((first + j) // OUT))
        stop = max(start, min(tiles, -((first + j - height) // OUT)))
        rows_NWC[:start].zero_()
        rows_NWC[stop:].zero_()
        top = first + OUT * start + j
        rows_NWC[start:stop, left : left + width, :channels] = x_HWC[top : top + OUT * (stop - start) : OUT]


def _taps(weight: Tensor, g: Tensor) -> Tensor:
    """G w: (out, in, 3, 3) to (3, K, out, in), channels filled up."""
    out, into = weight.shape[:2]
    w = weight.new_zeros(TAPS, TAPS, _filled(out), _filled(into))
    w[..., :out, :into] = weight.permute(3, 2, 0, 1)
    return (g @ w.view(TAPS, TAPS, -1)).view(TAPS, IN, *w.shape[2:])


def _correlate(x_BHWC: Tensor, u_bKCO: Tensor, outputs: int, bias: Tensor | None, rows: Pair, columns: Pair) -> Tensor:
    """A^T (u * B^T x) after `rows` and `columns` of zeros (before, after); u: for each tap and point (in, out)."""
    b_t, _, a_t = _matrices(x_BHWC.dtype)
    batch, height, width, _ = x_BHWC.shape
    high, wide = height + sum(rows) - TAPS + 1, width + sum(columns)
    y = x_BHWC.new_empty(batch, high, wide - TAPS + 1, outputs)
    into, out = u_bKCO.shape[2:]
    most, strips = _strips(high, wide * max(into, out))
    slab, v = _workspace(x_BHWC, most, wide, into)
    products = x_BHWC.new_empty(IN * most * wide * out)
    for item, (first, n) in itertools.product(range(batch), strips):
        points = n * wide
        _gather(x_BHWC[item], first - rows[0], columns[0], slab[:, :n])
        torch.mm(b_t, slab[:, :n].reshape(IN, -1), out=v[:, :points].flatten(1))
        m = products[: IN * points * out].view(IN, points, out)
        torch.bmm(v[:, :points], u_bKCO[0], out=m)
        for b in range(1, TAPS):
            m.baddbmm_(v[:, b : b + points], u_bKCO[b])
        images = (a_t @ m.view(IN, -1)).view(OUT, n, wide, out)
        for j, image in enumerate(images.unbind(0)):
            part = y[item, first + j : first + OUT * n : OUT]
            image = image[: part.shape[0], : part.shape[1], :outputs]
            part.copy_(image) if bias is None else torch.add(image, bias, out=part)
    return y


def _workspace(x: Tensor, tiles: int, wide: int, channels: int) -> tuple[Tensor, Tensor]:
    """Rows of the image, (J, N, wide, C), and their combinations (K, N wide + 2, C); the taps reach beyond the last point."""
    return x.new_zeros(IN, tiles, wide, channels), x.new_zeros(IN, tiles * wide + TAPS - 1, channels)


def _weight_gradient(g_BHWO: Tensor, x_BHWC: Tensor, rows: Pair, columns: Pair) -> Tensor:
    """G^T ( (A dy) * (B^T x) ): (out, in, 3, 3)."""
    b_t, g, a_t = _matrices(x_BHWC.dtype)
    outputs, channels = g_BHWO.shape[-1], x_BHWC.shape[-1]
    out, into = _filled(outputs), _filled(channels)
    high, wide = g_BHWO.shape[1], x_BHWC.shape[2] + sum(columns)
    most, strips = _strips(high, wide * max(into, out))
    slab, v = _workspace(x_BHWC, most, wide, into)
    g_slab = x_BHWC.new_zeros(OUT, most, wide, out)
    du = x_BHWC.new_zeros(TAPS, IN, out, into)
    for item, (first, n) in itertools.product(range(x_BHWC.shape[0]), strips):
        points = n * wide
        _gather(x_BHWC[item], first - rows[0], columns[0], slab[:, :n])
        torch.mm(b_t, slab[:, :n].reshape(IN, -1), out=v[:, :points].flatten(1))
        _gather(g_BHWO[item], first, 0, g_slab[:, :n])
        dm = (a_t.t() @ g_slab[:, :n].reshape(OUT, -1)).view(IN, points, out)
        for b in range(TAPS):
            du[b].baddbmm_(dm.transpose(1, 2), v[:, b : b + points])
    dw = (g.t() @ du.transpose(0, 1).reshape(IN, -1)).view(TAPS, TAPS, out, into)
    return dw[..., :outputs, :channels].permute(2, 3, 0, 1).contiguous()


class _Conv3x3(torch.autograd.Function):
    """Keeps its input; the gradients always this way, the output where `forth`."""

    @staticmethod
    def forward(
        ctx: Any, x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, pad_rows: Pair, pad_cols: Pair, forth: bool
    ) -> Tensor:
        x_BHWC = x_BHWC.contiguous()
        ctx.save_for_backward(x_BHWC, weight)
        ctx.pads = (pad_rows, pad_cols)
        if not forth:
            return fused.direct_conv(x_BHWC, weight, bias, 1, pad_rows, pad_cols)
        u = _taps(weight, _matrices(x_BHWC.dtype)[1])
        return _correlate(x_BHWC, u.transpose(2, 3), weight.shape[0], bias, pad_rows, pad_cols)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHWO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x_BHWC, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            u = _taps(weight, _matrices(x_BHWC.dtype)[1].flip(1)).flip(0)
            rows, columns = ((TAPS - 1 - before, TAPS - 1 - after) for before, after in ctx.pads)
            dx = _correlate(g_BHWO, u, weight.shape[1], None, rows, columns)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(g_BHWO, x_BHWC, *ctx.pads)
        if ctx.needs_input_grad[2]:
            db = g_BHWO.sum((0, 1, 2))
        return dx, dw, db, None, None, None


def conv3x3(
    x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, pad_rows: Pair, pad_cols: Pair, *, forth: bool = True
) -> Tensor:
    """A 3 x 3 convolution with stride 1 after adding 0 to 2 zero rows (before, after) and columns; weight (out, in, 3, 3).

    Without `forth` the output is the library's and only the gradients are taken this way.
    """
    assert all(0 <= pad < TAPS for pad in (*pad_rows, *pad_cols)), (pad_rows, pad_cols)
    y: Tensor = _Conv3x3.apply(x_BHWC, weight, bias, pad_rows, pad_cols, forth)
    return y
