"""Attention within windows, as residual blocks. Tensors are (B, H, W, C).

Short attention: the tokens of a window are w x w neighbouring points. Long attention: the grid is cut into g x g strides and
the tokens are the points (a H/g + y, b W/g + x), a, b = 0..g-1, of one (y, x): every window spans the whole image.

Legend: B batch, N windows, L tokens of a window (w^2), h heads, d channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.dropout import gain, mask
from credit_like.nn.layer import Layer
from credit_like.nn.linear import Linear, stacked_weights
from credit_like.nn.norms import ChannelNorm
from credit_like.nn.place import WHOLE
from credit_like.nn.spectral_norm import normalised_together

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
        if self.offsets.is_meta:
            return  # there are no values, and torch would import its compiler to find shapes
        w = self.window
        reach = w - 1 if self.position_index == "exact" else w
        axis = torch.arange(-reach, reach + 1)
        offsets = torch.cartesian_prod(axis, axis)[: (2 * w - 1) ** 2]
        self.offsets.copy_(offsets)
        position = torch.arange(w)
        delta = position[:, None] - position[None, :] + w - 1
        self.index.copy_((delta[:, None, :, None] * (2 * w - 1) + delta[None, :, None, :]).reshape(-1))

    def forward(self, table_N: Tensor | None = None) -> Tensor:
        """Return the biases as (w^2, w^2); rows are queries. `table_N`: from `position_tables`, if it computed one."""
        if table_N is None:
            return ops.of_weights(self, lambda: self._of_pairs(_mlps(_stacked([self]))[0]))
        return self._of_pairs(table_N)

    def _of_pairs(self, table_N: Tensor) -> Tensor:
        """Return the table's entry for each pair of tokens, (w^2, w^2)."""
        pairs: Tensor = _OfPairs.apply(table_N, self.index, self.window)
        return pairs


class _OfPairs(torch.autograd.Function):
    """The table's entry for each pair of tokens; backward adds the gradients of an entry in a fixed order.

    On a GPU the gradient of an indexed read adds in an order that varies, in a kernel of its own.
    """

    @staticmethod
    def forward(ctx: Any, table_N: Tensor, index: Tensor, window: int) -> Tensor:
        ctx.window, ctx.entries = window, len(table_N)
        return table_N.index_select(0, index).view(window**2, window**2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        w = ctx.window
        # Row offsets of query i and key j are i + (w - 1 - j): with keys in reverse order, i + j. The same holds for columns.
        sums = _skewed(grad.view(w, w, w, w).flip(2, 3).permute(0, 2, 1, 3), 0)
        table_N = _skewed(sums, 2).sum((0, 2)).flatten()
        return nn.functional.pad(table_N, (0, ctx.entries - len(table_N))), None, None


def _skewed(x: Tensor, dim: int) -> Tensor:
    """Return y[i, i + j] = x[i, j] in dimensions dim and dim + 1, (w, w) -> (w, 2 w - 1), zero elsewhere."""
    w = x.shape[dim]
    padded = nn.functional.pad(x, [0, 0] * (x.ndim - dim - 2) + [0, w])
    return padded.flatten(dim, dim + 1).narrow(dim, 0, w * (2 * w - 1)).unflatten(dim, (w, 2 * w - 1))


def position_tables(*biases: PositionBias | None, mlps: PositionMLPs | None = None) -> list[Tensor | None]:
    """Return the tables of several biases of one width, computed together; None for those that compute their own.

    A table has few numbers, so that on a GPU its time is that of launching kernels. The biases may have windows of
    different sizes. `mlps` computes them from the stacked parameters; it may be compiled.
    """
    present = [bias for bias in biases if bias is not None]
    if not present or any(ops.keeps_of_weights(bias) for bias in present):
        return [None] * len(biases)
    tables = list((mlps or _mlps)(_stacked(present)).unbind())[::-1]
    return [None if bias is None else tables.pop() for bias in biases]


class PositionTables(Layer):
    """The tables of the position biases of a stage, computed together (see `position_tables`).

    It has no parameters of its own: it reads those of the biases.
    """

    together = True
    """Whether it computes them; FSDP2 gathers the parameters of a layer for that layer alone, which then computes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = PositionMLPs()

    def forward(self, *biases: PositionBias | None) -> list[Tensor | None]:
        """Return the table of each bias; None for those that compute their own."""
        return position_tables(*biases, mlps=self.mlps) if self.together else [None] * len(biases)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile what is computed from the stacked parameters; compiled, stacking them would be a copy of each."""
        self.mlps.compile(*args, **options)


class _Stacked(NamedTuple):
    """What the tables of n biases are computed from: the offsets (n, N, 2) and the parameters, each of shape (n, …)."""

    offsets: Tensor
    weights: list[Tensor]
    states: list[list[Tensor]]
    """Of the spectral norms, as `stacked_weights` returns them."""
    shifts: list[Tensor]
    norm_scales: list[Tensor]
    norm_shifts: list[Tensor]


def _stacked(biases: Sequence[PositionBias]) -> _Stacked:
    """Return the parameters of several biases together.

    Smaller tables have further entries at the end, which no pair of tokens reads.
    """
    longest = max(len(bias.offsets) for bias in biases)
    padded: dict[tuple[int, str], Tensor] = {}
    for bias in biases:
        kind, missing = (bias.window, bias.position_index), longest - len(bias.offsets)
        if kind not in padded:
            padded[kind] = nn.functional.pad(bias.offsets, (0, 0, 0, missing)) if missing else bias.offsets
    linears = list(zip(*(bias.linears for bias in biases), strict=True))
    norms = list(zip(*(bias.norms for bias in biases), strict=True))
    weights, states = zip(*map(stacked_weights, linears), strict=True)
    return _Stacked(
        ops.stacked([padded[bias.window, bias.position_index] for bias in biases]),
        list(weights),
        list(states),
        [ops.stacked([layer.bias for layer in layers]) for layers in linears],
        [ops.stacked([norm.weight for norm in each]) for each in norms],
        [ops.stacked([norm.bias for norm in each]) for each in norms],
    )


class PositionMLPs(Layer):
    """The MLPs of several position biases, with their parameters as the argument."""

    def forward(self, stacked: _Stacked) -> Tensor:
        """Return the entries of each table (n, N)."""
        return _mlps(stacked)


def _mlps(stacked: _Stacked) -> Tensor:
    """Return the entries of each table: the MLPs of all biases n at once, (n, N, 2) -> (n, N, d) -> ... -> (n, N).

    Matrix products with 2 inputs or 1 output are sums, which the compiler joins with the operations around them.
    """
    weights = [
        normalised_together(weight, *state) if state else weight
        for weight, state in zip(stacked.weights, stacked.states, strict=True)
    ]
    shifts = [shift[:, None] for shift in stacked.shifts]
    x_nNd = (stacked.offsets.to(weights[0].dtype)[:, :, None] * weights[0][:, None]).sum(-1) + shifts[0]
    for step, norm in enumerate(zip(stacked.norm_scales, stacked.norm_shifts, strict=True), 1):
        scale, shift = (each[:, None] for each in norm)
        x_nNd = nn.functional.relu(
            nn.functional.layer_norm(x_nNd, x_nNd.shape[-1:], eps=ChannelNorm.eps) * scale + shift
        )
        if step < 3:
            x_nNd = torch.baddbmm(shifts[step], x_nNd, weights[step].mT)
    return (x_nNd * weights[3]).sum(-1) + shifts[3][..., 0]


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

    def forward(self, x_BHWC: Tensor, key_B: Tensor | None = None, table_N: Tensor | None = None) -> Tensor:
        """Apply the block to (B, H, W, C); the shape stays the same.

        `key_B` selects what dropout drops; `table_N` is the table of the position bias, if it is computed already.
        """
        mask_BHWC = self._mask(x_BHWC, key_B) if self.dropout and key_B is not None else None
        if self.bias is None:
            values = self._values(self.norm(x_BHWC))
            if mask_BHWC is not None:
                values = values * mask_BHWC.repeat_interleave(self.dim_head, -1) * gain(self.dropout)
            return x_BHWC + self.out(values)
        return ops.attention_block(
            x_BHWC,
            self.norm,
            self.qkv,
            self.out,
            self.bias(table_N),
            self.window,
            self.dim_head,
            dilated=self.dilated,
            mask_BHWC=mask_BHWC,
            gain=gain(self.dropout),
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
