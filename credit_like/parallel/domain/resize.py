"""Domain layer of the bilinear resize. Tensors are (B, C, H, W)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_like.bands import Band
from credit_like.nn import resize
from credit_like.parallel.domain.layer import DomainLayer, Sizes, domain_layer
from credit_like.parallel.domain.manager import Axis, DomainManager
from credit_like.parallel.domain.rows import RowPlan


def source_band(band: Band, height_in: int, height_out: int) -> Band:
    """Return the input rows (or columns) that outputs [start, stop) need, with a margin for single-precision rounding."""
    rows: NDArray[Any] = np.arange(*band)
    first, last = height_in, 0
    for kind in (np.dtype(np.float32), np.dtype(np.float64)):
        half: Any = kind.type(0.5)
        scale: Any = kind.type(height_in) / kind.type(height_out)
        position = np.maximum((rows.astype(kind) + half) * scale - half, 0)
        first = min(first, int(np.floor(position).min()))
        last = max(last, int(np.floor(position).max()) + 1)
    return first, min(last + 1, height_in)


def interpolate(x_BCHW: Tensor, dim: int, band: Band, source: Band, size_in: int, size_out: int) -> Tensor:
    """Return outputs `band` of a linear resize along `dim`, computed from the inputs `source`.

    Coordinates are those of the whole image.
    """
    rows = torch.arange(*band, dtype=torch.float64, device=x_BCHW.device)
    position = ((rows + 0.5) * (size_in / size_out) - 0.5).clamp(min=0)
    below = position.floor()
    fraction = (position - below).to(x_BCHW.dtype).view(-1, *[1] * (x_BCHW.ndim - 1 - dim))
    first = below.long() - source[0]
    second = (below.long() + 1).clamp(max=size_in - 1) - source[0]
    return torch.lerp(x_BCHW.index_select(dim, first), x_BCHW.index_select(dim, second), fraction)


@domain_layer(resize.BilinearResize)
class DomainBilinearResize(DomainLayer, resize.BilinearResize):
    """Bilinear resize on a band; an exchange along each axis fetches the inputs around this rank's outputs."""

    row_dim = 2
    sizes: tuple[Sizes | None, ...]
    needs: tuple[tuple[Band, Band] | None, ...]
    """Along each shared axis, this rank's outputs and the inputs that they need."""

    def plan(self, axis: Axis, size_in: int, size_out: int) -> RowPlan:
        sources = [source_band(band, size_in, size_out) for band in axis.bands(size_out)]
        return axis.plan(axis.lists(size_in), [list(range(*source)) for source in sources])

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        needs = [of and needed(axis, *of) for axis, of in zip(manager.axes, sizes, strict=True)]
        self._set(manager, sizes=tuple(sizes), needs=tuple(needs))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, C, this rank's rows, this rank's columns)."""
        before = [of[0] if of else x_BCHW.shape[dim] for dim, of in enumerate(self.sizes, 2)]
        after = (self.height, self.width)
        if tuple(before) == after:
            return x_BCHW
        x_BCHW = self.fetch(x_BCHW)
        if any(of is None and n != m for of, n, m in zip(self.sizes, before, after, strict=True)):
            whole = [m if of is None else n for of, n, m in zip(self.sizes, x_BCHW.shape[2:], after, strict=True)]
            x_BCHW = resize.bilinear(x_BCHW, (whole[0], whole[1]))
        for dim, (need, of) in enumerate(zip(self.needs, self.sizes, strict=True), 2):
            if need is not None and of is not None:
                x_BCHW = resample(x_BCHW, dim, *need, *of)
        return x_BCHW


def needed(axis: Axis, size_in: int, size_out: int) -> tuple[Band, Band]:
    """Return this rank's outputs of a linear resize along an axis, and the inputs that they need."""
    band = axis.own(size_out)
    return band, source_band(band, size_in, size_out)


def resample(x_BCHW: Tensor, dim: int, band: Band, source: Band, size_in: int, size_out: int) -> Tensor:
    """Return outputs `band` of a linear resize along `dim`, given the inputs `source`."""
    if size_in == size_out:
        return x_BCHW.narrow(dim, band[0] - source[0], band[1] - band[0])
    return interpolate(x_BCHW, dim, band, source, size_in, size_out)
