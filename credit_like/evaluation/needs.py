"""What evaluation needs beside the forecasts, so that it can be asked for before there are any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from credit_like import registry
from credit_like.data.store import FieldStore, StoreError, open_store
from credit_like.errors import UserError
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variables


def check_metrics(names: Iterable[str], members: int, rainy: Sequence[str]) -> None:
    """Raise UserError for a metric that needs an ensemble or precipitation where the forecasts have none."""
    for name in names:
        needs = registry.module("metric", name).NEEDS
        if "members" in needs and members < 2:
            raise UserError(
                f"evaluation.metrics: expected an ensemble for {name}, got one member; remove it or change "
                "inference.ensemble.members"
            )
        if "precipitation" in needs and not rainy:
            raise UserError(f"evaluation.metrics: expected forecasts of precipitation for {name}, got none, remove it")


def open_truth(experiment: Experiment, store: FieldStore) -> FieldStore:
    """The experiment's own data, unless `evaluation.truth` says otherwise: there only what is forecast need be.

    Raises UserError where it is not.
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
