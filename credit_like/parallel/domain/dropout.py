"""Domain layer of dropout. Tensors are (B, H, W, C)."""

from __future__ import annotations

from credit_like.nn import dropout
from credit_like.parallel.domain.layer import PlacedLayer, domain_layer


@domain_layer(dropout.Dropout)
class DomainDropout(PlacedLayer, dropout.Dropout):
    """Dropout of a band: that of its points in the whole image. Nothing is exchanged."""
