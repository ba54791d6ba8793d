"""Attention within windows, as residual blocks. Tensors are (B, H, W, C).

Short attention: the tokens of a window are w x w neighbouring points. Long attention: the grid is cut into g x g strides and
the tokens are the points (a H/g + y, b W/g + x), a, b = 0..g-1, of one (y, x): every window spans the whole image.

Legend: B batch, N windows, L tokens of a window (w^2), h heads, d channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.dropout import mask
from credit_like.nn.layer import Layer
from credit_like.nn.linear import Linear
from credit_like.nn.norms import ChannelNorm
from credit_like.nn.place import WHOLE

POSITION_INDICES = ("exact", "credit")


class PositionBias(Layer):
    """A bias for each pair of tokens of a w x w window: an MLP 2 -> d -> d -> d -> 1 of their offset, d = dim // 4.

    The bias of query i and key j is entry (dy + w - 1)(2w - 1) + (dx + w - 1) of a table, (dy, dx) = position i - position j.
    exact: entry n of the table belongs to the n-th offset of (-(w-1)..w-1)^2, row-major. credit: to the n-th offset of
    (-w..w)^2, an indexing slip of the original implementation, which published weights were trained with.
    """

    offsets: Tensor
    index: Tensor

    def __init__(self, dim: int, window: int, *, position_index: str = "exact", spectral_norm: bool = False) -> None:
        super().__init__()
        assert position_index in POSITION_INDICES, position_index
        self.window, self.position_index = window, position_index
        hidden = dim // 4
        self.linears = nn.ModuleList(
            Linear(i, o, spectral_norm=spectral_norm)
            for i, o in [(2, hidden), (hidden, hidden), (hidden, hidden), (hidden, 1)]
        )
        self.norms = nn.ModuleList(ChannelNorm(hidden) for _ in range(3))
        self.register_buffer("offsets", torch.empty((2 * window - 1) ** 2, 2), persistent=False)
        self.register_buffer("index", torch.empty(window**4, dtype=torch.int64), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the offsets that the table holds and the table entry of each (query, key) pair."""
        w = self.window
        reach = w - 1 if self.position_index == "exact" else w
        axis = torch.arange(-reach, reach + 1)
        offsets = torch.cartesian_prod(axis, axis)[: (2 * w - 1) ** 2]
        self.offsets.copy_(offsets)
        position = torch.arange(w)
        delta = position[:, None] - position[None, :] + w - 1
        self.index.copy_((delta[:, None, :, None] * (2 * w - 1) + delta[None, :, None, :]).reshape(-1))

    def forward(self) -> Tensor:
        """Return the biases as (w^2, w^2); rows are queries."""
        return ops.of_weights(self, self._table)

    def _table(self) -> Tensor:
        table = self.offsets.to(self.linears[0].weight.dtype)  # type: ignore[arg-type]
        for linear, norm in zip(self.linears[:3], self.norms, strict=True):
            table = nn.functional.relu(norm(linear(table)))
        table = self.linears[3](table)
        length = self.window**2
        return table.flatten().index_select(0, self.index).view(length, length)


class WindowAttention(Layer):
    """x + out(attend(qkv(norm(x)))) within windows of w x w tokens; the subclass defines which tokens share a window.

    The rows of `qkv.weight` are ordered (head, q | k | v, channel of the head), so that a range of rows is a range of
    heads. In a window of one token the softmax is 1 for any q and k, so only v and the output projection are computed.
    Dropout applies to the probabilities after the softmax.
    """

    dilated: bool
    tensor_columns = ("qkv",)
    tensor_rows = ("out",)
    tensor_copies = ("bias",)  # the table is the same for all heads

    def __init__(
        self,
        dim: int,
        window: int,
        *,
        dim_head: int,
        position_index: str = "exact",
        spectral_norm: bool = False,
        dropout: float = 0.0,
        site: int = 0,
    ) -> None:
        super().__init__()
        assert dim % dim_head == 0, f"{dim} channels do not split into heads of {dim_head}"
        self.window, self.dim_head = window, dim_head
        self.dropout, self.site = dropout, site
        self.places = WHOLE
        """The rows and columns that the input has, in the whole image."""
        self.norm = ChannelNorm(dim)
        self.qkv = Linear(dim, 3 * dim, bias=False, spectral_norm=spectral_norm)
        self.out = Linear(dim, dim, spectral_norm=spectral_norm)
        self.bias = (
            PositionBias(dim, window, position_index=position_index, spectral_norm=spectral_norm)
            if window > 1
            else None
        )

    def forward(self, x_BHWC: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Apply the block to (B, H, W, C); the shape stays the same. `key_B` selects what dropout drops."""
        mask_BHWC = self._mask(x_BHWC, key_B) if self.dropout and key_B is not None else None
        if self.bias is None:
            values = self._values(self.norm(x_BHWC))
            if mask_BHWC is not None:
                values = values * mask_BHWC.repeat_interleave(self.dim_head, -1)
            return x_BHWC + self.out(values)
        return ops.attention_block(
            x_BHWC,
            self.norm,
            self.qkv,
            self.out,
            self.bias(),
            self.window,
            self.dim_head,
            dilated=self.dilated,
            mask_BHWC=mask_BHWC,
        )

    def _mask(self, x_BHWC: Tensor, key_B: Tensor) -> Tensor:
        """Return dropout's factors of the probabilities, (B, H, W, h w^2), for each query the keys of its window."""
        height, width = x_BHWC.shape[1:3]
        tokens, of_head = self.window**2, 3 * self.dim_head
        outputs = self.qkv.outputs
        channels = range(outputs.start // of_head * tokens, outputs.stop // of_head * tokens)
        return mask(key_B, self.site, self.dropout, (height, width), self.places, channels, x_BHWC.dtype)

    def _values(self, normed_BHWC: Tensor) -> Tensor:
        """Return v alone: (B, H, W, C) to (B, H, W, h d)."""
        if type(self.qkv) is Linear:
            weight = self.qkv.effective_weight().unflatten(0, (-1, 3, self.dim_head))[:, 2].flatten(0, 1)
            return nn.functional.linear(normed_BHWC, weight)
        return self.qkv(normed_BHWC).unflatten(-1, (-1, 3, self.dim_head))[..., 2, :].flatten(-2)


class ShortAttention(WindowAttention):
    """Attention among w x w neighbouring points."""

    dilated = False


class LongAttention(WindowAttention):
    """Attention among g x g points that lie H/g rows and W/g columns apart; `window` is g."""

    dilated = True
