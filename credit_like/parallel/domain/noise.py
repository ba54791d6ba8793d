"""Domain layer of the noise. Tensors are (B, H, W, C)."""

from __future__ import annotations

from collections.abc import Sequence

from credit_like.nn import noise
from credit_like.parallel.domain.layer import DomainLayer, Sizes, domain_layer
from credit_like.parallel.domain.manager import ROWS, DomainManager


@domain_layer(noise.Noise)
class DomainNoise(DomainLayer, noise.Noise):
    """Noise of a band: that of its rows in the whole image. Nothing is exchanged."""

    columns = False

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        self.first_row = manager.places(sizes)[ROWS].first


@domain_layer(noise.NormNoise)
class DomainNormNoise(DomainNoise, noise.NormNoise):
    """Noise of the norms of a band."""
