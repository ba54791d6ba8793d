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
        kept = self._kept
        if kept is None or kept[0] != key or not all(map(_same, kept[1], given)):
            kept = self._kept = (key, [weight.detach().clone() for weight in given], make())
        return kept[2]


def _comparable(weight: Tensor) -> bool:
    """Whether it is a tensor with values of its own here: neither distributed, nor traced, nor without values."""
    plain = type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    return plain and weight.device.type == "cpu"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
