"""What figures show: names, units and times in words, panels only where there are values, and the chosen map."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from world import make_context, make_data, make_experiment

from credit_like import naming
from credit_like.errors import UserError
from credit_like.evaluation import charts
from credit_like.evaluation.charts import Row, Style, chart
from credit_like.evaluation.coasts import natural_earth, own_coast
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.maps import Choice, plot_maps
from credit_like.evaluation.plots import (
    _rank_figure,
    _reliability_figure,
    _scores_figure,
    _spread_figure,
    plot_ensemble,
    plot_scores,
)
from credit_like.evaluation.scorecard import channels
from credit_like.grid import Grid
from credit_like.outputs import save_figure
from tests.evaluation.test_thresholds import METRICS, SECTION, ensemble
from tests.test_terminal import scores


@pytest.mark.parametrize(
    ("units", "text"),
    [
        ("m s**-1", "m s⁻¹"), ("m s-1", "m s⁻¹"), ("m/s", "m s⁻¹"), ("m^2 s^-2", "m² s⁻²"), ("m2/s2", "m² s⁻²"),
        ("kg kg**-1", "kg kg⁻¹"), ("K", "K"), ("1", ""), ("", ""), ("(0 - 1)", ""), ("W m-2", "W m⁻²"),
        ("J m**-2", "J m⁻²"), ("a strange (unit)", "a strange (unit)"),
    ],
)  # fmt: skip
def test_units(units, text):
    assert naming.units_text(units) == text


@pytest.mark.parametrize(
    ("units", "text"),
    [
        ("m s**-1", "m² s⁻²"),
        ("m2 s-2", "m⁴ s⁻⁴"),
        ("W/m2", "W² m⁻⁴"),
        ("K", "K²"),
        ("1", ""),
        ("a (unit)", "(a (unit))²"),
    ],
)
def test_squared_units(units, text):
    assert naming.units_text(units, 2) == text


@pytest.mark.parametrize(
    ("level", "units", "text"),
    [
        (20000, "Pa", "200 hPa"), (850, "hPa", "850 hPa"), (850, "millibars", "850 hPa"), (85, "kPa", "850 hPa"), (2, "m", "2 m"),
        (3, "", "level 3"), (5.5, "level", "level 5.5"),
    ],
)  # fmt: skip
def test_levels(level, units, text):
    assert naming.level_text(level, units) == text


def test_positions():
    assert [naming.longitude_text(x) for x in (0, 80, 180, 280, -80, 360)] == [
        "0°",
        "80°E",
        "180°",
        "80°W",
        "80°W",
        "0°",
    ]
    assert [naming.latitude_text(x) for x in (-30, 0, 60)] == ["30°S", "0°", "60°N"]


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_curves_have_units_and_regular_leads_and_no_empty_panel(tmp_path):
    results = scores()
    results["wind"] = results["u"].where(results["metric"] == "rmse")
    panels = [p for p in channels(results) if np.isfinite(p[1].sel(metric="rmse")).any()]
    figure = _scores_figure(results, panels, "rmse", "RMSE")
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[:3] == ["u 500 hPa (m s⁻¹)", "u 850 hPa (m s⁻¹)", "q 500 hPa (10⁻⁶ kg kg⁻¹)"]
    assert len(titles) == 6
    assert [ax.get_xticks().tolist() for ax in figure.axes] == [[0, 12, 24, 36, 48, 60, 72]] * 6
    results.attrs["labels"] = '{"rmse": "RMSE", "acc": "ACC"}'
    paths = plot_scores(results, tmp_path)
    assert {path.name for path in paths} == {"rmse.png", "acc.png"}
    height = {path.stem: imread(path).shape[0] for path in paths}
    assert height["acc"] < height["rmse"]  # the wind has no panel there, which saves a row


@pytest.mark.parametrize("text", ["$m$", "m$^{-1$", r"$\frac$", "a_b^c"])
def test_names_and_units_are_no_mathematics(tmp_path, text):
    results = scores().rename(q=f"q{text}")
    results["u"].attrs["units"] = text
    assert len(plot_scores(results, tmp_path)) >= 1
    figure = Figure()
    ax = figure.add_subplot()
    ax.semilogy([1e-5, 1e5], label=text)
    ax.set_title(text)
    ax.legend()
    save_figure(figure, tmp_path / "figure.png", dpi=50)
    there = {label.get_text(): label.get_parse_math() for label in figure.findobj(Text)}
    assert there[text] == ("$" not in text)
    assert there["$\\mathdefault{10^{5}}$"]


def test_a_metric_without_values_has_no_figure(tmp_path):
    results = scores()
    results = results.where(results["metric"] != "bias").assign(initial_times=21)
    results.attrs["labels"] = '{"bias": "bias"}'
    assert plot_scores(results, tmp_path) == []


def test_an_ensemble_has_figures_of_its_scores(tmp_path):
    experiment = make_experiment(make_data(tmp_path / "world.nc", masked=True), tmp_path)
    context = make_context(experiment)
    store, variables = context.store, context.variables
    ensemble(store, variables, 6).to_netcdf(tmp_path / "larger.nc")  # has more ranks than the model
    update = {
        "metrics": (*METRICS, "spread"),
        "thresholds": SECTION,
        "baselines": {"larger": str(tmp_path / "larger.nc")},
    }
    experiment = experiment.model_copy(update={"evaluation": experiment.evaluation.model_copy(update=update)})
    results = evaluate(experiment, ensemble(store, variables, 4), store, store, variables)
    assert [path.name for path in plot_ensemble(results, tmp_path)] == [
        "spread.png",
        "rank-histogram.png",
        "reliability.png",
    ]
    assert all(imread(tmp_path / f"{name}.png").std() > 0.01 for name in ("spread", "rank-histogram", "reliability"))

    figure = _rank_figure(results)
    (stairs, *_) = figure.axes[0].patches
    np.testing.assert_array_equal(
        stairs.get_data().values, results["u_rank_histogram"].sel(source="model", region="global", level=500)[0, :5]
    )
    figure = _spread_figure(results)
    assert [ax.get_title(loc="left") for ax in figure.axes][4] == "sp (Pa)"
    expected = results["sp"].sel(source="model", region="global", metric=["rmse", "spread"]).values
    np.testing.assert_allclose([line.get_ydata() for line in figure.axes[4].lines], expected)
    figure = _reliability_figure(results)
    part = results["sp_reliability"].sel(source="model", region="global")[-1].sel(threshold="above quantile 0.9")
    there = part.sel(reliability_part="fraction").values > 0
    (line,) = (line for line in figure.axes[4].lines if line.get_label() == "above quantile 0.9")
    np.testing.assert_array_equal(line.get_xydata(), part.values[there, 1:])


def test_forecasts_of_one_member_have_no_figures_of_an_ensemble(tmp_path):
    assert plot_ensemble(scores().assign(initial_times=21), tmp_path) == []


def test_curves_of_one_lead_are_seen():
    results = scores().isel(lead_time=[0]).assign(initial_times=21)
    spread = results.sel(metric=["rmse"]).assign_coords(metric=["spread"])
    results = xr.concat(
        [results, spread], "metric", data_vars="minimal", compat="override", coords="minimal", join="outer"
    )
    for ax in _spread_figure(results).axes:
        assert [line.get_marker() for line in ax.lines] == [".", "."]


def test_the_legend_has_what_any_panel_has():
    results = scores(levels=(50000.0,))
    results["u"] = results["u"].where(results["source"] != "climatology")
    panels = list(channels(results))
    assert [line.get_label() for line in _scores_figure(results, panels, "bias", "bias").axes[0].lines][:2] == [
        "model",
        "persistence",
    ]
    (legend,) = _scores_figure(results, panels, "bias", "bias").legends
    assert [text.get_text() for text in legend.get_texts()] == ["model", "persistence", "climatology"]


GRID = Grid(90 - (np.arange(8) + 0.5) * 22.5, np.arange(16) * 22.5)


def rows():
    field = np.random.default_rng(0).standard_normal((8, 16))
    return [Row(field, field + 0.5, "2000-09-27 06 UTC", "6 h"), Row(field, field * 2, "2000-09-28 00 UTC", "24 h")]


def test_a_map_says_when_and_where():
    style = Style("plate-carree", centre=(0, 0))
    figure = chart("u 850 hPa", "m s**-1", "2000-09-27 00 UTC", rows(), GRID, natural_earth(), style)
    shown = [*texts(figure), *(ax.get_title(loc="left") for ax in figure.axes)]
    for text in (
        "u 850 hPa (m s⁻¹)", "forecast from 2000-09-27 00 UTC", "truth, 2000-09-28 00 UTC", "forecast, 24 h",
        "error, RMSE 0.5 m s⁻¹", "60°N", "30°S", "120°E", "120°W",
    ):  # fmt: skip
        assert text in shown


@pytest.mark.parametrize("scale", ["lead", "common"])
def test_errors_have_the_shades_of_their_lead_or_of_all(scale):
    truth, forecast = (np.array([getattr(row, name) for row in rows()]) for name in ("truth", "forecast"))
    first, last = charts._error_shades(forecast - truth, Style(error_scale=scale))
    assert (first.levels[-1] == last.levels[-1]) == (scale == "common")
    assert last.levels[-1] > 1.5


def test_a_scale_of_errors_that_is_not_there():
    with pytest.raises(UserError, match="--error-scale: expected lead or common, got 'each'"):
        Style(error_scale="each")


@pytest.mark.parametrize(
    ("values", "colours", "symmetric"),
    [((-20.0, 30.0), "PuOr_r", True), ((0.0, 5.0), "YlGnBu", False), ((250.0, 300.0), "viridis", False)],
)
def test_colours_follow_the_values(values, colours, symmetric):
    truth = np.linspace(*values, 200)
    shades = charts.field_shades(truth, np.stack([truth, truth - 0.02 * np.ptp(truth)]))  # slightly biased
    assert shades.colours == colours
    assert shades.is_diverging == symmetric
    small = charts.field_shades(1e-12 * truth, 1e-12 * np.stack([truth, truth - 0.02 * np.ptp(truth)]))
    assert (small.colours, small.is_diverging) == (colours, symmetric)  # mixing ratios of trace gases


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_shades_are_round_and_enclose_the_range(low, width):
    levels = charts.round_levels(low, low + width)
    assert levels[0] <= low + 1e-6 * width + 1e-9 * abs(low)
    assert levels[-1] >= low + width * (1 - 1e-6) - 1e-9 * abs(low)
    assert 3 <= len(levels) <= 19
    levels = charts.symmetric_levels(width)
    np.testing.assert_allclose(levels, -levels[::-1])
    assert 2 <= len(levels) <= 18
    digits = np.diff(levels)[0] / 10.0 ** np.floor(np.log10(np.diff(levels)[0] * (1 + 1e-9)))
    assert min(abs(digits - step) for step in (1, 2, 2.5, 5, 10)) < 1e-6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store and a made forecast of two leads from its own fields."""
    folder = tmp_path_factory.mktemp("maps")
    data = make_data(folder / "data.zarr")
    context = make_context(make_experiment(data, folder / "run"))
    store = context.store
    dataset = xr.Dataset(coords={
        "time": store.times[:1].astype("datetime64[ns]"),
        "prediction_timedelta": np.array([6, 12], "timedelta64[h]").astype("timedelta64[ns]"),
        "latitude": store.grid.latitude, "longitude": store.grid.longitude,
    })  # fmt: skip
    for variable in context.variables.outputs:
        values = store.read([variable], [1, 2])
        dims = ("time", "prediction_timedelta", "level", "latitude", "longitude")
        if variable.levels:
            dataset = dataset.assign_coords(level=list(variable.levels))
            dataset[variable.name] = (dims, values[None])
        else:
            dataset[variable.name] = (tuple(dim for dim in dims if dim != "level"), values[None, :, 0])
    return dataset, context


def test_coasts_are_natural_earths_without_a_mask(made):
    assert own_coast(made[1].store) is None
    lines = natural_earth()
    assert len(lines) > 100
    assert all(np.abs(line).max(0)[0] <= 180 and np.abs(line[:, 1]).max() <= 90 for line in lines)


def test_one_map_is_chosen(made, tmp_path):
    dataset, context = made
    variable = next(v for v in context.variables.outputs if len(v.levels) > 1)
    level = variable.levels[0]
    (path,) = plot_maps(dataset, context.store, context.variables, tmp_path,
                        choice=Choice(variable.name, level, 12 * 3600, "2000-01-01"))  # fmt: skip
    shown = naming.level_text(level, context.store.level_units(variable)).replace(" ", "")
    assert path.name == f"map_{variable.name}_{shown}_20000101T000000_12h.png"
    assert imread(path).shape[1] > 1000


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("nothing"), "--variable: expected one of .*, got 'nothing'"),
        (Choice(level=1.5), r"--level: expected a level of .* \(.*\), got 1.5"),
        (Choice(init="2000-01-02"), "--init: expected an initial time of the forecasts, 2000-01-01T00:00:00 to .*, got 2000-01-02"),
        (Choice(init="tomorrow"), "--init: expected a time such as 2020-01-05T12, got 'tomorrow'"),
        (Choice(lead_seconds=7 * 3600), r"--lead: expected a lead of the forecasts, 6 h to 12 h, got 7 h; did you mean 6h"),
    ],
)  # fmt: skip
def test_a_map_that_is_not_there(made, tmp_path, choice, message):
    dataset, context = made
    with pytest.raises(UserError, match=message):
        plot_maps(dataset, context.store, context.variables, tmp_path, choice=choice)
