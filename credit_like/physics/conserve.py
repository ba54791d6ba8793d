"""Conservation of global means: that of a variable does not change during a step.

    x ← x + ⟨x⟩_before − ⟨x⟩_after

One constant is added everywhere, so that gradients stay as they were. This is for what the data conserve, such as the mean
thickness of a layer of constant density; dry air has its own correction, `mass`. Long forecasts otherwise drift where the data
never showed the model a mean that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

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
    """The prognostic variables whose global means are conserved."""

    type: Literal["conserve"] = "conserve"
    variables: Names = ()
    """Prognostic variables whose global means are conserved, level by level."""


def find(config: Config, variables: Variables) -> list[slice]:
    """See `credit_like.physics`."""
    return [channels_of(name, variables.role("prognostic"), "physics.variables") for name in config.variables]


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`)."""
    from credit_like.physics._fix import Fix

    where = find(config, variables)

    def correct(after_BCHW: Tensor, before_BCHW: Tensor, _mean: Callable[[Tensor], Tensor]) -> Tensor:
        result = after_BCHW.clone()
        for channels, area in zip(where, fix.areas, strict=True):
            lost_BC = area(before_BCHW[:, channels].double() - after_BCHW[:, channels].double())
            result[:, channels] = (after_BCHW[:, channels] + lost_BC[..., None, None]).to(after_BCHW.dtype)
        return result

    changes = dict(zip(config.variables, where, strict=True))
    fix = Fix(correct, variables, store, statistics, config=config, changes=changes, **layout)
    return fix
