"""Initial distributions of parameters, drawn in the full shape from the parameter's own generator."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # batch and instance norms
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from credit_like.errors import UserError


def uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Draw from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), the usual initialisation of linear maps and convolutions.

    Its variance is 1/(3 fan_in).
    """
    return within(shape, fan_in**-0.5, generator)


def within(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    """Draw from U(-bound, bound)."""
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def icnr(shape: tuple[int, ...], factor: int, fan_in: int, generator: torch.Generator) -> Tensor:
    """Draw a sub-pixel kernel whose factor^2 phases are equal, so that no checkerboard appears (arXiv:1707.02937)."""
    phases = factor * factor
    base = uniform((shape[0] // phases, *shape[1:]), fan_in, generator)
    return base.repeat_interleave(phases, dim=0)


def torch_default(module: nn.Module, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw the parameter `leaf` of a torch layer from the distribution that torch itself uses.

    Supports linear maps, (transposed) convolutions, norms, embeddings, PReLU and multi-head attention, and their subclasses
    that do not override `reset_parameters`. Raises UserError for any other module.
    """
    for kind, (reset, draw) in _DEFAULTS.items():
        if _starts_as(module, kind, reset):
            return draw(module, leaf, shape, generator)
    define = "define `initial(self, leaf, shape, generator)` in this class and return a tensor of that shape"
    if type(module).__module__.partition(".")[0] == "torch":
        define = (
            "hold a parameter in a class of your own that defines `initial(self, leaf, shape, generator)` and returns a tensor of "
            "that shape"
        )
    raise UserError(
        f"{type(module).__module__}.{type(module).__qualname__}: expected initial values for its parameter {leaf}, found none; "
        f"{define}"
    )


def reset_of(module: nn.Module) -> str | None:
    """Return the name of the method by which one of torch's layers resets its parameters; None for other modules.

    There is none for the output projection of multi-head attention, which resets a part of it itself.
    """
    found = (reset for kind, (reset, _) in _DEFAULTS.items() if _starts_as(module, kind, reset))
    return None if isinstance(module, NonDynamicallyQuantizableLinear) else next(found, None)


def _starts_as(module: nn.Module, kind: type[nn.Module], reset: str) -> bool:
    return isinstance(module, kind) and getattr(type(module), reset) is getattr(kind, reset)


def _by_fan_in(module: nn.Module, _leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw the weight or bias of a linear map or a convolution.

    As in torch, the fan-in of a transposed convolution is taken from dimension 1 as well.
    """
    assert isinstance(module.weight, Tensor)
    return uniform(shape, module.weight.shape[1:].numel(), generator)


def _projection(module: nn.Module, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw the output projection of multi-head attention."""
    return torch.zeros(shape) if leaf == "bias" else _by_fan_in(module, leaf, shape, generator)


def _identity(_module: nn.Module, leaf: str, shape: tuple[int, ...], _generator: torch.Generator) -> Tensor:
    return torch.ones(shape) if leaf == "weight" else torch.zeros(shape)


def _embedding(module: nn.Module, _leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    assert isinstance(module, nn.Embedding)
    rows = torch.randn(shape, generator=generator)
    if module.padding_idx is not None:
        rows[module.padding_idx] = 0.0
    return rows


def _constant(module: nn.Module, _leaf: str, shape: tuple[int, ...], _generator: torch.Generator) -> Tensor:
    assert isinstance(module, nn.PReLU)
    return torch.full(shape, module.init)


def _attention(_module: nn.Module, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw the input projections of multi-head attention with variance 2/(fan in + fan out).

    This is the initialisation of Glorot & Bengio (2010): uniform for projections, normal for the extra key and value.
    """
    if leaf == "in_proj_bias":
        return torch.zeros(shape)
    if leaf in ("bias_k", "bias_v"):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return within(shape, sqrt(6.0 / sum(shape)), generator)


Draw = Callable[[nn.Module, str, tuple[int, ...], torch.Generator], Tensor]
# Each class is paired with the method that draws torch's values. A subclass that overrides the method uses another
# distribution.
_DEFAULTS: dict[type[nn.Module], tuple[str, Draw]] = {
    NonDynamicallyQuantizableLinear: ("reset_parameters", _projection),
    nn.Linear: ("reset_parameters", _by_fan_in),
    _ConvNd: ("reset_parameters", _by_fan_in),
    nn.LayerNorm: ("reset_parameters", _identity),
    nn.RMSNorm: ("reset_parameters", _identity),
    nn.GroupNorm: ("reset_parameters", _identity),
    _NormBase: ("reset_parameters", _identity),
    nn.Embedding: ("reset_parameters", _embedding),
    nn.PReLU: ("reset_parameters", _constant),
    nn.MultiheadAttention: ("_reset_parameters", _attention),
}
