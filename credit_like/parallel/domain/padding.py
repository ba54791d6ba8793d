"""Domain layers of the paddings. Tensors are (B, C, H, W)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from credit_like.nn import padding
from credit_like.parallel.domain.layer import DomainLayer, Sizes, domain_layer
from credit_like.parallel.domain.manager import COLUMNS, ROWS, Axis, DomainManager
from credit_like.parallel.domain.rows import RowPlan


@domain_layer(padding.Pad)
class DomainPad(DomainLayer, padding.Pad):
    """Padding on a band, with one exchange along each axis.

    Each rank fetches the image rows that its padded rows copy: mirrored ones at the poles, neighbours' rows if bands
    differ. Then it fetches columns alike; for the rows beyond a pole, those half the globe away.
    """

    row_dim = 2
    turned: tuple[int, int]
    """The number of padded rows beyond the north pole and beyond the south pole that are shifted by half the globe."""
    turned_plan: RowPlan | None

    def plan(self, axis: Axis, size_in: int, size_out: int) -> RowPlan:
        source = [row for row, _ in padding.source_rows(self.mode, size_in, *self.pad_lat)]
        if axis is self.manager.axes[COLUMNS]:
            source = padding.source_columns(self.mode, size_in, *self.pad_lon)
        return self._plan(axis, source, size_in, size_out)

    def _plan(self, axis: Axis, source: Sequence[int], size_in: int, size_out: int) -> RowPlan:
        return axis.plan(axis.lists(size_in), [[source[out] for out in band] for band in axis.lists(size_out)])

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        axes = manager.axes
        of_rows, of_columns = sizes
        of_rows = of_rows or (manager.height, manager.height + sum(self.pad_lat))
        turned = [turn for _, turn in padding.source_rows(self.mode, of_rows[0], *self.pad_lat)]
        here = turned[slice(*axes[ROWS].own(of_rows[1]))]
        north = here.index(False) if False in here else len(here)
        plan = None
        if of_columns:
            source = padding.source_columns(self.mode, of_columns[0], *self.pad_lon)
            half = [(column - of_columns[0] // 2) % of_columns[0] for column in source]
            plan = self._plan(axes[COLUMNS], half, *of_columns)
        plans = (self.plan(axes[ROWS], *of_rows), self.plans[COLUMNS])
        self._set(manager, plans=plans, turned=(north, sum(here) - north), turned_plan=plan)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, h, w) to this rank's rows and columns of the padded image."""
        axes, (rows, columns) = self.manager.axes, self.plans
        assert rows is not None
        y_BCHW = axes[ROWS].fetch(x_BCHW, rows, self.row_dim)
        north, south = self.turned
        parts = list(y_BCHW.split([north, y_BCHW.shape[-2] - north - south, south], dim=-2))
        if columns is None:
            if north == south == 0:
                return self.pad_columns(y_BCHW)
            turn = y_BCHW.shape[-1] // 2
            return self.pad_columns(
                torch.cat([parts[0].roll(turn, dims=-1), parts[1], parts[2].roll(turn, dims=-1)], dim=-2)
            )
        assert self.turned_plan is not None
        plans = (self.turned_plan, columns, self.turned_plan)
        found = [axes[COLUMNS].fetch(part, plan, 3) for part, plan in zip(parts, plans, strict=True) if part.shape[-2]]
        return torch.cat(found, dim=-2) if len(found) > 1 else found[0]


@domain_layer(padding.Unpad)
class DomainUnpad(DomainLayer, padding.Unpad):
    """Removal of padding on a band: each rank fetches the padded rows and columns that are those of its image."""

    row_dim = 2

    def plan(self, axis: Axis, size_in: int, size_out: int) -> RowPlan:
        before = (self.pad_lon if axis is self.manager.axes[COLUMNS] else self.pad_lat)[0]
        return axis.plan(axis.lists(size_in), [[at + before for at in band] for band in axis.lists(size_out)])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, C, this rank's rows, this rank's columns)."""
        (north, south), (west, east) = self.rest(self.pad_lat, self.pad_lon)
        x_BCHW = self.fetch(x_BCHW)
        height, width = x_BCHW.shape[-2:]
        return x_BCHW[..., north : height - south, west : width - east]
