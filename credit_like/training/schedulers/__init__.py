"""Learning rates: one module each, with a `Config` and `learning_rate`. A plug-in has the attributes of `SchedulerPlugin`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SchedulerPlugin(Protocol):
    """The module of a schedule; `Config` is a `Section` with its `type`."""

    Config: type[Any]

    def learning_rate(self, config: Any, base: float, step: int, total_steps: int) -> float:
        """Return the rate of optimiser step `step` = 0, 1, …; `base` is the optimiser's `learning_rate`."""

    def learning_rate_after(
        self, config: Any, base: float, step: int, total_steps: int, losses: Sequence[float | None]
    ) -> float:
        """Return the rate of a step after validations with these losses, instead of `learning_rate`; optional.

        The losses are those of the phase, the oldest first; None is one that is not finite.
        """
