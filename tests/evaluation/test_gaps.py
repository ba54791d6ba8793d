"""Forecasts that are not finite: nobody takes the scores of what is left for scores of the forecast."""

from __future__ import annotations

import numpy as np
import pytest
from world import forecasts_of_truth, make_context, make_data, make_experiment

from credit_like.evaluation.evaluate import evaluate

LEADS = 3


@pytest.fixture
def world(tmp_path):
    """(experiment, forecasts that are the truth, store, variables), with points without data."""
    experiment = make_experiment(make_data(tmp_path / "world.nc", masked=True), tmp_path)
    context = make_context(experiment)
    store, variables = context.store, context.variables
    return experiment, forecasts_of_truth(store, variables, [32, 34, 36], LEADS), store, variables


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_points_without_data_are_no_gap(world, caplog):
    experiment, dataset, store, variables = world
    evaluate(experiment, dataset, store, store, variables)
    assert warnings(caplog) == []


def test_a_forecast_that_overflowed_is_named(world, caplog):
    experiment, dataset, store, variables = world
    dataset["u"].values[1, 1:, :, :4] = np.nan
    dataset["temperature"].values[2, 2, 0, 7, 7] = np.inf
    evaluate(experiment, dataset, store, store, variables)
    lost = 4 / 8  # four of eight rows, in which the points without data lie
    assert warnings(caplog) == [
        f"model has no finite values at up to {100 * lost:.3g} % of the points, from 2 of 3 initial times and from a "
        "lead of 12 h on, in u, temperature; scores leave these points out and look better than the forecasts are"
    ]


def test_forecasts_without_any_value_are_named(world, caplog):
    experiment, dataset, store, variables = world
    dataset["sp"].values[:] = np.nan
    evaluate(experiment, dataset, store, store, variables)
    (message,) = warnings(caplog)
    assert message.startswith("model has no finite values at up to 100 % of the points, from 3 of 3 initial times")
    assert ", in sp;" in message


def test_leads_that_a_baseline_does_not_have_are_no_gap(world, caplog, tmp_path):
    experiment, dataset, store, variables = world
    dataset.isel(prediction_timedelta=slice(2)).to_zarr(tmp_path / "shorter.zarr", zarr_format=2)
    section = experiment.evaluation.model_copy(update={"baselines": {"shorter": str(tmp_path / "shorter.zarr")}})
    evaluate(experiment.model_copy(update={"evaluation": section}), dataset, store, store, variables)
    assert warnings(caplog) == []
