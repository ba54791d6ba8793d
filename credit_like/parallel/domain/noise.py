"""Domain layer of the noise. Tensors are (B, H, W, C)."""

from __future__ import annotations

from credit_like.nn import noise
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import DomainManager


@domain_layer(noise.Noise)
class DomainNoise(DomainLayer, noise.Noise):
    """Noise of a band: that of its rows in the whole image. Nothing is exchanged."""

    def bind(self, manager: DomainManager, height_in: int, _height_out: int) -> None:
        self._set(manager)
        self.first_row = manager.own(height_in)[0]


@domain_layer(noise.NormNoise)
class DomainNormNoise(DomainNoise, noise.NormNoise):
    """Noise of the norms of a band."""
