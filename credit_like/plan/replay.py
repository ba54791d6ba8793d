"""Operations on tensors without memory, worked out once for equal arguments and repeated from then on.

An operation on fake tensors has one effect: tensors of a shape, a layout and a type. The first time torch's
FakeTensorMode finds out which, in a millisecond; the same operation on arguments of the same shapes gives the same again,
in a tenth of that. What an operation did is told by looking at its results; whatever cannot be told so is never repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Key = tuple[Any, ...]
"""An operation, by its name, and its arguments: picklable."""


class _New(NamedTuple):
    """A result with memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _View(NamedTuple):
    """A result in the memory of a tensor among the arguments, told by its number."""

    argument: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


Result = _New | _View | int | None
"""An int: the argument of this number itself."""


@dataclass(frozen=True)
class Recipe:
    """The results of an operation, and what it costs: `piece` as Work counts it, None where no data are moved."""

    results: tuple[Result, ...]
    kind: type | None
    """list or tuple; None for one result that is not in either."""
    piece: tuple[bool, int, int] | None


class Arguments:
    """The arguments of an operation as a key, with the tensors among them in order; `key` is None where there is none."""

    __slots__ = ("_parts", "key", "shared", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> None:
        self.tensors: list[Tensor] = []
        self.shared = True
        """Whether a result may be, or be a view of, an argument: not of one that is on the meta device in earnest."""
        self._parts: list[Any] = [func.name()]
        known = self._all(args, mode)
        for name, value in kwargs.items():
            self._parts.append(name)
            known = known and self._all((value,), mode)
        self.key: Key | None = tuple(self._parts) if known else None

    def _all(self, values: Any, mode: FakeTensorMode) -> bool:
        parts = self._parts
        for value in values:
            kind = value.__class__
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not mode or value.dtype.is_complex:
                    return False
                parts += described(value)
                self.tensors.append(value)
            elif (kind is Tensor or kind is nn.Parameter) and value.is_meta:
                parts += (kind, value.shape, value.stride(), value.dtype)
                self.shared = False
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._all(value, mode):
                    return False
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal and not the same
            else:
                return False
        return True


_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)


def described(tensor: FakeTensor) -> Key:
    """All that the result of an operation and its cost depend on."""
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor._fake_device,
        tensor.untyped_storage().nbytes(),
    )  # fmt: skip


@dataclass
class Recipes:
    """What is known of operations, and what of it this process found out itself."""

    known: dict[Key, Recipe] = field(default_factory=dict)
    learnt: dict[Key, Recipe] = field(default_factory=dict)


class Replay:
    """Operations under a FakeTensorMode, by recipes where there are any."""

    def __init__(self, mode: FakeTensorMode, recipes: Recipes | None = None) -> None:
        self.mode = mode
        self.recipes = recipes or Recipes()
        self._likeness: dict[torch.device, dict[str, Any]] = {}

    def learn(self, given: Arguments, again: Arguments, out: Any, piece: tuple[bool, int, int] | None) -> None:
        """Remember what an operation did, if that is all that it did: `given` before and `again` after it."""
        kind = out.__class__ if isinstance(out, list | tuple) else None
        values = list(out) if kind else [out]
        if given.key is None or given.key != again.key or kind not in (None, list, tuple):
            return
        if not all(value is None or _is_plain(value, self.mode) for value in values):
            return
        numbers = range(len(given.tensors))
        tensors = {id(tensor): number for tensor, number in zip(given.tensors, numbers, strict=True)}
        storages = {t.untyped_storage()._cdata: number for t, number in zip(given.tensors, numbers, strict=True)}
        results = tuple(_result(value, tensors, storages) for value in values)
        fresh = [v.untyped_storage()._cdata for v, r in zip(values, results, strict=True) if isinstance(r, _New)]
        whole = all(v.storage_offset() == 0 and v.untyped_storage().nbytes() == _extent(v)
                    for v, r in zip(values, results, strict=True) if isinstance(r, _New))  # fmt: skip
        # Where two arguments are in one memory, which of them a result belongs to cannot be told.
        clear = given.shared and len(storages) == len(given.tensors)
        if whole and (clear or all(isinstance(result, _New) for result in results)) and len(set(fresh)) == len(fresh):
            recipe = Recipe(results, kind, piece)
            self.recipes.known[given.key] = self.recipes.learnt[given.key] = recipe

    def repeat(self, recipe: Recipe, tensors: list[Tensor]) -> list[Any]:
        """The results of an operation that is known, on other tensors of the same shapes."""
        results: list[Any] = []
        with torch._C._DisableTorchDispatch():
            for result in recipe.results:
                if isinstance(result, _New):
                    elem = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
                    results.append(self._fake(elem, result.device))
                elif isinstance(result, _View):
                    elem = torch.empty(0, dtype=result.dtype, device="meta")
                    elem.set_(tensors[result.argument].untyped_storage(), result.offset, result.shape, result.stride)
                    results.append(self._fake(elem, result.device))
                else:
                    results.append(None if result is None else tensors[result])
        return results

    def _fake(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """`FakeTensor(self.mode, elem, device)`, whose attributes are the same for all of a device."""
        if device not in self._likeness:
            first = FakeTensor(self.mode, elem, device)
            self._likeness[device] = dict(first.__dict__)
            return first
        fake = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._likeness[device])
        return fake


def _is_plain(value: Any, mode: FakeTensorMode) -> bool:
    return (
        value.__class__ is FakeTensor
        and value.fake_mode is mode
        and value.constant is None
        and not (value.requires_grad or value.dtype.is_complex)
    )


def _extent(tensor: Tensor) -> int:
    """Bytes that a tensor of this shape and these strides takes."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _result(value: Any, tensors: Mapping[int, int], storages: Mapping[int, int]) -> Result:
    """How to make a result again; the arguments' numbers by their identity and by that of their storages."""
    if value is None:
        return None
    if id(value) in tensors:
        return tensors[id(value)]
    shape, stride = tuple(value.shape), value.stride()
    index = storages.get(value.untyped_storage()._cdata)
    if index is None:
        return _New(shape, stride, value.dtype, value.fake_device)
    return _View(index, shape, stride, value.storage_offset(), value.dtype, value.fake_device)
