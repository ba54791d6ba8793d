"""Strided convolutions with wide kernels through the discrete Fourier transform of overlapping tiles (overlap-save).

A kernel of K x K taps and stride s is split into its s^2 phases: a correlation with stride 1 and n x n taps, n = ceil(K/s), of an
image with s^2 C channels. The phase image is cut into tiles of T x T points that overlap by n - 1, and for each tile

    y = IDFT( DFT(x) conj(DFT(w)) ),  of which the first m x m points, m = T - n + 1, are the correlation.

The products are matrix products over channels, one per frequency. The transforms are matrix products with cosine and
sine matrices as well: tiles are short, and neither strided reads nor reordering is needed. Only frequencies 0..T/2 of
the first axis are computed, because the others are their conjugates. Both gradients follow from the same identities:

    dw = IDFT( DFT(x) conj(DFT(g)) ) on the n x n taps,  dx = IDFT( DFT(g) DFT(w) ), overlapping tiles added.

Legend: B batch, P Q rows and columns of the phase image, D = s^2 C channels, O outputs, F = T/2 + 1, R = 2 (real, imaginary part).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

TILES = (16, 24, 32, 40, 48, 56, 64)
MOST_BYTES = 16 * 2**20  # limit for the transformed tiles held at a time, and roughly for the transformed weights
AT_ONCE = 2**18  # values of a transform along the first axis that are transformed along the second at a time
PARTS = 3  # parts of the channels, processed one after another in the gradient of the weights


def tile_size(rows: int, columns: int, taps: int, channels: int, outputs: int) -> int:
    """Return the tile size with the least arithmetic for rows x columns outputs."""
    candidates = [t for t in TILES if t > taps] or [2 * taps + 2 * (taps % 2)]
    return min(candidates, key=lambda t: cost(rows, columns, taps, channels, outputs, t))


def cost(rows: int, columns: int, taps: int, channels: int, outputs: int, tile: int) -> float:
    """Return the number of operations of a forward: transforms of image and weights, products per frequency."""
    step, half = tile - taps + 1, tile // 2 + 1
    tiles = math.ceil(rows / step) * math.ceil(columns / step)
    image = tiles * channels * (4 * half * tile * step + 8 * half * tile * tile)
    weights = channels * outputs * (4 * half * taps * taps + 8 * half * tile * taps)
    return image + weights + tiles * 8 * half * tile * channels * outputs


@functools.lru_cache(maxsize=64)
def _waves(tile: int, points: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of 2 pi k i / T, each (T, points): the real and minus the imaginary part of the transform."""
    k, i = torch.arange(tile, dtype=torch.int64), torch.arange(points, dtype=torch.int64)
    angle = (torch.outer(k, i) % tile).double() * (2 * math.pi / tile)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


@functools.lru_cache(maxsize=64)
def _half_waves(tile: int, points: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (F, R, points), cos and -sin, for the axis of which half the frequencies are computed."""
    cos, sin = _waves(tile, points, dtype, device)
    half = tile // 2 + 1
    return torch.stack([cos[:half], -sin[:half]], dim=1)


@functools.lru_cache(maxsize=64)
def _turns(tile: int, points: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return cos - i sin as a real matrix (R T, R points), [[cos, sin], [-sin, cos]].

    Its transpose is cos + i sin.
    """
    cos, sin = _waves(tile, points, dtype, device)
    return torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])


def _second_axis(z_NSD: Tensor, tile: int, out_RNTD: Tensor) -> None:
    """Write the complex transform along the second axis into `out_RNTD`.

    S holds the real parts of the points followed by their imaginary parts.
    """
    turns = _turns(tile, z_NSD.shape[1] // 2, z_NSD.dtype, z_NSD.device)
    for half_of_turns, out_NTD in zip(turns.chunk(2), out_RNTD, strict=True):
        torch.bmm(half_of_turns.expand(len(z_NSD), -1, -1), z_NSD, out=out_NTD)


def _inverse(y_FTRD: Tensor, rows: int, columns: int) -> Tensor:
    """Return the first rows x columns points of the real image with this transform, (rows, columns, D)."""
    half, tile, _, channels = y_FTRD.shape
    of_real, of_imaginary = _turns(tile, columns, y_FTRD.dtype, y_FTRD.device).t().expand(half, -1, -1).chunk(2, dim=2)
    z = torch.bmm(of_real, y_FTRD[:, :, 0]).baddbmm_(of_imaginary, y_FTRD[:, :, 1])
    # The omitted frequencies are conjugates: all but 0 (and T/2, which is its own conjugate) count twice.
    weight = y_FTRD.new_full((half, 1, 1), 2.0 / tile**2)
    weight[0] = weight[half - 1] = 1.0 / tile**2
    waves = (_half_waves(tile, rows, y_FTRD.dtype, y_FTRD.device) * weight).flatten(0, 1)
    return (waves.t() @ z.view(2 * half, -1)).view(rows, columns, channels)


def _phase(size: int, stride: int, count: int, first: int) -> tuple[slice, slice]:
    """Return which of the `count` points first, first + s, … lie in 0..size - 1, and their positions, as two slices."""
    start = max(0, -(first // stride))
    stop = max(start, min(count, -((first - size) // stride)))
    return slice(start, stop), slice(first + start * stride, first + stop * stride, stride)


Geometry = tuple[
    int, int, int, tuple[int, int]
]  # stride, rows and columns of the phase image, zero rows and columns before


def _parts(
    height: int, width: int, geometry: Geometry
) -> Iterator[tuple[tuple[slice, slice, int, int], tuple[slice, slice]]]:
    """Yield, for each phase, its place in the phase image (rows, columns, p, q) and in the image (rows, columns)."""
    stride, rows, columns, before = geometry
    for p, q in itertools.product(range(stride), repeat=2):
        row_to, row_from = _phase(height, stride, rows, p - before[0])
        column_to, column_from = _phase(width, stride, columns, q - before[1])
        yield (row_to, column_to, p, q), (row_from, column_from)


def phases(x_BHWC: Tensor, stride: int, rows: int, columns: int, before: tuple[int, int]) -> Tensor:
    """Return the phase image (B, rows, columns, s^2 C) of an image with `before` zero rows and columns.

    Its end is filled with zeros, or cropped.
    """
    batch, height, width, channels = x_BHWC.shape
    out = x_BHWC.new_zeros(batch, rows, columns, stride, stride, channels)
    for there, here in _parts(height, width, (stride, rows, columns, before)):
        out[:, *there] = x_BHWC[:, *here]
    return out.flatten(3)


def from_phases(g_BPQD: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """Return the gradient of an image of this shape, given the gradient of its phase image."""
    dx, g = g_BPQD.new_zeros(shape), g_BPQD.unflatten(-1, (geometry[0], geometry[0], -1))
    for there, here in _parts(shape[1], shape[2], geometry):
        dx[:, *here] = g[:, *there]
    return dx


class _TiledCorrelation(torch.autograd.Function):
    """Correlation in tiles: (B, P, Q, D) and (n, n, D, O) to (B, P - n + 1, Q - n + 1, O).

    With a geometry, it correlates the phases of an image (B, H, W, C).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_nnDO: Tensor, tile: int, geometry: Geometry | None) -> Tensor:
        ctx.save_for_backward(x, w_nnDO)
        ctx.tile, ctx.geometry = tile, geometry
        parts = w_nnDO.chunk(max(1, _bytes(w_nnDO[0, 0], tile) // MOST_BYTES), 2)
        return _correlate(
            x, (transform_weights(part, tile) for part in parts), (len(w_nnDO), w_nnDO.shape[-1]), tile, geometry
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BPQO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w_nnDO = ctx.saved_tensors
        x_BPQD = phases(x, *ctx.geometry) if ctx.geometry else x
        dx = _input_gradient(g_BPQO, x_BPQD, w_nnDO, ctx.tile) if ctx.needs_input_grad[0] else None
        dw = _weight_gradient(g_BPQO, x_BPQD, w_nnDO, ctx.tile) if ctx.needs_input_grad[1] else None
        if dx is not None and ctx.geometry:
            dx = from_phases(dx, x.shape, ctx.geometry)
        return dx, dw, None, None


def _input_gradient(g_BPQO: Tensor, x_BPQD: Tensor, w_nnDO: Tensor, tile: int) -> Tensor:
    """Return dx, the sum of overlapping tiles."""
    taps = w_nnDO.shape[0]
    dx, w_RKOD = torch.zeros_like(x_BPQD), transform_weights(w_nnDO, tile).transpose(-1, -2)
    for group in _groups(x_BPQD, taps, tile):
        g_RNKO = _transform_tiles(g_BPQO, group, tile, size=tile - taps + 1)
        images = _inverse_tiles(_multiply(g_RNKO, w_RKOD, conjugate=False), tile, tile, tile)
        for image, (b, top, left) in zip(images, group, strict=True):
            part = dx[b, top : top + tile, left : left + tile]
            part += image[: part.shape[0], : part.shape[1]]
    return dx


def _weight_gradient(g_BPQO: Tensor, x_BPQD: Tensor, w_nnDO: Tensor, tile: int) -> Tensor:
    """Return dw, computed for some of the channels of x at a time.

    This limits memory, because there is one value for each frequency and weight.
    """
    taps, outputs, half = w_nnDO.shape[0], w_nnDO.shape[-1], tile // 2 + 1
    dw = torch.empty_like(w_nnDO)
    parts = x_BPQD.chunk(PARTS, -1)
    groups = _groups(parts[0], taps, tile)
    conjugates = []  # as real matrices that map real and imaginary parts of x to those of the product
    for group in groups:
        g_RNKO = _transform_tiles(g_BPQO, group, tile, size=tile - taps + 1)
        g_RNKQ = torch.stack([g_RNKO, torch.stack([-g_RNKO[1], g_RNKO[0]])], dim=3).flatten(3)
        conjugates.append(_rows(g_RNKQ).transpose(1, 2))
    for x_BPQE, out in zip(parts, dw.chunk(PARTS, 2), strict=True):
        w_KQE = x_BPQD.new_empty(half * tile, 2 * outputs, out.shape[2])
        for i, (group, conjugate) in enumerate(zip(groups, conjugates, strict=True)):
            w_KQE.baddbmm_(conjugate, _rows(_transform_tiles(x_BPQE, group, tile)), beta=min(i, 1))
        inverse = _inverse(w_KQE.view(half, tile, 2, -1), taps, taps)
        out.copy_(inverse.view(taps, taps, outputs, -1).transpose(2, 3))
    return dw


def transform_weights(w_nnDO: Tensor, tile: int) -> Tensor:
    """Transform weights (n, n, D, O) to (R, F T, D, O)."""
    taps, _, channels, outputs = w_nnDO.shape
    half = tile // 2 + 1
    first = _half_waves(tile, taps, w_nnDO.dtype, w_nnDO.device).flatten(0, 1) @ w_nnDO.reshape(taps, -1)
    out = w_nnDO.new_empty(2, half, tile, channels * outputs)
    _second_axis(first.view(half, 2 * taps, -1), tile, out)
    return out.view(2, -1, channels, outputs)


def _bytes(values: Tensor, tile: int) -> int:
    """Return the size in bytes of the transforms of tiles with this many values per point."""
    return 2 * (tile // 2 + 1) * tile * values.numel() * values.element_size()


Tile = tuple[int, int, int]  # batch item, first row, first column


def _groups(x_BPQD: Tensor, taps: int, tile: int) -> list[list[Tile]]:
    """Return all tiles, in groups whose transforms fit in `MOST_BYTES`."""
    batch, rows, columns, _ = x_BPQD.shape
    step = tile - taps + 1
    tiles = [
        (b, top, left)
        for b in range(batch)
        for top in range(0, rows - taps + 1, step)
        for left in range(0, columns - taps + 1, step)
    ]
    count = max(1, MOST_BYTES // _bytes(x_BPQD[0, 0, :1], tile))
    return [tiles[i : i + count] for i in range(0, len(tiles), count)]


def _transform_tiles(x_BPQD: Tensor, group: list[Tile], tile: int, size: int | None = None) -> Tensor:
    """Return the transforms (R, N, F T, D) of a group of tiles, each of `size` (default T) points squared."""
    size = size or tile
    channels, half = x_BPQD.shape[-1], tile // 2 + 1
    out = x_BPQD.new_empty(2, len(group), half, tile, channels)
    most = max(1, AT_ONCE // (2 * half * size * channels))
    for first in range(0, len(group), most):
        tiles = group[first : first + most]
        z = x_BPQD.new_empty(len(tiles), half, 2, size, channels)
        for z_FRQD, (b, top, left) in zip(z, tiles, strict=True):
            points = x_BPQD[b, top : top + size, left : left + size]
            rows, columns, _ = points.shape
            waves = _half_waves(tile, rows, x_BPQD.dtype, x_BPQD.device).flatten(0, 1)
            torch.mm(waves, points.reshape(rows, -1), out=z_FRQD.flatten(0, 1)[:, :columns].flatten(1))
            z_FRQD[:, :, columns:] = 0
        _second_axis(z.view(-1, 2 * size, channels), tile, out[:, first : first + len(tiles)].flatten(1, 2))
    return out.view(2, len(group), half * tile, channels)


def _rows(x_RNKD: Tensor) -> Tensor:
    """Return a view (K, R N, D): for each frequency a matrix with one row per part and tile."""
    return x_RNKD.flatten(0, 1).transpose(0, 1)


def _multiply(x_RNKD: Tensor, w_RKDO: Tensor, *, conjugate: bool) -> Tensor:
    """Return x w or x conj(w) for each frequency, (K, R, N, O)."""
    rows = _rows(x_RNKD)
    y = torch.bmm(rows, w_RKDO[0]).unflatten(1, (2, -1))
    other = torch.bmm(rows, w_RKDO[1]).unflatten(1, (2, -1))
    sign = 1 if conjugate else -1
    y[:, 0].add_(other[:, 1], alpha=sign)
    y[:, 1].sub_(other[:, 0], alpha=sign)
    return y


def _inverse_tiles(y_KRNO: Tensor, tile: int, rows: int, columns: int) -> Tensor:
    """Return the first rows x columns points of each tile, (N, rows, columns, O)."""
    _, _, tiles, outputs = y_KRNO.shape
    y_FTRD = y_KRNO.view(-1, tile, 2, tiles * outputs)
    return _inverse(y_FTRD, rows, columns).view(rows, columns, tiles, outputs).permute(2, 0, 1, 3)


def correlate_transformed(x: Tensor, w_RKDO: Tensor, taps: int, tile: int, geometry: Geometry | None = None) -> Tensor:
    """Compute `correlate`, without gradients, with weights already transformed by `transform_weights`."""
    return _correlate(x, [w_RKDO], (taps, w_RKDO.shape[-1]), tile, geometry)


def _correlate(
    x: Tensor, parts: Iterable[Tensor], size: tuple[int, int], tile: int, geometry: Geometry | None
) -> Tensor:
    """Compute `correlate_transformed` with the transformed weights given in parts.

    Each part (R, K, E, O) covers the next E channels. size: (n, O).
    """
    x_BPQD = phases(x, *geometry) if geometry else x
    taps, outputs = size
    batch, rows, columns = x_BPQD.shape[0], x_BPQD.shape[1] - taps + 1, x_BPQD.shape[2] - taps + 1
    step, groups, first = tile - taps + 1, _groups(x_BPQD, taps, tile), 0
    y = x_BPQD.new_zeros(batch, rows, columns, outputs)
    for w_RKEO in parts:
        x_BPQE = x_BPQD[..., first : first + w_RKEO.shape[2]]
        for group in groups:
            y_KRNO = _multiply(_transform_tiles(x_BPQE, group, tile), w_RKEO, conjugate=True)
            for tile_image, (b, top, left) in zip(_inverse_tiles(y_KRNO, tile, step, step), group, strict=True):
                part = y[b, top : top + step, left : left + step]
                part += tile_image[: part.shape[0], : part.shape[1]]
        first += w_RKEO.shape[2]
    return y


def correlate(x: Tensor, w_nnDO: Tensor, tile: int, geometry: Geometry | None = None) -> Tensor:
    """Return the valid correlation with stride 1: (B, P, Q, D), (n, n, D, O) to (B, P - n + 1, Q - n + 1, O).

    With a geometry (the arguments of `phases`) x is an image and its phases are correlated; backward saves the image
    alone.
    """
    y: Tensor = _TiledCorrelation.apply(x, w_nnDO, tile, geometry)
    return y


def frame(weights: list[Tensor], shifts: list[int], taps: int, stride: int) -> Tensor:
    """Return the kernels (O, C, k, k), each shifted into a common frame of n s points, as (n, n, s^2 C, O)."""
    size, channels = taps * stride, weights[0].shape[1]
    framed = []
    for weight, shift in zip(weights, shifts, strict=True):
        after = size - shift - weight.shape[-1]
        framed.append(torch.nn.functional.pad(weight, (shift, after, shift, after)))
    w = torch.cat(framed).view(-1, channels, taps, stride, taps, stride)
    return w.permute(2, 4, 3, 5, 1, 0).reshape(taps, taps, stride * stride * channels, -1)
