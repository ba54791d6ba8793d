"""The forward of a model on tensors without values, one operation after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like.errors import UserError

BATCH = 2  # more than one, so that no dimension disappears by chance
_SIZES = ("in_channels", "frames", "height", "width")


def has_sizes(model: nn.Module) -> bool:
    """Return whether a model has the attributes from which `input_shape` follows."""
    return all(hasattr(model, key) for key in _SIZES)


def input_shape(model: nn.Module) -> tuple[int, int, int, int, int]:
    """Return (batch, channels, frames, rows, columns) of an input.

    Raises UserError for a model without attributes for its sizes.
    """
    missing = [key for key in _SIZES if not hasattr(model, key)]
    if missing:
        raise UserError(
            f"{type(model).__name__}: expected attributes in_channels, frames, height and width for domain parallelism; "
            f"it has no {', '.join(missing)}"
        )
    channels, frames, height, width = (int(getattr(model, key)) for key in _SIZES)
    return BATCH, channels, frames, height, width


def without_values(model: nn.Module) -> dict[str, Tensor]:
    """Return tensors without values for all parameters and buffers, by name, for `functional_call` with `tie_weights=False`.

    A shared parameter has one tensor under the name of each place. A module that is registered several times has one name,
    because `functional_call` would replace and restore its parameters several times, and leave tensors in their place.
    """
    blank: dict[Tensor, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                continue
            if value not in blank:
                blank[value] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            tensors[f"{prefix}.{leaf}" if prefix else leaf] = blank[value]
    return tensors


def storage_of(t: Tensor) -> int:
    """Return the address of the storage that a tensor and its views share."""
    return t.untyped_storage()._cdata


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings, as the arguments and results of operations have them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_of(item)]
    return []


@dataclass(frozen=True)
class Operation:
    """What a forward calls."""

    name: str
    """Without the underscore of the form that works in place."""
    values: dict[str, Any]
    """The arguments by name, also those with their defaults."""
    written: list[Any]
    """The arguments that it writes into."""

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Operation:
        """Return the operation of a call of `__torch_dispatch__`."""
        schema = func._schema
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(kwargs or {})
        values = {a.name: given.get(a.name, a.default_value) for a in schema.arguments}
        written = [values[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        name = schema.name.removeprefix("aten::")
        return cls(name.removesuffix("_") if written and not name.startswith("_") else name, values, written)


class ForwardMode(TorchDispatchMode):
    """Base class of modes that see the operations of one forward; a subclass registers the hooks that keep `stack`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.stack: list[nn.Module] = []
        """The modules whose forward is running, the innermost last."""

    @property
    def module(self) -> nn.Module:
        """Return the innermost module whose forward is running."""
        return self.stack[-1] if self.stack else self.model

    def described(self, module: nn.Module) -> tuple[str, str]:
        """Return the path of a module and its class, for messages."""
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return self.names.get(module) or "the model itself", kind

    def computed(self, tensors: dict[str, Tensor], x: Tensor) -> Any:
        """Return what the model returns for `x` with `tensors` in place of its parameters and buffers (`without_values`)."""
        with _unchanged(self.model), self._hooks(), self:
            return torch.func.functional_call(self.model, tensors, (x,), tie_weights=False)

    def blank_input(self, shape: Sequence[int]) -> Tensor:
        """Return an input without values of the model's dtype."""
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        return torch.empty(shape, dtype=dtype, device="meta")

    def _hooks(self) -> AbstractContextManager[None]:
        """Note which modules are called, for as long as the context lasts."""
        raise NotImplementedError


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Give the modules the attributes back that they had: a forward may keep tensors in them, here tensors without values."""
    modules = [vars(module) for module in model.modules()]
    contained = [value for each in modules for value in each.values() if type(value) in (dict, list, set)]
    before = [(each, each.copy()) for each in (*modules, *contained)]
    try:
        yield
    finally:
        for each, kept in before:
            each.clear()
            each.extend(kept) if isinstance(each, list) else each.update(kept)
