"""Initial weights that do not depend on the layout: one generator per parameter, seeded by (seed, parameter name).

A layer draws each of its parameters on the CPU in its full shape (`Layer.initial`), so a rank that holds a slice gets
the same numbers as a single process would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from credit_like.errors import UserError
from credit_like.nn import spectral_norm
from credit_like.nn.initial_values import torch_default


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return the generator of one parameter, on the CPU."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_value(module: nn.Module, leaf: str, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the full initial value (CPU, fp32) of the parameter `name`, which is `leaf` of `module`.

    The value comes from the module's `initial` if it has one, else from torch's own distribution for the layer. Raises
    UserError with the name of the parameter if neither exists or if `initial` returns another shape.
    """
    draw = getattr(module, "initial", None) or partial(torch_default, module)
    try:
        value: Tensor = draw(leaf, tuple(shape), generator_for(seed, name))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if tuple(value.shape) != tuple(shape):
        raise UserError(
            f"{name}: expected {type(module).__name__}.initial to return shape {tuple(shape)}, got {tuple(value.shape)}"
        )
    return value


def own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Yield (module, leaf, full name, parameter) for every parameter, each with the module that owns it."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            yield module, leaf, f"{prefix}.{leaf}" if prefix else leaf, parameter


def reset_buffers(model: nn.Module) -> None:
    """Fill derived (unsaved) buffers and torch's running statistics; required after `to_empty`."""
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None) or getattr(module, "reset_running_stats", None)
        if reset is not None:
            reset()


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> nn.Module:
    """Initialise a model that holds whole tensors; all values depend on (seed, parameter name) alone."""
    for module, leaf, name, parameter in own_parameters(model):
        parameter.copy_(initial_value(module, leaf, name, tuple(parameter.shape), seed))
    reset_buffers(model)
    for name, layer in spectral_norm.layers(model):
        spectral, weight = layer.spectral, layer.weight
        assert isinstance(spectral, spectral_norm.SpectralNorm)
        assert isinstance(weight, Tensor)
        spectral.start(weight, generator_for(seed, f"{name}.spectral.u"))
    return model
