"""Initial weights that do not depend on the layout: one generator per parameter, seeded by (seed, parameter name).

Each layer says what a parameter of it starts with (`initial(leaf, shape, generator)`, on the CPU, of the full shape), so a
rank that holds a slice fills it with the same numbers as one process would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from credit_like.nn import spectral_norm


def generator_for(seed: int, name: str) -> torch.Generator:
    """The generator of one parameter, on the CPU."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)): variance 1/(3 fan_in), the usual start of convolutions and linear maps."""
    bound = fan_in**-0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def icnr(shape: tuple[int, ...], factor: int, fan_in: int, generator: torch.Generator) -> Tensor:
    """A sub-pixel kernel whose factor^2 phases are equal, so that no checkerboard appears (arXiv:1707.02937)."""
    phases = factor * factor
    base = uniform((shape[0] // phases, *shape[1:]), fan_in, generator)
    return base.repeat_interleave(phases, dim=0)


def initial_value(module: nn.Module, leaf: str, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The full initial value (CPU, fp32) of the parameter `name`, which is `leaf` of `module`.

    Raises TypeError where the module does not say how it starts.
    """
    initial = getattr(module, "initial", None)
    if initial is None:
        raise TypeError(f"{type(module).__name__} ({name}) does not define initial(leaf, shape, generator)")
    value: Tensor = initial(leaf, tuple(shape), generator_for(seed, name))
    return value


def own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module, leaf, full name, parameter) of every parameter, each at the module that owns it."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            yield module, leaf, f"{prefix}.{leaf}" if prefix else leaf, parameter


def reset_buffers(model: nn.Module) -> None:
    """Fill every buffer that is derived rather than saved; needed after `to_empty`."""
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> nn.Module:
    """Fill parameters and buffers of a model that holds whole tensors; the values depend on (seed, name) alone."""
    for module, leaf, name, parameter in own_parameters(model):
        parameter.copy_(initial_value(module, leaf, name, tuple(parameter.shape), seed))
    reset_buffers(model)
    for name, layer in spectral_norm.layers(model):
        spectral, weight = layer.spectral, layer.weight
        assert isinstance(spectral, spectral_norm.SpectralNorm)
        assert isinstance(weight, Tensor)
        start = torch.randn(spectral.u.shape, generator=generator_for(seed, f"{name}.spectral.u"))
        spectral.u.copy_(start / start.norm())
        spectral.iterate(weight, spectral_norm.WARM_UP)
    return model
