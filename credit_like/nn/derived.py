"""What a layer makes of its weights alone, kept from one forward without gradients to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor, nn


class Derived:
    """A tensor made of weights, which is made again once one of them has changed; on the CPU, while gradients are disabled.

    The weights are compared with copies of those that it was made of, so that whoever changes them (an optimiser, a checkpoint
    being read, an average that takes their place) has nobody to tell. A comparison costs next to nothing beside what is worth
    keeping; on an accelerator it would have to be waited for.
    """

    def __init__(self) -> None:
        self._kept: tuple[Hashable, list[Tensor], Tensor] | None = None

    def forget(self) -> None:
        """Keep nothing."""
        self._kept = None

    def __call__(self, make: Callable[[], Tensor], weights: Iterable[Tensor], key: Hashable = None) -> Tensor:
        """`make()`, of these weights (not looked at while gradients are enabled) and of whatever `key` stands for."""
        if torch.is_grad_enabled() or not all(map(_comparable, given := list(weights))):
            self.forget()
            return make()
        kept, values = self._kept, _end_to_end(given)
        if kept is None or kept[0] != key or not _same(kept[1], values):
            kept = self._kept = (key, [value.clone() for value in values], make())
        return kept[2]


def _comparable(weight: Tensor) -> bool:
    """Whether it is a tensor with values of its own here: neither distributed, nor traced, nor without values."""
    plain = type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    return plain and weight.device.type == "cpu"


def _end_to_end(weights: list[Tensor]) -> list[Tensor]:
    """The values of all weights of one dtype after each other: many small tensors take longer to compare."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for weight in weights:
        by_dtype.setdefault(weight.dtype, []).append(weight.flatten())
    return [torch.cat(some) if len(some) > 1 else some[0] for some in by_dtype.values()]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
