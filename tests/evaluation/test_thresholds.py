"""Thresholds of events: quantiles of the training data against NumPy, and the scores of events in the files."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from world import make_context, make_data, make_experiment

from credit_like.errors import UserError
from credit_like.evaluation import thresholds
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.results import load_results, save_results
from credit_like.evaluation.thresholds import event_labels, event_thresholds
from credit_like.schema.inference import Thresholds

LEADS, MEMBERS = 2, 3
SECTION = Thresholds(values={"sp": (99_000.0, 101_000.0)}, quantiles=(0.25, 0.9))
METRICS = ("rmse", "fair-crps", "brier", "fair-brier", "reliability", "rank-histogram", "spread-error")


def ensemble(store, variables, members, init=(32, 34)):
    rng, names = np.random.default_rng(3), ("time", "number", "prediction_timedelta", "level", "latitude", "longitude")
    dataset = xr.Dataset(
        coords={
            "time": store.times[list(init)].astype("datetime64[ns]"),
            "number": np.arange(members),
            "prediction_timedelta": np.arange(1, LEADS + 1) * np.timedelta64(6, "h").astype("timedelta64[ns]"),
            "level": [500.0, 850.0],
            "latitude": store.grid.latitude,
            "longitude": store.grid.longitude,
        }
    )
    for variable in variables.outputs:
        truth = np.stack([store.read([variable], range(i + 1, i + 1 + LEADS)) for i in init])[:, None]
        noise = rng.standard_normal((len(init), members, *truth.shape[2:]))
        values = (truth + np.nanstd(truth) * 0.3 * noise).astype("f4")
        dims = names if variable.levels else (*names[:3], *names[4:])
        dataset[variable.name] = (dims, values if variable.levels else values[:, :, :, 0])
    return dataset if members > 1 else dataset.isel(number=0, drop=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thresholds")
    experiment = make_experiment(make_data(folder / "world.nc", masked=True), folder)
    update = {"metrics": METRICS, "thresholds": SECTION}
    experiment = experiment.model_copy(update={"evaluation": experiment.evaluation.model_copy(update=update)})
    context = make_context(experiment)
    return experiment, context.store, context.variables


@pytest.mark.parametrize("name", ["u", "sp"])
def test_quantiles_of_the_period_at_each_point(world, monkeypatch, name):
    _, store, variables = world
    variable = next(v for v in variables.outputs if v.name == name)
    levels, period = list(range(len(variable)))[-1:], np.arange(5, 30)
    monkeypatch.setattr(
        thresholds, "_BLOCK_BYTES", 8 * 25 * len(variable) * store.grid.width * 3
    )  # three rows at a time
    got = event_thresholds(SECTION, store, variable, levels, period)
    values = store.read([variable], period)[:, levels]
    expected = np.full((2, 1, *values.shape[2:]), np.nan)
    for place in np.ndindex(expected.shape[1:]):
        there = values[:, *place][np.isfinite(values[:, *place])].astype("f8")
        if len(there):
            expected[:, *place] = np.quantile(there, SECTION.quantiles)
    np.testing.assert_array_equal(got[-2:], expected)
    if name == "sp":
        assert np.isnan(expected).any(), "the test needs points without data"
        np.testing.assert_array_equal(got[:2], np.broadcast_to([[[[99_000.0]]], [[[101_000.0]]]], got[:2].shape))
    assert len(got) == len(event_labels(SECTION, name))


def test_scores_of_events_of_several_sources_reach_the_files(world, tmp_path):
    """The second source has fewer members, so fewer ranks; persistence and climatology have one."""
    experiment, store, variables = world
    ensemble(store, variables, 2).to_netcdf(tmp_path / "other.nc")
    section = experiment.evaluation.model_copy(update={"baselines": {"other": str(tmp_path / "other.nc")}})
    experiment = experiment.model_copy(update={"evaluation": section})
    results = evaluate(experiment, ensemble(store, variables, MEMBERS), store, store, variables)
    save_results(results, tmp_path / "scores")
    results = load_results(tmp_path / "scores")
    ranks = results["sp_rank_histogram"].sel(region="global")
    np.testing.assert_allclose(ranks.sel(source="model").sum("rank"), 1)
    assert np.isnan(ranks.sel(source="other").values[..., -1]).all()
    np.testing.assert_allclose(ranks.sel(source="other").sum("rank"), 1)
    of_all = ["above 99000", "above 101000", "above quantile 0.25", "above quantile 0.9"]
    assert sorted(results["threshold"].values) == sorted(of_all)
    brier = results["sp_brier"].sel(region="global")
    assert np.isfinite(brier.values).all()  # of every source, also of those with one member
    assert np.isnan(results["u_brier"].sel(threshold="above 99000").values).all()
    parts = results["sp_reliability"].sel(region="global", source="model")
    np.testing.assert_allclose(parts.sel(reliability_part="fraction").sum("probability_bin"), 1)
    np.testing.assert_allclose(results["probability_bin"], np.arange(11) / 10)
    # The fair CRPS of a source with one member is its mean absolute error.
    crps = results["sp"].sel(metric="fair-crps", region="global")
    assert np.isfinite(crps.values).all()
    # Murphy's decomposition: of all points the frequency of the event is the mean of those of the bins.
    share, frequency = (parts.sel(reliability_part=name) for name in ("fraction", "frequency"))
    rate = (share * frequency.fillna(0)).sum("probability_bin").sel(threshold="above quantile 0.9")
    assert ((rate > 0) & (rate < 0.5)).all()


def test_metrics_that_all_have_more_dimensions_than_leads(world, tmp_path):
    experiment, store, variables = world
    section = experiment.evaluation.model_copy(update={"metrics": ("rank-histogram",)})
    experiment = experiment.model_copy(update={"evaluation": section})
    results = evaluate(experiment, ensemble(store, variables, MEMBERS), store, store, variables)
    save_results(results, tmp_path)
    results = load_results(tmp_path)
    assert list(results["metric"].values) == []
    ranks = results["sp_rank_histogram"].sel(region="global", source="model")
    np.testing.assert_allclose(ranks.sum("rank"), 1)


def test_one_message_for_a_single_member(world):
    experiment, store, variables = world
    with pytest.raises(
        UserError, match="expected an ensemble for fair-crps, fair-brier, reliability, rank-histogram"
    ) as e:
        evaluate(experiment, ensemble(store, variables, 1), store, store, variables)
    assert len(str(e.value).splitlines()) == 1
