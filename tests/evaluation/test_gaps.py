"""Forecasts that are not finite: nobody takes the scores of what is left for scores of the forecast."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import xarray as xr
from world import forecasts_of_truth, make_context, make_data, make_experiment

from credit_like.data.store import open_store
from credit_like.errors import RunError
from credit_like.evaluation.evaluate import Scorer, evaluate
from credit_like.evaluation.results import load_results, save_results
from credit_like.naming import times_text

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


@pytest.mark.parametrize("name", ["model", "other"])
def test_forecasts_that_are_removed_while_they_are_scored_have_no_scores(world, tmp_path, monkeypatch, name):
    """By `--fresh --force`, say; zarr takes what is not there for missing values."""
    experiment, dataset, store, variables = world
    for each in ("model", "other"):
        dataset.to_zarr(tmp_path / f"{each}.zarr", zarr_format=2)
    section = experiment.evaluation.model_copy(update={"baselines": {"other": str(tmp_path / "other.zarr")}})
    score = Scorer.score

    def removed_first(scorer, block, inits):
        with suppress(FileNotFoundError):  # of several threads that score, one comes first
            (tmp_path / f"{name}.zarr").rename(tmp_path / "removed")
        return score(scorer, block, inits)

    monkeypatch.setattr(Scorer, "score", removed_first)
    with pytest.raises(RunError, match=rf"expected the forecasts in .*{name}\.zarr not to change"):
        evaluate(
            experiment.model_copy(update={"evaluation": section}), tmp_path / "model.zarr", store, store, variables
        )


def test_leads_that_a_baseline_does_not_have_are_no_gap(world, caplog, tmp_path):
    experiment, dataset, store, variables = world
    dataset.isel(prediction_timedelta=slice(2)).to_zarr(tmp_path / "shorter.zarr", zarr_format=2)
    section = experiment.evaluation.model_copy(update={"baselines": {"shorter": str(tmp_path / "shorter.zarr")}})
    evaluate(experiment.model_copy(update={"evaluation": section}), dataset, store, store, variables)
    assert warnings(caplog) == []


def test_leads_without_truth_from_some_initial_times_are_named(world, caplog, tmp_path):
    """The truth ends with time 37 and lacks time 34; forecasts are from 32, 34 and 36."""
    experiment, dataset, _, variables = world
    whole = xr.load_dataset(experiment.data.source[0].path)
    whole.isel(time=[t for t in range(38) if t != 34]).to_netcdf(tmp_path / "shorter.nc")
    source = experiment.data.source[0].model_copy(update={"path": str(tmp_path / "shorter.nc")})
    truth = open_store(experiment.data.model_copy(update={"source": (source,)}), variables)
    results = evaluate(experiment, dataset, truth, truth, variables)
    cure = "change inference.init or evaluation.truth"
    assert warnings(caplog) == [
        "some leads are scored over fewer than 3 initial times, because the truth lacks their valid times: 12 h over 1, 18 h over "
        f"2; their scores are of other weather than those of the other leads; {cure}",
        f"persistence is scored from 2 of 3 initial times: the truth lacks the others; {cure}",
    ]
    save_results(results, tmp_path / "scores")
    for found in (results, load_results(tmp_path / "scores")):
        assert found["initial_times_of_lead"].values.tolist() == [3, 1, 2]
        assert times_text(found) == "1 to 3 initial times"
        assert times_text(found.drop_vars("initial_times_of_lead")) == "3 initial times"
        assert times_text(found.drop_vars("initial_times_of_lead").assign(initial_times=1)) == "1 initial time"
    by_init = results["sp_by_init"].sel(source="model", region="global").isel(statistic=0)
    np.testing.assert_array_equal(by_init.notnull().sum("init_time"), [3, 1, 2])


def test_files_of_an_interrupted_rollout_are_named(world, caplog, tmp_path):
    experiment, dataset, store, variables = world
    folder = tmp_path / "forecast"
    folder.mkdir()
    for number in range(2):
        dataset.isel(time=[number]).to_netcdf(folder / f"{number}.nc")
    evaluate(experiment, folder, store, store, variables)
    caplog.clear()
    (folder / "0.nc").rename(folder / "0.nc.part")
    evaluate(experiment, folder, store, store, variables)
    assert warnings(caplog) == [
        f"{folder} has unfinished forecasts, which are not scored: 0.nc.part; run `credit-like rollout` again to complete them"
    ]
