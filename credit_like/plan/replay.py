"""A cache of operations on fake tensors.

The only effect of an operation on fake tensors is to create tensors of some shape, strides and dtype. The first time,
torch's FakeTensorMode derives them, which takes about a millisecond. For arguments with the same metadata the results
are then rebuilt from the cache in a tenth of that time. An operation is cached only if its results describe it
completely.

Rebuilding uses internals of torch, and no other module does. `cached` tests them first; where they are not as expected,
a simulation uses torch's fake tensors alone, which changes no figure and takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from credit_like.plan.machine import Piece

TESTED = "2.13"
"""The release of torch with whose internals results are rebuilt."""

Key = tuple[Any, ...]
"""The name and the arguments of an operation, picklable."""


class _New(NamedTuple):
    """A result with its own storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _View(NamedTuple):
    """A result that is a view of the tensor argument number `argument`."""

    argument: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


Result = _New | _View | int | None
"""An int is the number of the tensor argument that is returned itself."""


@dataclass(frozen=True)
class Recipe:
    """The results and the cost of an operation; `piece` is the key in `Work.pieces`, None where no data are moved."""

    results: tuple[Result, ...]
    kind: type | None
    """`list` or `tuple`; None for a single result."""
    piece: Piece | None


class Arguments:
    """The arguments of an operation as a key (None if they cannot be cached), and its tensor arguments in order."""

    __slots__ = ("_parts", "key", "shared", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> None:
        self.tensors: list[Tensor] = []
        self.shared = True
        """Whether results may alias arguments; False if an argument really is on the meta device."""
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
                parts += (kind, value)  # the type distinguishes 1, 1.0 and True, which are equal
            else:
                return False
        return True


_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)


def described(tensor: FakeTensor) -> Key:
    """Return everything about a tensor that the results and the cost of an operation depend on."""
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor._fake_device,
        tensor.untyped_storage().nbytes(),
    )  # fmt: skip


@dataclass
class Recipes:
    """Cached operations: all `known` ones, and those `learnt` by this process."""

    known: dict[Key, Recipe] = field(default_factory=dict)
    learnt: dict[Key, Recipe] = field(default_factory=dict)


def cached(mode: FakeTensorMode, recipes: Recipes | None = None) -> Replay | None:
    """Return the cache of operations for this mode; None where torch's internals are not those that were tested."""
    if not torch.__version__.startswith(f"{TESTED}."):
        return None
    replay = Replay(mode, recipes)
    try:
        torch._C._DisableTorchDispatch, torch._C._set_throw_on_mutable_data_ptr  # noqa: B018
        with mode:
            expected = torch.empty(2, 3)
        assert isinstance(expected, FakeTensor)
        rebuilt = replay.rebuilt(expected)
    except (AttributeError, TypeError):
        return None
    same = vars(rebuilt).keys() == vars(expected).keys() and described(rebuilt) == described(expected)
    return replay if same else None


class Replay:
    """A cache of operations under a FakeTensorMode; made by `cached`, which tests the internals of torch that it needs."""

    def __init__(self, mode: FakeTensorMode, recipes: Recipes | None = None) -> None:
        self.mode = mode
        self.recipes = recipes or Recipes()
        self._likeness: dict[torch.device, dict[str, Any]] = {}

    def learn(self, given: Arguments, again: Arguments, out: Any, piece: Piece | None) -> None:
        """Cache an operation, if its results describe it completely.

        `given` and `again` are the keys of its arguments before and after it.
        """
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
        # If two arguments share a storage, it is ambiguous which of them a result is a view of.
        clear = given.shared and len(storages) == len(given.tensors)
        if whole and (clear or all(isinstance(result, _New) for result in results)) and len(set(fresh)) == len(fresh):
            recipe = Recipe(results, kind, piece)
            self.recipes.known[given.key] = self.recipes.learnt[given.key] = recipe

    def repeat(self, recipe: Recipe, tensors: list[Tensor]) -> list[Any]:
        """Return the results of a cached operation for other tensors of the same shapes."""
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

    def rebuilt(self, tensor: FakeTensor) -> FakeTensor:
        """Return a copy of a fake tensor, rebuilt as cached results are."""
        new = Recipe((_New(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device),), None, None)
        self.repeat(new, [])  # the first one is the likeness of the others
        (result,) = self.repeat(new, [])
        assert isinstance(result, FakeTensor)
        return result

    def _fake(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """Return `FakeTensor(self.mode, elem, device)`, with the attributes copied from an earlier one of the device."""
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
    """Return the bytes that a tensor of this shape and these strides occupies."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _result(value: Any, tensors: Mapping[int, int], storages: Mapping[int, int]) -> Result:
    """Return how to rebuild a result.

    `tensors` and `storages` map the ids of the tensor arguments and of their storages to argument numbers.
    """
    if value is None:
        return None
    if id(value) in tensors:
        return tensors[id(value)]
    shape, stride = tuple(value.shape), value.stride()
    index = storages.get(value.untyped_storage()._cdata)
    if index is None:
        return _New(shape, stride, value.dtype, value.fake_device)
    return _View(index, shape, stride, value.storage_offset(), value.dtype, value.fake_device)
