"""Domain layer of the noise. Tensors are (B, H, W, C)."""

from __future__ import annotations

from credit_like.nn import noise
from credit_like.parallel.domain.layer import PlacedLayer, domain_layer


@domain_layer(noise.Noise)
class DomainNoise(PlacedLayer, noise.Noise):
    """Noise of a band: that of its points in the whole image. Nothing is exchanged."""


@domain_layer(noise.NormNoise)
class DomainNormNoise(DomainNoise, noise.NormNoise):
    """Noise of the norms of a band."""
