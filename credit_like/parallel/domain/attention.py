"""Domain layers of the window attentions. Tensors are (B, H, W, C)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from credit_like.bands import Level, bands
from credit_like.nn import attention
from credit_like.nn.place import Place
from credit_like.parallel.domain.layer import DomainLayer, PlacedLayer, Sizes, domain_layer
from credit_like.parallel.domain.manager import Axis, DomainManager
from credit_like.parallel.domain.rows import RowPlan


@domain_layer(attention.ShortAttention)
class DomainShortAttention(PlacedLayer, attention.ShortAttention):
    """Short attention on whole windows, so nothing is exchanged."""

    def levels(self, size_in: int, _size_out: int) -> list[Level]:
        return [Level(size_in, self.window, why=f"windows of {self.window} rows")]


@domain_layer(attention.LongAttention)
class DomainLongAttention(DomainLayer, attention.LongAttention):
    """Long attention on a band, with two exchanges along each axis: to whole groups and back.

    A group holds every (H/g)-th row. Each rank takes a contiguous range y of first rows and fetches the rows a H/g + y,
    a = 0..g-1, in this order, and columns alike. They form a smaller image on which the serial layer does the same
    arithmetic.
    """

    back: tuple[RowPlan | None, ...]

    def levels(self, size_in: int, _size_out: int) -> list[Level]:
        if self.window == 1:
            return []
        apart = size_in // self.window
        return [Level(size_in, pieces=apart, why=f"long attention over {self.window} strides of {apart} rows")]

    def _groups(self, axis: Axis, size: int) -> list[list[int]]:
        """Return the rows (or columns) of every rank while the layer computes."""
        if self.window == 1:
            return axis.lists(size)
        apart = size // self.window
        return [
            [a * apart + y for a in range(self.window) for y in range(*share)] for share in bands(apart, 1, axis.size)
        ]

    def plan(self, axis: Axis, size_in: int, _size_out: int) -> RowPlan:
        return axis.plan(axis.lists(size_in), self._groups(axis, size_in))

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        back: list[RowPlan | None] = []
        places = []
        for axis, of in zip(manager.axes, sizes, strict=True):
            if of is None:
                back.append(None)
                places.append(Place())
                continue
            groups = self._groups(axis, of[0])
            back.append(axis.plan(groups, axis.lists(of[0])))
            places.append(Place(groups[axis.rank][0], of[0], self.window, of[0] // self.window))
        self.places = (places[0], places[1])
        self._set(manager, back=tuple(back))

    def forward(self, x_BHWC: Tensor, key_B: Tensor | None = None, table_N: Tensor | None = None) -> Tensor:
        """Apply the block to this rank's part (B, h, w, C); the shape stays the same."""
        return self.fetch(super().forward(self.fetch(x_BHWC), key_B, table_N), self.back)
