"""Domain layer of the noise. Tensors are (B, H, W, C)."""

from __future__ import annotations

from collections.abc import Sequence

from credit_like.nn import noise
from credit_like.parallel.domain.layer import DomainLayer, Sizes, domain_layer
from credit_like.parallel.domain.manager import DomainManager


@domain_layer(noise.Noise)
class DomainNoise(DomainLayer, noise.Noise):
    """Noise of a band: that of its points in the whole image. Nothing is exchanged."""

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        self.places = manager.places(sizes)


@domain_layer(noise.NormNoise)
class DomainNormNoise(DomainNoise, noise.NormNoise):
    """Noise of the norms of a band."""
