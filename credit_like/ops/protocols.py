"""Protocols of the layers that operations take as arguments.

A plain operation calls these layers; a fused kernel reads their parameters, but only of classes marked `fusible`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor, nn

Class = TypeVar("Class", bound=type[nn.Module])
_FUSIBLE: list[type[nn.Module]] = []


def fusible(layer: Class) -> Class:
    """Mark a layer class whose parameters a fused kernel may read instead of calling the layer.

    The mark is not inherited, because the parallel versions of a layer do more than their serial class.
    """
    _FUSIBLE.append(layer)
    return layer


def is_fusible(layer: object) -> bool:
    """Return whether the layer's exact class is marked `fusible`."""
    return type(layer) in _FUSIBLE


def may_be_fusible(layer: nn.Module) -> bool:
    """Return whether the layer's class or one of its bases is `fusible`, as for a parallel version."""
    return isinstance(layer, tuple(_FUSIBLE))


class SpectralNorm(Protocol):
    """Spectral normalisation of one weight."""

    def weight_and_scale(self, weight: Tensor) -> tuple[Tensor, float]:
        """Return W and 1/sigma."""
        ...


class Linear(Protocol):
    """y = x W^T + b, W optionally divided by its spectral norm."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def spectral(self) -> SpectralNorm | None: ...

    @property
    def lora(self) -> object | None:
        """The low-rank change of the weight."""
        ...

    def effective_weight(self) -> Tensor:
        """Return the weight that is applied."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class ChannelNorm(Protocol):
    """Layer norm over the channels of each point."""

    eps: float

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class GroupNorm(ChannelNorm, Protocol):
    """Group norm over the image and groups of channels."""

    groups: int
