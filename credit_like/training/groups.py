"""Groups of parameters with separate learning rates or weight decays."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from credit_like import registry
from credit_like.errors import UserError
from credit_like.training.optimizers import Group

if TYPE_CHECKING:
    from torch import Tensor

    from credit_like.training.step import Optimizer


def build_optimizer(config: Any, parameters: Mapping[str, Tensor]) -> Optimizer:
    """Return the optimiser of these named parameters: the plug-in's own, or one of it for each group.

    Raises UserError for a group that matches no parameter of its own.
    """
    build = registry.of("optimizer", config).build
    groups: Sequence[Group] = getattr(config, "groups", ())
    if not groups:
        optimizer: Optimizer = build(config, parameters)
        return optimizer
    parts = []
    for group, names in zip((None, *groups), members(groups, list(parameters)), strict=True):
        own = group.model_dump(exclude={"match"}, exclude_none=True) if group is not None else {}
        own_config = config.model_copy(update={"groups": (), **own})
        part: Optimizer = build(own_config, {name: parameters[name] for name in names})
        parts.append((own_config.learning_rate / config.learning_rate, part))
    return _Groups(parts)


def members(groups: Sequence[Group], names: Sequence[str]) -> list[list[str]]:
    """Return the names that belong to no group, then those of each group: of the first one that matches.

    Raises UserError for a group without any.
    """
    rest, result = list(names), []
    for i, group in enumerate(groups):
        matched = fnmatch.filter(rest, group.match)
        if not matched:
            raise UserError(
                f"trainer.optimizer.groups.{i}.match: expected a pattern of trained parameters that no earlier group "
                f"matches, such as {next(iter(rest), 'none')}, got {group.match}; change it"
            )
        taken = set(matched)
        rest = [name for name in rest if name not in taken]
        result.append(matched)
    return [rest, *result]


class _Groups:
    """Optimisers of groups of parameters, which follow one schedule."""

    def __init__(self, parts: Sequence[tuple[float, Optimizer]]) -> None:
        self.parts = parts

    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update all groups, each at its fraction or multiple of the learning rate."""
        for ratio, optimizer in self.parts:
            optimizer.step(ratio * learning_rate, skip)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the live local state: parameter → kind → tensor."""
        return {name: state for _, optimizer in self.parts for name, state in optimizer.state().items()}
