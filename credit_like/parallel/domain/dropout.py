"""Domain layer of dropout. Tensors are (B, H, W, C)."""

from __future__ import annotations

from collections.abc import Sequence

from credit_like.nn import dropout
from credit_like.parallel.domain.layer import DomainLayer, Sizes, domain_layer
from credit_like.parallel.domain.manager import DomainManager


@domain_layer(dropout.Dropout)
class DomainDropout(DomainLayer, dropout.Dropout):
    """Dropout of a band: that of its points in the whole image. Nothing is exchanged."""

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        self.places = manager.places(sizes)
