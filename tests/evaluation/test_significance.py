"""Significance of score differences: coverage on series with a known answer, and the same figures as other programs."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import cftime
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import xarray as xr
from scores.stats.statistical_tests import diebold_mariano
from world import forecasts_of_truth, make_context, make_data, make_experiment

from credit_like import registry
from credit_like.errors import UserError
from credit_like.evaluation import compare_scores, load_scores_by_init
from credit_like.evaluation.collect import Collected
from credit_like.evaluation.compare import print_comparison, ratios
from credit_like.evaluation.compare_page import write_comparison
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.metrics import acc, rmse
from credit_like.evaluation.results import save_results
from credit_like.evaluation.significance import contributions, standard_error
from credit_like.terminal import plain_console
from tests.test_runs import make_run

LEAST = {(35, 0.0): 0.935, (35, 0.5): 0.925, (35, 0.7): 0.895, (120, 0.0): 0.935, (120, 0.5): 0.93, (120, 0.7): 0.92}
"""Least share of intervals of 95 % that hold the truth, by length and lag-1 correlation."""


def ar1(rng, number, correlation, series):
    """Return stationary series (number, series) of variance 1 with correlation^k at lag k."""
    noise = rng.standard_normal((number, series)) * np.sqrt(1 - correlation**2)
    noise[0] = rng.standard_normal(series)
    for i in range(1, number):
        noise[i] += correlation * noise[i - 1]
    return noise


def frame(values, metric="rmse", statistic="mse", start="2020-01-01"):
    """Return a frame of `load_scores_by_init` with one lead per series (times, leads)."""
    times, leads = np.meshgrid(
        pd.date_range(start, periods=len(values), freq="D"), np.arange(values.shape[1]), indexing="ij"
    )
    return pd.DataFrame(
        {
            "source": "model",
            "variable": "u",
            "level": np.nan,
            "metric": metric,
            "region": "global",
            "lead_hours": leads.ravel().astype(float),
            "statistic": statistic,
            "init_time": times.ravel(),
            "value": values.ravel(),
            "units": "m s-1",
        }
    )


@pytest.mark.parametrize(("number", "correlation"), LEAST)
def test_intervals_of_correlated_series_cover_the_truth(number, correlation):
    """2000 seeded series. Their share has a standard error of 0.005, so that an interval that covers 0.02 less than the
    bound fails with a probability above 0.99. The t-test without correction covers 0.74 at 0.5 and 0.58 at 0.7.
    """
    series = ar1(np.random.default_rng(7), number, correlation, 2000)
    errors, freedoms = zip(*(standard_error(one) for one in series.T), strict=True)
    covered = np.abs(series.mean(0)) < np.array(errors) * scipy.stats.t.ppf(0.975, freedoms)
    assert LEAST[number, correlation] < covered.mean() < 0.968
    if correlation:
        naive = scipy.stats.sem(series, axis=0) * scipy.stats.t.ppf(0.975, number - 1)
        assert (np.abs(series.mean(0)) < naive).mean() < 0.8


def squared_errors(rng, number, series, correlation=0.5):
    """Return the mean squared errors of two runs in the same weather, and the difference of their RMSE."""
    weather = ar1(rng, number, correlation, series)
    sizes = [1.0, 0.97]
    runs = [np.exp(np.log(size**2) + 0.4 * weather + 0.1 * ar1(rng, number, correlation, series)) for size in sizes]
    return runs, (sizes[1] - sizes[0]) * np.exp((0.4**2 + 0.1**2) / 4)


def test_intervals_of_rmse_cover_the_true_difference_and_pairing_makes_them_narrow():
    """400 seeded comparisons over 60 times: a coverage of 0.87 or less fails with a probability above 0.97."""
    runs, truth = squared_errors(np.random.default_rng(11), 60, 400)
    found = compare_scores(*map(frame, runs))
    np.testing.assert_allclose(found["first"], np.sqrt(runs[0].mean(0)))
    np.testing.assert_allclose(found["difference"], np.sqrt(runs[1].mean(0)) - np.sqrt(runs[0].mean(0)))
    assert 0.91 < ((found["low"] < truth) & (truth < found["high"])).mean() < 0.985
    assert (found["times"] == 60).all()
    unpaired = compare_scores(frame(runs[0]), frame(np.roll(runs[1], 30, 0)))
    assert (found["high"] - found["low"]).median() < 0.5 * (unpaired["high"] - unpaired["low"]).median()
    assert found["significant"].mean() > 2 * unpaired["significant"].mean()


def test_metrics_of_ones_own_are_compared():
    values = np.random.default_rng(0).normal(1, 0.1, (20, 3))
    one, other = (frame(values + shift).assign(metric="worst", statistic="worst") for shift in (0, 0.5))
    found = compare_scores(one, other, plugins=[str(Path(__file__).parents[1] / "parts" / "my_parts")])
    np.testing.assert_allclose(found["difference"], 0.5)
    with pytest.raises(UserError, match="got 'worst'"):
        compare_scores(one, other)


def test_the_same_run_twice_never_differs_and_one_out_of_twenty_equal_ones_does():
    (one, _), _ = squared_errors(np.random.default_rng(3), 40, 5)
    same = compare_scores(frame(one), frame(one))
    assert not same["significant"].any()
    assert not same[["difference", "low", "high"]].to_numpy().any()
    rng = np.random.default_rng(5)
    weather = ar1(rng, 40, 0.5, 400)
    equal = [frame(np.exp(0.4 * weather + 0.1 * ar1(rng, 40, 0.5, 400))) for _ in range(2)]
    assert 0.02 < compare_scores(*equal)["significant"].mean() < 0.09


def test_the_standard_error_is_the_formula_of_lazarus_and_others():
    values = np.random.default_rng(0).standard_normal(35)
    freedom = int(0.4 * 35 ** (2 / 3))
    middle = (np.arange(1, 36) - 0.5) / 35
    waves = [np.sqrt(2 / 35) * np.sum(values * np.cos(np.pi * j * middle)) for j in range(1, freedom + 1)]
    assert standard_error(values) == (pytest.approx(np.sqrt(np.mean(np.square(waves)) / 35)), freedom)


@pytest.mark.filterwarnings("ignore")
def test_intervals_are_as_wide_as_those_of_the_package_scores():
    """Its Diebold-Mariano test of Hering and Genton (2011) fits a correlation that decays exponentially, which this is."""
    series = ar1(np.random.default_rng(1), 1000, 0.5, 60)
    array = xr.DataArray(series.T, dims=("lead", "time"), coords={"lead": range(60), "h": ("lead", [1] * 60)})
    theirs = diebold_mariano(array, "lead", "h", method="HG", statistic_distribution="t")
    ours = [error * scipy.stats.t.ppf(0.975, freedom) for error, freedom in map(standard_error, series.T)]
    assert np.mean(ours) == pytest.approx(float((theirs["ci_upper"] - theirs["ci_lower"]).mean()) / 2, rel=0.06)


def test_contributions_are_the_terms_of_a_mean_and_the_linear_terms_of_a_root():
    values = np.random.default_rng(2).gamma(5, 1, 500)
    np.testing.assert_allclose(contributions({"acc": values}, acc.finish), values)
    linear = np.sqrt(values.mean()) + (values - values.mean()) / (2 * np.sqrt(values.mean()))
    np.testing.assert_allclose(contributions({"mse": values}, rmse.finish), linear, atol=0.02)


def test_only_common_initial_times_count():
    (a, b), _ = squared_errors(np.random.default_rng(4), 40, 1)
    found = compare_scores(frame(a[:30]), frame(b[10:], start="2020-01-11"))
    expected = compare_scores(frame(a[10:30], start="2020-01-11"), frame(b[10:30], start="2020-01-11"))
    pd.testing.assert_frame_equal(found, expected)
    assert found["times"].tolist() == [20]
    assert compare_scores(frame(a[:5]), frame(b[:5], start="2021-01-01")).empty
    assert np.isnan(compare_scores(frame(a[:2]), frame(b[:2]))["low"]).all()


def test_frames_of_several_sources_are_refused():
    values = frame(np.ones((5, 1)))
    mixed = pd.concat([values, values.assign(source="persistence")])
    with pytest.raises(UserError, match="expected scores of one source, got model, persistence"):
        compare_scores(mixed, values)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Two runs whose forecasts are the truth with noise, that of the second smaller by half; and the scores of one."""
    folder = tmp_path_factory.mktemp("significance")
    experiment = make_experiment(make_data(folder / "world.nc"), folder)
    experiment = experiment.model_copy(
        update={"evaluation": experiment.evaluation.model_copy(update={"metrics": ("rmse", "acc")})}
    )
    context = make_context(experiment)
    store, variables = context.store, context.variables
    init, results = list(range(20, 32)), []
    for seed, size in ((0, 1.0), (1, 0.5)):
        rng = np.random.default_rng(seed)

        def noisy(truth, rng=rng, size=size):
            return truth + size * np.nanstd(truth) * rng.standard_normal(truth.shape)

        dataset = forecasts_of_truth(store, variables, init, 2, noisy)
        results.append(evaluate(experiment, dataset, store, store, variables))
    runs = [make_run(folder / name) for name in "ab"]
    for run, one in zip(runs, results, strict=True):
        save_results(one, run / "evaluation")
    return runs, results


def test_stored_statistics_give_the_scores_and_the_intervals(evaluated):
    runs, results = evaluated
    frames = [load_scores_by_init(run) for run in runs]
    assert set(frames[0]["statistic"]) == {"mse"}
    assert frames[0]["init_time"].nunique() == 12
    of = results[0]["u"].sel(source="model", metric="rmse", region="global")
    for (level, hours), group in frames[0][frames[0]["variable"] == "u"].groupby(["level", "lead_hours"]):
        score = float(of.sel(level=level, lead_time=np.timedelta64(int(hours), "h")))
        assert np.sqrt(group["value"].mean()) == pytest.approx(score, rel=1e-5)
    found = compare_scores(*frames)
    assert found["significant"].all()
    assert (found["high"] < 0).all()
    of_acc = compare_scores(*(load_scores_by_init(run, metric="acc") for run in runs))
    assert (of_acc["low"] > 0).all()
    with pytest.raises(UserError, match="expected crps of model in global by initial time"):
        load_scores_by_init(runs[0], metric="crps")


def of_days(errors):
    """Return the scores of a run with a forecast per day from 2000-01-01, of these mean squared errors."""
    days = np.datetime64("2000-01-01", "s") + np.arange(len(errors)) * np.timedelta64(1, "D")
    scores = Collected(["model"], {"rmse": registry.module("metric", "rmse")}, days, [21600], ["global"])
    for day, error in enumerate(errors):
        scores.add(
            SimpleNamespace(name="z", levels=()), [0], day, 0, {("model", "rmse", "mse"): np.full((1, 1, 1), error)}
        )
    return scores.dataset(0, 0)


def test_a_ratio_is_over_the_initial_times_that_both_have():
    """The second run also has weeks that are hard to forecast."""
    errors = 1 + 0.05 * np.random.default_rng(0).standard_normal(40)
    _, ((_, (paired,)),), times = ratios(of_days(errors[:20]), of_days(0.8 * errors * np.repeat([1, 4], 20)))
    assert times == 20
    assert paired.value == pytest.approx(np.sqrt(0.8))
    assert paired.low < paired.difference < paired.high < 0
    assert paired.half == pytest.approx((paired.high - paired.low) / 2 / np.sqrt(errors[:20].mean()))
    first, second = of_days(errors[:20]), of_days(0.8 * errors)
    ((_, (alone,)),), times = ratios(
        first, second.assign_coords(init_time=second["init_time"] + np.timedelta64(99, "D"))
    )[1:]
    assert times == 0
    assert alone.value == pytest.approx(np.sqrt(0.8 * errors.mean() / errors[:20].mean()))
    assert not alone.is_significant


def test_runs_in_different_units_are_not_compared():
    values = 1 + 0.1 * np.random.default_rng(0).standard_normal((20, 1))
    message = "expected scores of {} in the same units, got 'm s-1' and 'knots'; evaluate one"
    with pytest.raises(UserError, match=message.format("u")):
        compare_scores(frame(values), frame(values).assign(units="knots"))
    for units in ("m s**-1", "m/s", "", "unheard of"):
        assert (compare_scores(frame(values), frame(values).assign(units=units))["units"] == "m s-1").all()
    kelvin, celsius = (frame(values).assign(units=units) for units in ("K", "degC"))
    assert (compare_scores(kelvin, celsius)["difference"] == 0).all()
    first, second = of_days(values[:, 0]), of_days(values[:, 0])
    first["z"].attrs["units"], second["z"].attrs["units"] = "m s-1", "knots"
    alone = [one.drop_dims("statistic") for one in (first, second)]  # scores of an early release
    for pair in ((first, second), alone):
        with pytest.raises(UserError, match=message.format("z")):
            ratios(*pair)


def test_the_table_shows_intervals_and_stars(evaluated):
    console = plain_console(file=io.StringIO(), width=120, color_system=None)
    print_comparison(*evaluated[0], console)
    text = console.file.getvalue()
    row = next(line for line in text.splitlines() if line.startswith("u 500 hPa"))
    assert float(row.split()[3]) == pytest.approx(0.5, abs=0.05)
    assert all(word.startswith("±0.") and word.endswith("*") for word in row.split() if "±" in word)
    assert "paired over 12 common initial times" in " ".join(text.split())


def test_the_page_shows_what_the_table_shows(evaluated, tmp_path):
    page = write_comparison(tmp_path / "page.html", *evaluated[0]).read_text()
    shown = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["scores"]
    assert shown["times"] == 12
    found = compare_scores(*map(load_scores_by_init, evaluated[0])).set_index(["variable", "level", "lead_hours"])
    for row in shown["channels"]:
        level = np.nan if row["level"] is None else row["level"]
        for i, (hours, (_, half, significant, _)) in enumerate(zip(shown["leads"], row["ratios"], strict=True)):
            one = found.loc[(row["variable"], level, hours)]
            assert significant == one["significant"]
            assert half == pytest.approx((one["high"] - one["low"]) / 2 / one["first"], rel=1e-4)
            values = [row["difference"][key][i] for key in ("y", "low", "high")]
            np.testing.assert_allclose(values, one[["difference", "low", "high"]].astype(float), rtol=1e-4)


def test_a_browser_draws_the_intervals(browser, evaluated, tmp_path):
    page = write_comparison(tmp_path / "page.html", *evaluated[0])
    tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready]")
    cells = tab.locator("#ratio-table tbody td").all_inner_texts()
    assert all(re.fullmatch(r"0\.\d{2,4} ±0\.\d{2,4}", cell) for cell in cells)
    assert tab.locator("#ratio-table td.sure").count() == len(cells)
    assert tab.locator("#difference-plot polygon").count() == 1
    assert tab.locator("#difference-plot line.reference").count() == 1
    assert errors == []
    tab.close()


def test_initial_times_of_any_calendar(evaluated, tmp_path):
    one = evaluated[1][0]
    times = [cftime.DatetimeNoLeap(2000, 2, 20 + day) for day in range(8)] + [
        cftime.DatetimeNoLeap(2000, 3, 1 + day) for day in range(4)
    ]
    save_results(one.assign_coords(init_time=np.array(times)), tmp_path)
    found = load_scores_by_init(tmp_path)
    assert sorted(found["init_time"].unique()) == times
    assert compare_scores(found, found)["times"].eq(12).all()


def test_infinite_terms_have_no_contribution_and_no_warning():
    found = contributions({"mean": np.array([1.0, np.inf, 2.0])}, lambda statistics: statistics["mean"])
    assert not np.isfinite(found).any()
