"""3 x 3 convolutions with a quarter of the multiplications.

The algorithm is due to Winograd (1980); this is F(4 x 4, 3 x 3) of Lavin & Gray, arXiv:1509.09308.

Four output points along an axis depend on six input points through three taps. Treated as products of polynomials,
given by their values at six points instead of their coefficients, this takes 6 multiplications instead of 12, and along
both axes 36 instead of 144:

    y = A^T ( (G w) * (B^T x) ),   A^T (16, 36), G (36, 9), B^T (36, 36),

where x is a tile of 6 x 6 points, y one of 4 x 4, and each of the 36 * is a matrix product over channels. Both
gradients follow: dx is the correlation of dy with the taps reversed and transposed, and dw = G^T ( (A dy) * (B^T x) ).

A few rows of tiles are processed at a time, so that they stay in the CPU cache. Channels are padded with zeros to a
multiple of 8, for which matrix products are faster. Legend: K the 36 points, N M rows and columns of tiles, T their
number.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from credit_like.ops.cpu import direct
from credit_like.ops.cpu.function import apply_function
from credit_like.ops.windows import Pair

POINTS = (0.0, 1.0, -1.0, 2.0, -0.5)  # and infinity: of small points, these give the smallest rounding errors
ONE = POINTS.index(1.0)
OUT, TAPS = 4, 3
IN = OUT + TAPS - 1
STRIP = 2**19  # values of the tiles that are processed at a time
LANES = 8


@functools.lru_cache(maxsize=16)
def _matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return B^T (36, 36), G (36, 9), A^T (16, 36).

    They are the transposed product of polynomials of 3 and 4 coefficients, evaluated at the points.
    """
    powers = torch.tensor(POINTS, dtype=torch.float64)[:, None] ** torch.arange(IN)

    def values(count: int) -> Tensor:
        at_infinity = torch.eye(count, dtype=torch.float64)[-1:]
        return torch.cat([powers[:, :count], at_infinity])

    b_t = torch.linalg.inv(values(IN)).t()
    scale = b_t.abs().amax(1, keepdim=True)  # the scales of the two factors cancel
    along_an_axis = (b_t / scale, values(TAPS) * scale, values(OUT).t())
    b_t, g, a_t = (torch.kron(m, m).to(dtype) for m in along_an_axis)
    return b_t, g, a_t


def _filled(channels: int) -> int:
    return -(-channels // LANES) * LANES


class _Strips:
    """Strips of `count` tiles side by side and at most `most` rows of tiles."""

    def __init__(self, rows: int, columns: int, channels: int) -> None:
        self.rows, self.count, self.channels = -(-rows // OUT), -(-columns // OUT), channels
        parts = -(-self.rows // max(1, STRIP // (IN**2 * self.count * channels)))
        self.most = -(-self.rows // parts)

    def memory(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return two buffers: for the tiles of a strip and for their transforms."""
        size = IN**2 * self.most * self.count * self.channels
        return like.new_empty(size), like.new_empty(size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (first row of tiles, rows of tiles) for each strip."""
        return ((first, min(self.most, self.rows - first)) for first in range(0, self.rows, self.most))


class _Tiles:
    """The overlapping tiles of an image (B, H, W, C) with zeros around it."""

    def __init__(self, image: Tensor, size: int, strips: _Strips) -> None:
        self.image, self.size, self.strips = image, size, strips
        reach = size - OUT  # rows of a tile beyond its output
        channels = _filled(image.shape[-1])
        self.slab = image.new_zeros(OUT * strips.most + reach, OUT * strips.count + reach, channels)

    def __call__(self, memory: Tensor, item: int, first: int, rows: int, before: Pair = (0, 0)) -> Tensor:
        """Return `rows` rows of tiles starting at `first`, with `before` zero rows and columns: (T, size^2, C)."""
        height, width, channels = self.image.shape[1:]
        top, high = OUT * first - before[0], OUT * rows + self.size - OUT
        start = min(high, max(0, -top))
        stop = max(start, min(high, height - top))
        self.slab[:start].zero_()
        self.slab[stop:high].zero_()
        self.slab[start:stop, before[1] : before[1] + width, :channels] = self.image[item, top + start : top + stop]
        down, right = self.slab.stride()[:2]
        shape = (rows, self.strips.count, self.size, self.size, self.slab.shape[-1])
        tiles = self.slab.as_strided(shape, (OUT * down, OUT * right, down, right, 1))
        return _buffer_view(memory, *shape).copy_(tiles).view(-1, self.size**2, shape[-1])


def _buffer_view(memory: Tensor, *shape: int) -> Tensor:
    return memory[: math.prod(shape)].view(shape)


def _combine(matrix_KJ: Tensor, x_TJC: Tensor, memory: Tensor) -> Tensor:
    """Return linear combinations of the J points of each tile, (T, K, C)."""
    tiles, _, channels = x_TJC.shape
    out = _buffer_view(memory, tiles, len(matrix_KJ), channels)
    return torch.bmm(matrix_KJ.expand(tiles, -1, -1), x_TJC, out=out)


def transform_weights(weight: Tensor) -> Tensor:
    """Transform weights (out, in, 3, 3) to (K, in, out), with padded channels."""
    return _taps(weight, _matrices(weight.dtype)[1]).transpose(1, 2)


def _taps(weight: Tensor, g: Tensor) -> Tensor:
    """Return G w: (out, in, 3, 3) to (K, out, in), with padded channels."""
    out, into = weight.shape[:2]
    w = weight.reshape(out * into, TAPS**2).t().contiguous().view(-1, out, into)
    w = pad(w, (0, _filled(into) - into, 0, _filled(out) - out))
    return (g @ w.flatten(1)).view(-1, *w.shape[1:])


def correlate_transformed(
    x_BHWC: Tensor, u_KCO: Tensor, outputs: int, bias: Tensor | None, rows: Pair, columns: Pair
) -> Tensor:
    """Compute `conv3x3`, A^T (u * B^T x), without gradients, with weights transformed by `transform_weights`."""
    b_t, _, a_t = _matrices(x_BHWC.dtype)
    batch, height, width, _ = x_BHWC.shape
    high, wide = height + sum(rows) - TAPS + 1, width + sum(columns) - TAPS + 1
    points, into, out = u_KCO.shape
    strips = _Strips(high, wide, max(into, out))
    tiles, here, there = _Tiles(x_BHWC, IN, strips), *strips.memory(x_BHWC)
    y = x_BHWC.new_empty(batch, OUT * strips.rows, OUT * strips.count, outputs)
    for item, (first, n) in itertools.product(range(batch), strips):
        v_TKC = _combine(b_t, tiles(here, item, first, n, (rows[0], columns[0])), there)
        m_KTO = torch.bmm(v_TKC.transpose(0, 1), u_KCO, out=_buffer_view(here, points, len(v_TKC), out))
        if bias is not None:  # a value at the point (1, 1) is added to every output of the tile
            m_KTO[ONE * IN + ONE, :, :outputs] += bias
        images = _combine(a_t, m_KTO.transpose(0, 1), there).view(n, strips.count, OUT, OUT, out)[..., :outputs]
        y[item, OUT * first : OUT * (first + n)].view(n, OUT, strips.count, OUT, outputs).copy_(images.transpose(1, 2))
    return y[:, :high, :wide].contiguous()


def _weight_gradient(g_BHWO: Tensor, x_BHWC: Tensor, rows: Pair, columns: Pair) -> Tensor:
    """Return G^T ( (A dy) * (B^T x) ), (out, in, 3, 3)."""
    b_t, g, a_t = _matrices(x_BHWC.dtype)
    outputs, channels = g_BHWO.shape[-1], x_BHWC.shape[-1]
    out, into = _filled(outputs), _filled(channels)
    strips = _Strips(g_BHWO.shape[1], g_BHWO.shape[2], max(into, out))
    x_tiles, g_tiles = _Tiles(x_BHWC, IN, strips), _Tiles(g_BHWO, OUT, strips)
    here, there = strips.memory(x_BHWC)
    g_here = x_BHWC.new_empty(OUT**2 * strips.most * strips.count * out)
    du_KOC = x_BHWC.new_empty(IN**2, out, into)
    for i, (item, (first, n)) in enumerate(itertools.product(range(x_BHWC.shape[0]), strips)):
        v_TKC = _combine(b_t, x_tiles(here, item, first, n, (rows[0], columns[0])), there)
        m_TKO = _combine(a_t.t(), g_tiles(g_here, item, first, n), here)
        du_KOC.baddbmm_(m_TKO.permute(1, 2, 0), v_TKC.transpose(0, 1), beta=min(i, 1))
    dw = (g.t() @ du_KOC.flatten(1)).view(-1, out, into)[:, :outputs, :channels]
    return dw.reshape(TAPS**2, -1).t().contiguous().view(outputs, channels, TAPS, TAPS)


class _Conv3x3(torch.autograd.Function):
    """A 3 x 3 convolution that saves its input.

    The weight gradient always uses Winograd's algorithm; the output and the input gradient use it if `forward`.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, pad_rows: Pair, pad_cols: Pair, forward: bool
    ) -> Tensor:
        x_BHWC = x_BHWC.contiguous()
        ctx.save_for_backward(x_BHWC, weight)
        ctx.pads, ctx.forward_too = (pad_rows, pad_cols), forward
        if not forward:
            return direct.convolve(x_BHWC, weight, bias, 1, pad_rows, pad_cols)
        u = transform_weights(weight)
        return correlate_transformed(x_BHWC, u, weight.shape[0], bias, pad_rows, pad_cols)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHWO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x_BHWC, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0] and not ctx.forward_too:
            dx = direct.input_gradient(g_BHWO.contiguous(), x_BHWC, weight, 1, *ctx.pads)
        elif ctx.needs_input_grad[0]:
            u = _taps(weight, _matrices(x_BHWC.dtype)[1].flip(1))  # the taps in reverse order
            rows, columns = ((TAPS - 1 - before, TAPS - 1 - after) for before, after in ctx.pads)
            dx = correlate_transformed(g_BHWO, u, weight.shape[1], None, rows, columns)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(g_BHWO, x_BHWC, *ctx.pads)
        if ctx.needs_input_grad[2]:
            db = g_BHWO.sum((0, 1, 2))
        return dx, dw, db, None, None, None


def conv3x3(
    x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, pad_rows: Pair, pad_cols: Pair, *, forward: bool = True
) -> Tensor:
    """Return a 3 x 3 convolution, stride 1, after adding 0 to 2 zero rows (before, after) and columns.

    weight: (out, in, 3, 3). Without `forward`, torch computes the output and the input gradient, and only the weight
    gradient uses Winograd's algorithm.
    """
    assert all(0 <= pad < TAPS for pad in (*pad_rows, *pad_cols)), (pad_rows, pad_cols)
    return apply_function(_Conv3x3, x_BHWC, weight, bias, pad_rows, pad_cols, forward)
