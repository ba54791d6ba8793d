"""Metrics of others: what they do wrong is a message, and changes no other score."""

from __future__ import annotations

import pickle
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from world import forecasts_of_truth, make_context, make_data, make_experiment

from credit_like import registry
from credit_like.errors import UserError
from credit_like.evaluation.collect import Collected
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.fields import Regions
from credit_like.evaluation.metrics import needs_problem, score, statistics, try_out
from credit_like.evaluation.needs import check_metrics
from credit_like.evaluation.significance import score_differences
from credit_like.schema.inference import Thresholds
from tests.evaluation.test_significance import frame

FINISH = "def finish(means):\n    return means['x']\n"
MSE = "def per_time(fields):\n    return {'x': fields.mean(fields.error**2)}\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(experiment, forecasts with random errors, store, variables)."""
    folder = tmp_path_factory.mktemp("world")
    experiment = make_experiment(make_data(folder / "world.nc"), folder)
    context = make_context(experiment)
    forecasts = forecasts_of_truth(context.store, context.variables, [32, 34, 36], 3)
    rng = np.random.default_rng(0)
    forecasts = forecasts.map(lambda x: x + rng.normal(0, 1 + 0 * x), keep_attrs=True)
    return experiment, forecasts, context.store, context.variables


@pytest.fixture
def scores(world, tmp_path):
    """scores(text of a metric, …) → the scores of a module with this text and the rmse."""
    experiment, forecasts, store, variables = world

    def run(text: str, bootstrap: int = 0) -> xr.Dataset:
        (tmp_path / "own" / "metrics").mkdir(parents=True)
        (tmp_path / "own" / "metrics" / "mine.py").write_text("import numpy as np\n" + text)
        section = experiment.evaluation.model_copy(update={"metrics": ("mine", "rmse"), "bootstrap": bootstrap})
        updated = experiment.model_copy(update={"evaluation": section, "plugins": (str(tmp_path / "own"),)})
        return evaluate(updated, forecasts, store, store, variables)

    return run


def test_a_right_one_is_the_mean_of_numpy(scores, world):
    _, forecasts, store, variables = world
    found = scores(MSE + "def finish(means):\n    return np.sqrt(means['x'])\n", 10)
    u = next(one for one in variables.outputs if one.name == "u")
    inits = store.seconds[[32, 34, 36]]
    weights = store.grid.latitude_weights()[:, None]
    squares = []
    for i, init in enumerate(inits):
        truth = store.read([u], np.flatnonzero(store.seconds == init + 6 * 3600))[0]
        error = forecasts["u"].isel(time=i, prediction_timedelta=0).values - truth
        squares.append((error**2 * weights).sum((-2, -1)) / (weights.sum() * store.grid.width))
    mine = found["u"].sel(source="model", region="global", lead_time=np.timedelta64(6, "h"))
    np.testing.assert_allclose(mine.sel(metric="mine"), np.sqrt(np.mean(squares, 0)), rtol=1e-6)
    np.testing.assert_array_equal(mine.sel(metric="mine"), mine.sel(metric="rmse"))
    np.testing.assert_array_equal(mine.sel(metric="mine_low"), mine.sel(metric="rmse_low"))


@pytest.mark.parametrize(
    "array",
    [
        "forecast",
        "truth",
        "climatology",
        "ensemble_mean",
        "valid",
        "regions.weights",
        "grid.latitude",
        "grid.longitude",
    ],
)
def test_what_others_score_too_cannot_be_written_to(scores, array):
    """`error = fields.forecast[0]; error -= fields.truth` changed the scores of all metrics after it."""
    text = f"def per_time(fields):\n    x = fields.{array}\n    x -= x\n    return {{'x': fields.mean(fields.error)}}\n"
    with pytest.raises(UserError, match=r"mine in .*mine.py: expected a metric without errors, got .*mine.py:4: "):
        scores(text + FINISH)


def test_nor_in_another_process(make_fields):
    """Arrays that were pickled can be written to again. What is locked are views: those of the evaluation remain as they are."""
    thresholds = (np.full((9, 16), 0.5), np.full((9, 16), 281.0))
    given = make_fields(thresholds=thresholds)
    given.events = np.full((2, 2, 9, 16), 280.0)
    grid, regions = given.grid, given.regions
    fields = pickle.loads(pickle.dumps(given.lock())).lock()
    assert grid.latitude.flags.writeable
    assert regions.weights.flags.writeable
    assert all(array.flags.writeable for array in thresholds)
    assert fields.thresholds is not None
    dry, heavy = fields.thresholds
    arrays = {"forecast": fields.forecast, "events": fields.events, "dry": dry, "heavy": heavy}
    arrays |= {"weights": fields.regions.weights, "latitude": fields.grid.latitude}
    assert {name: array.flags.writeable for name, array in arrays.items()} == dict.fromkeys(arrays, False)


def test_rounding_of_single_precision_is_no_dependence_on_other_leads(make_fields):
    """The order of a sum depends on the number of leads in some libraries."""

    def per_time(fields):
        values = fields.mean(fields.error**2)
        return {"x": (values * (1 + 3e-6 * len(values))).astype(np.float32)}

    metric = ModuleType("mine")
    vars(metric).update(__file__="mine.py", per_time=per_time, finish=lambda means: means["x"])
    try_out("mine", metric, make_fields().lock())


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ("fields.error.mean((-2, -1))", r"\(3, [12]\) of float64 for 'x'; take means over the area with fields.mean"),
        ("np.moveaxis(fields.mean(fields.error), -1, -2)", r"\(3, 4, [12]\) of float64"),
        ("fields.mean(fields.error).mean(0, keepdims=True)", r"\(1, [12], 4\) of float64"),
        ("float(fields.error.mean())", "float for 'x'"),
        ("np.stack([fields.mean(fields.error)] * 2, -1)", r"\(3, [12], 4, 2\) of float64 .*EXTRA"),
        ("fields.mean(fields.error) + 1j", r"\(3, [12], 4\) of complex128"),
    ],
)
def test_statistics_of_another_shape_are_refused(scores, values, got):
    with pytest.raises(UserError, match=r"expected statistics on \(leads, levels, regions\).*got " + got):
        scores(f"def per_time(fields):\n    return {{'x': {values}}}\n" + FINISH)


def test_lists_of_unequal_lengths_are_refused(scores):
    with pytest.raises(UserError, match=r"mine.py: expected a metric without errors, got ValueError .*inhomogeneous"):
        scores("def per_time(fields):\n    return {'x': [[1.0], [1.0, 2.0]]}\n" + FINISH)


@pytest.mark.parametrize(
    ("values", "got"), [("{}", r"\(3, [12], 4\) of float64"), ("{{0: {}}}", "the names 0")], ids=["an array", "numbers"]
)
def test_statistics_without_names_are_refused(scores, values, got):
    with pytest.raises(UserError, match=rf"expected a dict of statistics .*, by name, got {got}; change per_time"):
        scores(f"def per_time(fields):\n    return {values.format('fields.mean(fields.error)')}\n" + FINISH)


def test_a_further_dimension_that_is_not_there_is_refused(scores):
    with pytest.raises(UserError, match=r"expected statistics on \(leads, levels, regions, bin\), beginning with"):
        scores("EXTRA = 'bin'\n" + MSE + FINISH)


def test_a_further_dimension_of_another_size_is_refused(grid):
    metric = SimpleNamespace(EXTRA="bin", finish=lambda means: means["x"], __file__="mine.py")
    collected = Collected(["model"], {"mine": metric}, np.zeros(2, "M8[s]"), [0], Regions(grid, {}).names)
    variable = SimpleNamespace(name="u", levels=())
    collected.add(variable, [0], 0, 0, {("model", "mine", "x"): np.zeros((1, 1, 4, 5))})
    with pytest.raises(UserError, match=r"mine in mine.py: expected as many values of bin .*got \(1,\) after \(5,\)"):
        collected.add(variable, [0], 1, 0, {("model", "mine", "x"): np.zeros((1, 1, 4, 1))})


@pytest.mark.parametrize("bootstrap", [0, 5])
@pytest.mark.parametrize(
    ("finish", "message"),
    [
        ("means['x'] if means['x'] > 0 else 0", r"got ValueError at .*mine.py:5: The truth value"),
        ("means['x'].mean(0)", "expected a score of the shape of the means"),
        ("means['y']", "got KeyError at"),
    ],
)
def test_a_score_of_another_shape_is_refused(scores, finish, message, bootstrap):
    with pytest.raises(UserError, match=message):
        scores(MSE + f"def finish(means):\n    return {finish}\n", bootstrap)


def test_a_score_of_another_shape_of_resamples_is_refused(scores):
    finish = "means['x'] if np.ndim(means['x']) < 4 else means['x'][0]"
    with pytest.raises(
        UserError, match=r"expected a score of the shape of the means, \(5, 3, [12], 4\), got \(3, [12], 4\)"
    ):
        scores(MSE + f"def finish(means):\n    return {finish}\n", 5)


def test_so_is_one_with_further_dimensions(grid):
    metric = SimpleNamespace(EXTRA="bin", finish=lambda means: means["x"][0], __file__="mine.py", __name__="mine")
    regions = Regions(grid, {}).names
    collected = Collected(["model"], {"mine": metric}, np.zeros(1, "M8[s]"), [0], regions)
    collected.add(SimpleNamespace(name="u", levels=()), [0], 0, 0, {("model", "mine", "x"): np.zeros((1, 1, 4, 5))})
    with pytest.raises(UserError, match=r"expected a score of the shape of the means, \(1, 1, 4\), got \(1, 4, 5\)"):
        collected.dataset(0, 0)


def test_a_finish_that_fails_in_a_comparison_is_one_message(tmp_path):
    (tmp_path / "own" / "metrics").mkdir(parents=True)
    (tmp_path / "own" / "metrics" / "mine.py").write_text(MSE + "def finish(means):\n    return means['y']\n")
    series = frame(np.ones((4, 1)), "mine", "x")
    with pytest.raises(
        UserError, match=r"mine in .*mine.py: expected a metric without errors, got KeyError at .*mine.py:4"
    ):
        score_differences(series, series, [str(tmp_path / "own")])


@pytest.mark.parametrize("line", ["import no_such_package", "assert fields.thresholds is not None"])
def test_other_errors_of_others_are_one_message(scores, line):
    with pytest.raises(
        UserError, match=r"expected a metric without errors, got (Assertion|ModuleNotFound)Error at .*mine.py:3"
    ):
        scores(f"def per_time(fields):\n    {line}\n" + FINISH)


def test_those_of_this_package_keep_their_traceback(make_fields):
    fields = make_fields()
    fields.climatology = None
    with pytest.raises(AssertionError):
        statistics("acc", registry.module("metric", "acc"), fields)


def test_a_wrong_finish_is_found_before_all_is_scored(world, tmp_path):
    experiment, forecasts, store, variables = world
    (tmp_path / "own" / "metrics").mkdir(parents=True)
    (tmp_path / "own" / "metrics" / "mine.py").write_text(MSE + "def finish(means):\n    return means['y']\n")
    section = experiment.evaluation.model_copy(update={"metrics": ("mine",)})
    updated = experiment.model_copy(update={"evaluation": section, "plugins": (str(tmp_path / "own"),)})
    done = []
    with pytest.raises(UserError, match=r"got KeyError at .*mine.py:4"):
        evaluate(updated, forecasts, store, store, variables, progress=lambda *numbers: done.append(numbers))
    assert not done


@pytest.mark.parametrize(
    "finish", ["x / x.max()", "x - x.flat[0]", "np.broadcast_to(x.mean(), x.shape)", "np.sort(x, None)"]
)
def test_a_score_that_depends_on_other_means_is_refused(scores, finish):
    """Bounds and comparisons take resamples and single numbers for the means of leads."""
    with pytest.raises(
        UserError, match=r"expected a finish that computes element by element.*got other scores of single"
    ):
        scores(MSE + f"def finish(means):\n    x = means['x']\n    return np.reshape({finish}, x.shape)\n")


@pytest.mark.parametrize(
    "text",
    [
        "def per_time(fields):\n    x = np.zeros_like(fields.truth)\n    x[1:] = np.diff(fields.forecast[0], axis=0)\n"
        "    return {'x': fields.mean(x)}\n",
        "N = []\ndef per_time(fields):\n    N.append(1)\n    return {'x': len(N) * fields.mean(fields.error)}\n",
        "def per_time(fields):\n    return {'x': fields.mean(fields.error - fields.error.mean(0))}\n",
    ],
)
def test_statistics_that_depend_on_other_leads_or_calls_are_refused(scores, text):
    """How many leads a block has depends on the grid and on the number of members."""
    with pytest.raises(UserError, match=r"expected statistics of a lead that depend on that lead alone"):
        scores(text + FINISH)


@pytest.mark.parametrize(
    ("needed", "message"),
    [({"member"}, "got 'member'.*did you mean 'members'"), ("members", "got the text 'members'; write {'members'}")],
)
def test_unknown_needs_are_refused(needed, message):
    """A metric of which no forecast meets the needs had no scores, without a word."""
    metric = SimpleNamespace(NEEDS=needed, __file__="mine.py")
    with pytest.raises(UserError, match=f"evaluation.metrics: expected NEEDS with some of .* in mine.py, {message}"):
        check_metrics({"mine": metric}, 5, [], Thresholds(), [])


def test_they_are_refused_before_a_climatology_is_fitted(scores, monkeypatch):
    """It may take hours."""

    def fit(*_):
        raise AssertionError

    monkeypatch.setattr("credit_like.evaluation.evaluate.fit_climatology", fit)
    with pytest.raises(UserError, match=r"evaluation\.metrics: expected NEEDS with some of"):
        scores("NEEDS = {'member'}\n" + MSE + FINISH)


@pytest.mark.parametrize("name", registry.names("metric"))
def test_those_of_this_package_keep_what_is_asked_of_others(make_fields, name):
    module = registry.module("metric", name)
    assert needs_problem(module) is None
    fields = make_fields(thresholds=(np.full((9, 16), 0.5), np.full((9, 16), 281.0)))
    fields.events = np.full((2, 2, 9, 16), 280.0)
    together = statistics(name, module, fields)
    assert score(name, module, together).shape[:3] == (3, 2, 4)
    for lead in range(3):
        for key, values in statistics(name, module, fields.at_lead(lead)).items():
            np.testing.assert_allclose(values[0], together[key][lead], rtol=1e-12, atol=1e-12)
