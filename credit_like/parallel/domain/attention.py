"""Domain layers of the window attentions. Tensors are (B, H, W, C)."""

from __future__ import annotations

from torch import Tensor

from credit_like.bands import Level, bands
from credit_like.nn import attention
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.rows import RowPlan


@domain_layer(attention.ShortAttention)
class DomainShortAttention(DomainLayer, attention.ShortAttention):
    """Short attention on a band, which consists of whole windows, so nothing is exchanged."""

    def levels(self, height_in: int, _height_out: int) -> list[Level]:
        return [Level(height_in, self.window, why=f"windows of {self.window} rows")]

    def bind(self, manager: DomainManager, height_in: int, _height_out: int) -> None:
        self._set(manager)
        self.first_row = manager.own(height_in)[0]


@domain_layer(attention.LongAttention)
class DomainLongAttention(DomainLayer, attention.LongAttention):
    """Long attention on a band, with two exchanges: to whole groups and back.

    A group holds every (H/g)-th row. Each rank takes a contiguous range y of first rows and fetches the rows a H/g + y,
    a = 0..g-1, in this order. They form an image of fewer rows on which the serial layer does the same arithmetic.
    """

    there: RowPlan
    back: RowPlan

    def levels(self, height_in: int, _height_out: int) -> list[Level]:
        if self.window == 1:
            return []
        apart = height_in // self.window
        return [Level(height_in, pieces=apart, why=f"long attention over {self.window} strides of {apart} rows")]

    def bind(self, manager: DomainManager, height_in: int, _height_out: int) -> None:
        here, apart = manager.lists(height_in), height_in // self.window
        shares = bands(apart, 1, manager.size)
        groups = [[a * apart + y for a in range(self.window) for y in range(*share)] for share in shares]
        if self.window == 1:
            groups = here
        self.first_row = groups[manager.rank][0]
        self.strides = (self.window, apart)
        self._set(manager, there=manager.plan(here, groups), back=manager.plan(groups, here))

    def forward(self, x_BHWC: Tensor, key_B: Tensor | None = None, table_N: Tensor | None = None) -> Tensor:
        """Apply the block to this rank's rows (B, h, W, C); the shape stays the same."""
        x_BHWC = self.manager.fetch(x_BHWC, self.there, 1)
        return self.manager.fetch(super().forward(x_BHWC, key_B, table_N), self.back, 1)
