"""Tensors that depend on weights alone, cached between forwards without gradients.

What is cached for a layer is deleted with it. A cached tensor is validated by comparing the weights
with a copy of those it was computed from, so no caller (optimiser, checkpoint, moving average) has to invalidate it.
Version counters are not sufficient, because fused optimisers and `.data` do not increase them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_CACHE: WeakKeyDictionary[nn.Module, tuple[Hashable, list[Tensor], Tensor]] = WeakKeyDictionary()


def forget(layer: nn.Module | None) -> None:
    """Drop the cached tensor of the layer."""
    if layer is not None:
        _CACHE.pop(layer, None)


def is_cached(layer: nn.Module) -> bool:
    """Return whether a tensor is cached for the layer."""
    return layer in _CACHE


def keeps(weights: Iterable[Tensor]) -> bool:
    """Return whether a tensor that depends on these weights alone is cached now."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and all(map(_comparable, weights))


def cached(
    layer: nn.Module | None, make: Callable[[], Tensor], weights: Iterable[Tensor], key: Hashable = None
) -> Tensor:
    """Return `make()`, a function of these weights and `key`; reuse the last result while both are unchanged.

    One tensor per layer is cached, only on the CPU and while gradients are disabled. On an accelerator the comparison
    would synchronise, so nothing is cached there.
    """
    if layer is None or torch.compiler.is_compiling():
        return make()
    if not keeps(given := list(weights)):
        forget(layer)
        return make()
    key = (key, torch.is_autocast_enabled("cpu"))
    found, values = _CACHE.get(layer), _end_to_end(given)
    if found is None or found[0] != key or not _same(found[1], values):
        found = _CACHE[layer] = (key, [value.clone() for value in values], make())
    return found[2]


def _comparable(weight: Tensor) -> bool:
    """Return whether the tensor has its own values here: not distributed, not traced, not on the meta device."""
    return type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu"


def _end_to_end(weights: list[Tensor]) -> list[Tensor]:
    """Return the values of all weights of one dtype in one vector, because comparing many small tensors is slower."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for weight in weights:
        by_dtype.setdefault(weight.dtype, []).append(weight.flatten())
    return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in by_dtype.values()]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
