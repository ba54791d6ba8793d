"""Domain layer of the bilinear resize. Tensors are (B, C, H, W)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_like.bands import Band
from credit_like.nn import resize
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.rows import RowPlan


def source_band(band: Band, height_in: int, height_out: int) -> Band:
    """Return the input rows that output rows [start, stop) need, with a margin for single-precision rounding."""
    rows: NDArray[Any] = np.arange(*band)
    first, last = height_in, 0
    for kind in (np.dtype(np.float32), np.dtype(np.float64)):
        half: Any = kind.type(0.5)
        scale: Any = kind.type(height_in) / kind.type(height_out)
        position = np.maximum((rows.astype(kind) + half) * scale - half, 0)
        first = min(first, int(np.floor(position).min()))
        last = max(last, int(np.floor(position).max()) + 1)
    return first, min(last + 1, height_in)


def interpolate_rows(x_BCHW: Tensor, band: Band, source: Band, height_in: int, height_out: int) -> Tensor:
    """Return output rows `band` of a bilinear resize in latitude, computed from the input rows `source`.

    Coordinates are those of the whole image.
    """
    rows = torch.arange(*band, dtype=torch.float64, device=x_BCHW.device)
    position = ((rows + 0.5) * (height_in / height_out) - 0.5).clamp(min=0)
    below = position.floor()
    fraction = (position - below)[:, None].to(x_BCHW.dtype)
    first = below.long() - source[0]
    second = (below.long() + 1).clamp(max=height_in - 1) - source[0]
    return torch.lerp(x_BCHW.index_select(2, first), x_BCHW.index_select(2, second), fraction)


@domain_layer(resize.BilinearResize)
class DomainBilinearResize(DomainLayer, resize.BilinearResize):
    """Bilinear resize on a band; one exchange fetches the input rows around this rank's output rows."""

    row_dim = 2
    plan: RowPlan

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        sources = [source_band(band, height_in, height_out) for band in manager.bands(height_out)]
        self.band, self.source, self.height_in = manager.own(height_out), sources[manager.rank], height_in
        self._set(manager, plan=manager.plan(manager.lists(height_in), [list(range(*source)) for source in sources]))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, C, this rank's rows, width)."""
        if (self.height_in, x_BCHW.shape[-1]) == (self.height, self.width):
            return x_BCHW
        x_BCHW = self.manager.fetch(x_BCHW, self.plan, 2)
        if x_BCHW.shape[-1] != self.width:
            x_BCHW = resize.bilinear(x_BCHW, (x_BCHW.shape[-2], self.width))
        if self.height_in == self.height:
            return x_BCHW[..., self.band[0] - self.source[0] : self.band[1] - self.source[0], :]
        return interpolate_rows(x_BCHW, self.band, self.source, self.height_in, self.height)
