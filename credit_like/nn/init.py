"""Initial weights that do not depend on the layout: one generator per parameter, seeded by (seed, parameter name).

A layer draws each of its parameters on the CPU in its full shape (`Layer.initial`), so a rank that holds a slice gets
the same numbers as a single process would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from credit_like.errors import UserError
from credit_like.nn import spectral_norm
from credit_like.nn.initial_values import torch_default

_BLANK = 0xAA
"""What memory of buffers without values is filled with, byte by byte."""
_REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes in which a module registers what belongs to it."""


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
    """Yield (module, leaf, full name, parameter) for every parameter, each with the first module that owns it."""
    seen = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield module, leaf, f"{prefix}.{leaf}" if prefix else leaf, parameter


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give a model without values memory on a device; buffers that have values keep them, and shared parameters stay shared.

    `refuse_unfilled` finds the buffers that nothing fills afterwards.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, leaf))
    blank = [
        (module, leaf)
        for module in model.modules()
        for leaf, b in module._buffers.items()
        if b is not None and b.is_meta
    ]
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for (first, name), *others in places.values():
        for module, leaf in others:
            module._parameters[leaf] = first._parameters[name]
    for module, leaf in blank:
        buffer = module._buffers[leaf]
        if type(buffer) is Tensor and not buffer.is_meta:
            _bytes_of(buffer).fill_(_BLANK)


def refuse_unfilled(model: nn.Module) -> None:
    """Raise UserError for a buffer that `allocate` has given memory and nothing has filled since."""
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if type(buffer) is Tensor and not buffer.is_meta and buffer.numel() and _is_blank(buffer):
                name = f"{prefix}.{leaf}" if prefix else leaf
                raise UserError(
                    f"{name}: expected values of this buffer of {_kind(module)}, found none; the model is built without "
                    f"values, so define `reset_buffers(self)` in that class, which fills it (self.{leaf}.copy_(…)), or "
                    f"register an array of numpy (torch.from_numpy)"
                )


def _is_blank(buffer: Tensor) -> bool:
    return bool((_bytes_of(buffer) == _BLANK).all())


def _bytes_of(buffer: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())


def refuse_lost_values(model: nn.Module) -> None:
    """Raise UserError for tensors of a model built without values that no later step would give values, or would replace.

    These are tensors in attributes that are neither parameters nor buffers, in modules that are not registered too, and
    parameters that have values in a class without `initial`.
    """
    modules = set(model.modules())
    for prefix, module in model.named_modules():
        # A recurrent layer lists its parameters anew when they get memory.
        derived = ("_flat_weights",) if isinstance(module, nn.RNNBase) else ()
        for leaf, value in vars(module).items():
            if leaf not in (*_REGISTERED, *derived) and (lost := _lost(value, modules)) is not None:
                name, what = (
                    f"{prefix}.{leaf}" if prefix else leaf,
                    "module" if isinstance(lost, nn.Module) else "tensor",
                )
                kinds, register = (
                    ("registered modules", "hold it in an nn.ModuleList or nn.ModuleDict")
                    if isinstance(lost, nn.Module)
                    else ("parameters or buffers", "register it (register_buffer), or hold numbers")
                )
                raise UserError(
                    f"{name}: expected a {what} of {_kind(module)} that is among its {kinds}, got one that is not, and so would "
                    f"have no values on the device of the model; {register}"
                )
    for module, _, name, parameter in own_parameters(model):
        if not parameter.is_meta and not hasattr(module, "initial"):
            raise UserError(
                f"{name}: expected a parameter of {_kind(module)} without values, got one with values, which would be lost; "
                f"return them from its `initial(self, leaf, shape, generator)`"
            )


def _lost(value: object, modules: Collection[nn.Module]) -> Tensor | nn.Module | None:
    """Return a tensor without values that an attribute is or contains, or a module outside of `modules` with such a tensor."""
    if isinstance(value, dict | list | tuple):
        inside = value.values() if isinstance(value, dict) else value
        return next((lost for item in inside if (lost := _lost(item, modules)) is not None), None)
    if isinstance(value, nn.Module) and value not in modules:
        return value if any(t.is_meta for t in (*value.parameters(), *value.buffers())) else None
    return value if isinstance(value, Tensor) and value.is_meta else None


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


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
