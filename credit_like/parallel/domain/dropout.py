"""Domain layer of dropout. Tensors are (B, H, W, C)."""

from __future__ import annotations

from credit_like.nn import dropout
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import DomainManager


@domain_layer(dropout.Dropout)
class DomainDropout(DomainLayer, dropout.Dropout):
    """Dropout of a band: that of its rows in the whole image. Nothing is exchanged."""

    def bind(self, manager: DomainManager, height_in: int, _height_out: int) -> None:
        self._set(manager)
        self.first_row = manager.own(height_in)[0]
