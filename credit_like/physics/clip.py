"""Clipping: values beyond a bound are set to it, for example negative humidity to zero.

x ← max(x, minimum), and x ← min(x, maximum) where a maximum is given. Clipping adds a little of the quantity, so list it
before the corrections that conserve it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from credit_like.physics._column import channels_of
from credit_like.physics._correction import Correction, Names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variables


shares_columns = True
"""See `credit_like.physics`."""


class Config(Correction):
    """The predicted variables to clip, and their bounds in their own units."""

    type: Literal["clip"] = "clip"
    variables: Names = ()
    """Predicted variables to clip."""
    minimum: float | None = 0.0
    """Lower bound, in the units of the variables; null = none."""
    maximum: float | None = None
    """Upper bound, in the units of the variables. Default: none."""

    @model_validator(mode="after")
    def _bounds(self) -> Config:
        if self.minimum is None and self.maximum is None:
            raise ValueError("expected a minimum or a maximum, got neither; give one")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"expected minimum <= maximum, got {self.minimum} and {self.maximum}; change one")
        return self


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
            result[:, channels] = after_BCHW[:, channels].clamp(config.minimum, config.maximum)
        return result

    changes = dict(zip(config.variables, where, strict=True))
    return Fix(correct, variables, store, statistics, config=config, changes=changes, **layout)
