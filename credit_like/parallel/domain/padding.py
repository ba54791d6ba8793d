"""Domain layers of the paddings. Tensors are (B, C, H, W)."""

from __future__ import annotations

import torch
from torch import Tensor

from credit_like.nn import padding
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.rows import RowPlan


@domain_layer(padding.Pad)
class DomainPad(DomainLayer, padding.Pad):
    """Padding on a band, with one exchange.

    Each rank fetches the image rows that its padded rows copy: mirrored ones at the poles, neighbours' rows if bands
    differ. The shift by half the globe and the padding of columns are local.
    """

    row_dim = 2
    plan: RowPlan

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        source = padding.source_rows(self.mode, height_in, *self.pad_lat)
        want = [[source[row][0] for row in rows] for rows in manager.lists(height_out)]
        start, stop = manager.own(height_out)
        turned = [source[row][1] for row in range(start, stop)]
        north = turned.index(False) if False in turned else len(turned)
        self.turned = (north, sum(turned) - north)
        self._set(manager, plan=manager.plan(manager.lists(height_in), want))

    def pad_rows(self, x_BCHW: Tensor) -> Tensor:
        """Pad latitude only and return this rank's padded rows."""
        y_BCHW = self.manager.fetch(x_BCHW, self.plan, 2)
        north, south = self.turned
        if north == south == 0:
            return y_BCHW
        turn, height = y_BCHW.shape[-1] // 2, y_BCHW.shape[-2]
        first, middle, last = y_BCHW.split([north, height - north - south, south], dim=-2)
        return torch.cat([first.roll(turn, dims=-1), middle, last.roll(turn, dims=-1)], dim=-2)


@domain_layer(padding.Unpad)
class DomainUnpad(DomainLayer, padding.Unpad):
    """Removal of padding on a band, with one exchange.

    Each rank fetches the padded rows that are its image rows; columns are cropped locally.
    """

    row_dim = 2
    plan: RowPlan

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        want = [[row + self.pad_lat[0] for row in rows] for rows in manager.lists(height_out)]
        self._set(manager, plan=manager.plan(manager.lists(height_in), want))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, h, W) to (B, C, this rank's rows, W - west - east)."""
        west, east = self.pad_lon
        return self.manager.fetch(x_BCHW, self.plan, 2)[..., west : x_BCHW.shape[-1] - east]
