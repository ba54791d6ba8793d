"""Check the requirements of an evaluation before forecasts are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from credit_like.data.store import FieldStore, StoreError, open_store
from credit_like.errors import UserError
from credit_like.evaluation.metrics import needs
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variables


def check_metrics(metrics: Mapping[str, ModuleType], members: int, rainy: Sequence[str]) -> None:
    """Raise UserError for a metric that needs an ensemble or precipitation if the forecasts have none."""
    for name, module in metrics.items():
        if "members" in needs(module) and members < 2:
            raise UserError(
                f"evaluation.metrics: expected an ensemble for {name}, got one member; remove it or change "
                "inference.ensemble.members"
            )
        if "precipitation" in needs(module) and not rainy:
            raise UserError(f"evaluation.metrics: expected forecasts of precipitation for {name}, got none, remove it")


def open_truth(experiment: Experiment, store: FieldStore) -> FieldStore:
    """Return the data to compare with: the experiment's own, or `evaluation.truth` with the forecast variables.

    Raises UserError if a forecast variable is absent.
    """
    if experiment.evaluation.truth is None:
        return store
    data, written = experiment.data, experiment.inference.output.variables
    scored = {
        role: getattr(data, role).model_copy(
            update={
                kind: tuple(spec for spec in getattr(getattr(data, role), kind) if not written or spec.name in written)
                for kind in ("level", "surface")
            }
        )
        for role in ("prognostic", "diagnostic")
    }
    nothing = {"level": (), "surface": ()}
    other = {role: getattr(data, role).model_copy(update=nothing) for role in ("dynamic_forcing", "static")}
    data = data.model_copy(update={"source": experiment.evaluation.truth, **scored, **other})
    try:
        return open_store(data, Variables(data))
    except StoreError as error:
        raise UserError("\n".join(f"evaluation.truth: {message}" for _, message in error.problems)) from error
