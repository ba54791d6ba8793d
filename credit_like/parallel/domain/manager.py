"""The bands of rows of a domain-parallel model at every level, and the exchange plans between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from credit_like import bands as partition
from credit_like.bands import Band, Level
from credit_like.parallel.domain.rows import RowPlan, fetch_rows, make_plan


class DomainManager:
    """The bands of rows of one model on one domain mesh.

    Raises UserError for a degree that leaves a rank without rows.
    """

    def __init__(self, mesh: DeviceMesh, levels: dict[int, Level], height: int, width: int) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.levels, self.height, self.width = levels, height, width
        partition.check_degree(levels, self.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> DomainManager:
        """Return the same object, because a copy of the model uses the same process group and rows."""
        return self

    def bands(self, height: int) -> list[Band]:
        """Return the rows of every rank in an image of this height, the same wherever this height occurs."""
        level = self.levels.get(height, Level(height))
        return partition.bands(height, level.unit, self.size)

    def own(self, height: int) -> Band:
        """Return this rank's rows in an image of this height."""
        return self.bands(height)[self.rank]

    @property
    def rows(self) -> slice:
        """Return this rank's rows of the model's input and output."""
        return slice(*self.own(self.height))

    def lists(self, height: int) -> list[list[int]]:
        """Return the rows of every rank as lists."""
        return [list(range(*band)) for band in self.bands(height)]

    def plan(self, have: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> RowPlan:
        """Return this rank's plan of an exchange."""
        return make_plan(have, want, self.rank)

    @cached_property
    def plan_to_first(self) -> RowPlan:
        """Return the plan by which the group's first rank gets all rows of the model's output, and the others none."""
        return self.plan(self.lists(self.height), [range(self.height), *[[]] * (self.size - 1)])

    def fetch(self, x: Tensor, plan: RowPlan, dim: int) -> Tensor:
        """Fetch the wanted rows of x along dimension `dim`."""
        return fetch_rows(x, plan, self.group, dim)


def get_domain_manager(model: nn.Module) -> DomainManager | None:
    """Return the manager of a domain-parallel model, through any wrapper; None without domain parallelism."""
    for module in model.modules():
        manager = getattr(module, "_domain_manager", None)
        if isinstance(manager, DomainManager):
            return manager
    return None
