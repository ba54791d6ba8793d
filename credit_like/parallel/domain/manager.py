"""The bands of a domain-parallel model along each axis of the image, and the exchange plans between them.

The domain ranks form a grid of rows x columns: a rank has a band of latitude rows and, of these, a band of longitude
columns. An exchange along one axis involves only the ranks that share its band of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from credit_like import bands as partition
from credit_like.bands import Band, Level
from credit_like.errors import UserError
from credit_like.nn.place import Place
from credit_like.parallel.domain.rows import RowPlan, fetch_rows, make_plan
from credit_like.parallel.mesh import limited

ROWS, COLUMNS = 0, 1
"""The axes of an image, in the order of its dimensions."""


class Axis:
    """One axis of the image, in bands: `rank` is this rank's place among the `size` ranks along the axis.

    `length` is that of the model's input along the axis.
    """

    def __init__(
        self, group: ProcessGroup | None, rank: int, size: int, length: int, levels: dict[int, Level] | None = None
    ) -> None:
        self.group, self.rank, self.size, self.length, self.levels = group, rank, size, length, levels or {}

    def bands(self, length: int) -> list[Band]:
        """Return the band of every rank in an image of this length, the same wherever this length occurs."""
        level = self.levels.get(length, Level(length))
        return partition.bands(length, level.unit, self.size)

    def own(self, length: int) -> Band:
        """Return this rank's band in an image of this length."""
        return self.bands(length)[self.rank]

    def lists(self, length: int) -> list[list[int]]:
        """Return the rows (or columns) of every rank as lists."""
        return [list(range(*band)) for band in self.bands(length)]

    def plan(self, have: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> RowPlan:
        """Return this rank's plan of an exchange."""
        return make_plan(have, want, self.rank)

    def of_chunks(self, chunk: int) -> list[Band]:
        """Return bands of the model's output for every rank that are whole chunks; some are empty where chunks are fewer."""
        count = -(-self.length // chunk)
        return [
            (min(start * chunk, self.length), min(stop * chunk, self.length))
            for start, stop in partition.bands(count, 1, self.size)
        ]

    def plan_to_chunks(self, chunk: int) -> RowPlan:
        """Return the plan by which every rank gets its band of whole chunks of the model's output."""
        return self.plan(self.lists(self.length), [range(*band) for band in self.of_chunks(chunk)])

    @cached_property
    def plan_to_all(self) -> RowPlan:
        """Return the plan that gathers the whole length of the model's output on every rank."""
        return self.plan(self.lists(self.length), [range(self.length)] * self.size)

    def fetch(self, x: Tensor, plan: RowPlan, dim: int) -> Tensor:
        """Fetch the wanted rows (or columns) of x along dimension `dim`."""
        return fetch_rows(x, plan, self.group, dim)


class DomainManager:
    """The axes of one model on one domain mesh of rows x columns ranks; `group` has all of them."""

    def __init__(self, mesh: DeviceMesh, axes: tuple[Axis, Axis]) -> None:
        self.mesh, self.group, self.axes = mesh, mesh.get_group(), axes
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.height, self.width = (axis.length for axis in axes)

    def __deepcopy__(self, memo: dict[int, Any]) -> DomainManager:
        """Return the same object, because a copy of the model uses the same process groups and bands."""
        return self

    def own(self, height: int) -> Band:
        """Return this rank's rows in an image of this height."""
        return self.axes[ROWS].own(height)

    @property
    def rows(self) -> slice:
        """Return this rank's rows of the model's input and output."""
        return slice(*self.own(self.height))

    @property
    def columns(self) -> slice:
        """Return this rank's columns of the model's input and output."""
        return slice(*self.axes[COLUMNS].own(self.width))

    def whole_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows with all columns, given its part (…, h, w) of the model's output. Differentiable.

        Collective among the ranks that share these rows, and x itself where columns are not shared.
        """
        columns = self.axes[COLUMNS]
        return x if columns.size == 1 else columns.fetch(x, columns.plan_to_all, x.ndim - 1)

    def places(self, sizes: Sequence[tuple[int, int] | None]) -> tuple[Place, Place]:
        """Return where this rank's rows and columns of an image of these sizes lie; along an axis without size, all are here."""
        rows, columns = (
            Place(axis.own(of[0])[0], of[0]) if of else Place() for axis, of in zip(self.axes, sizes, strict=True)
        )
        return rows, columns


def get_domain_manager(model: nn.Module) -> DomainManager | None:
    """Return the manager of a domain-parallel model, through any wrapper; None without domain parallelism."""
    for module in model.modules():
        manager = getattr(module, "_domain_manager", None)
        if isinstance(manager, DomainManager):
            return manager
    return None


def make_axes(
    mesh: DeviceMesh, shape: tuple[int, int], lengths: tuple[int, int], levels: Sequence[dict[int, Level] | None]
) -> tuple[Axis, Axis]:
    """Return the axes of a mesh whose ranks form a grid of `shape` = (rows, columns), the columns of a row next to one another.

    Raises UserError where the mesh does not have as many ranks.
    """
    if shape[ROWS] * shape[COLUMNS] != mesh.size():
        raise UserError(
            f"trainer.parallelism.domain: expected rows x columns = {mesh.size()} ranks, got {shape[ROWS]} x {shape[COLUMNS]}"
        )
    places = divmod(mesh.get_local_rank(), shape[COLUMNS])
    groups: list[ProcessGroup | None] = [mesh.get_group() if size == mesh.size() > 1 else None for size in shape]
    if min(shape) > 1:
        grid = limited(mesh._unflatten(0, shape, ("domain_rows", "domain_columns")))
        groups = [grid.get_group("domain_rows"), grid.get_group("domain_columns")]
    rows, columns = (Axis(*each) for each in zip(groups, places, shape, lengths, levels, strict=True))
    return rows, columns
