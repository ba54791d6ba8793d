"""Corrections of each predicted step, one module each, with formula and source.

A plug-in has the attributes of `PhysicsPlugin`. It builds a module whose forward(after_BCHW, before_BCHW) takes the
prognostic and diagnostic channels that the model predicted, in physical units, and the prognostic channels of the
previous state, to which it must not write, and returns the corrected prediction. The stepper applies the modules in the
order of the experiment's `physics`, in training and in forecasts, so they must be differentiable. `rows` are this
rank's, and `reduce` sums a partial mean over the ranks that share a sample. A plug-in with `shares_columns = True` also
gets `columns`, this rank's columns; `whole_rows`, which turns this rank's part (…, h, w) of a field into its rows with
all columns; and `column_ranks`, the number of ranks that share a row. It can be used with `trainer.parallelism.domain:
[rows, columns]`; others are refused there. A module with `needs_forcing = True` takes the dynamic forcing at the time
before the step as its third argument, to which it must not write either, and one with `after_epochs = n` is left out in
the first n epochs of training. A plug-in may also have `find(config, variables)`, which needs no torch: it returns the
positions of the corrected quantities among the channels, and raises UserError for variables that the model does not
have, so that `credit-like check` can report them. So it does with `check_data(config, store)`, which raises UserError
for a grid, periods or units that do not suit the correction, and reads no fields (it is called before `build` too); and
with `check_mask(config, variables, mask)`, which raises UserError for variables that lack data where the correction
needs them: `mask` (C, H, W) of what the model predicts is True at points that have data.

A plug-in that takes more from the fields of the training than `statistics` has, such as a climatology, has
`measure(config, variables, store)`. It returns this for the whole grid as float64 arrays by name, none if the configuration
needs none. Model packages contain the arrays, so that forecasts from an analysis need no data of the training: `build` then gets
them as `measured`, and `check_data` is not called. Otherwise `build` measures them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variables


class PhysicsPlugin(Protocol):
    """Interface of the module of a correction; `Config` is a `Section` with its `type`."""

    Config: type[Any]

    def build(
        self,
        config: Any,
        variables: Variables,
        store: FieldStore,
        statistics: Statistics,
        *,
        rows: slice = ...,
        reduce: Callable[[Tensor], Tensor] = ...,
    ) -> nn.Module:
        """Return the module that corrects a prediction on this rank's rows."""
