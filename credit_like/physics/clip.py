"""Clipping: a quantity that cannot be negative is set to zero where the model predicts less.

x ← max(x, minimum). Clipping adds a little of the quantity, so list it before the corrections that conserve it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from credit_like.physics._column import channels_of
from credit_like.schema.base import Section

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variables


class Config(Section):
    """The predicted variables to clip, and their minimum in their own units."""

    type: Literal["clip"] = "clip"
    variables: tuple[str, ...] = ()
    minimum: float = 0.0


def find(config: Config, variables: Variables) -> list[slice]:
    """See `credit_like.physics`."""
    return [channels_of(name, variables.outputs, "physics.variables") for name in config.variables]


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`)."""
    from credit_like.physics._fix import Fix

    where = find(config, variables)

    def correct(after_BCHW: Tensor, _before_BCHW: Tensor, _mean: Callable[[Tensor], Tensor]) -> Tensor:
        result = after_BCHW.clone()
        for channels in where:
            result[:, channels] = after_BCHW[:, channels].clamp(min=config.minimum)
        return result

    return Fix(correct, variables, store, statistics, **layout)
