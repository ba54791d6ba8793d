"""The report of an ensemble: what is in the page, and what a browser draws of it."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from world import make_context, make_data, make_experiment

from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.report import MISSING, thin, write_report
from tests.evaluation.test_report import data_of
from tests.evaluation.test_thresholds import LEADS, METRICS, SECTION, ensemble

MEMBERS = 14  # more than a page has stamps


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(page, scores, forecasts, variables, truth) of an ensemble beside another one, of fewer members."""
    folder = tmp_path_factory.mktemp("report")
    experiment = make_experiment(make_data(folder / "world.nc", masked=True), folder)
    context = make_context(experiment)
    store, variables = context.store, context.variables
    ensemble(store, variables, 3).to_netcdf(folder / "small.nc")
    update = {
        "metrics": (*METRICS, "mae", "spread"),
        "thresholds": SECTION,
        "baselines": {"small": str(folder / "small.nc")},
    }
    experiment = experiment.model_copy(update={"evaluation": experiment.evaluation.model_copy(update=update)})
    dataset = ensemble(store, variables, MEMBERS)
    results = evaluate(experiment, dataset, store, store, variables)
    page = write_report(folder / "report.html", results, dataset, store, variables)
    return page, results, dataset, variables, store


def test_the_page_holds_the_scores_of_events_and_ranks(made):
    page, results, *_ = made
    shown = data_of(page)["ensemble"]
    assert shown["events"] == list(results["threshold"].values)
    assert shown["leads"] == [6, 12]
    names = {"rank": "rank_histogram", "reliability": "reliability", "brier": "brier"}
    for row in shown["channels"]:
        variable, _, level = row["name"].partition("@")
        for kind, suffix in names.items():
            expected = results[f"{variable}_{suffix}"].sel(region="global")
            expected = (expected.sel(level=float(level)) if level else expected).transpose("source", "lead_time", ...)
            got = np.frombuffer(base64.b64decode(row[kind]), "<f4").reshape(expected.shape)
            np.testing.assert_array_equal(got, expected.values.astype("f4"))
    assert len(shown["channels"]) == 6


def test_the_page_holds_spread_and_members_to_half_a_step(made):
    page, _, dataset, *_ = made
    maps = data_of(page)["maps"]
    assert maps["members"] == MEMBERS
    chosen = maps["stamps"]["members"]
    assert len(chosen) == 12
    assert {0, MEMBERS - 1} <= set(chosen)
    for entry in maps["entries"]:
        field = dataset[entry["variable"]].isel(time=0)
        field = (field if entry["level"] is None else field.sel(level=entry["level"])).values.astype("f8")
        for kind, expected in (("spread", field.std(0, ddof=1)), ("members", field[chosen])):
            low, high = entry["spread_range" if kind == "spread" else "range"]
            byte = np.frombuffer(base64.b64decode(entry[kind]), np.uint8).reshape(expected.shape)
            got = np.where(byte == MISSING, np.nan, low + (high - low) * byte / 254.0)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            inside = (expected >= low) & (expected <= high)
            assert inside.sum() > 0.85 * np.isfinite(expected).sum()  # the scale is that of mean and truth
            assert np.abs(got - expected)[inside].max() <= (high - low) / 254 * 0.501


@pytest.mark.parametrize("size", [(32, 64), (181, 360), (721, 1440)])
@pytest.mark.parametrize("members", [2, 50])
def test_a_page_with_members_stays_small(size, members):
    levels = [18] * 4 + [1] * 12
    chosen = thin(*size, 40, levels, 12 * 2**20, members)
    rows, columns = (-(-n // chosen.stride) for n in size)
    apart = -(-columns // 90)
    bytes_of_a_field = 4 * rows * columns + min(12, members) * -(-rows // apart) * -(-columns // apart)
    assert bytes_of_a_field * len(chosen.leads) * sum(len(chosen.of(range(n))) for n in levels) <= 12 * 2**20


def test_a_browser_draws_the_ensemble(browser, made):
    page, results, *_ = made
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert tab.locator("#stamps canvas").count() == 13  # the truth and twelve members
    assert tab.locator("#plume-plot path").count() == 14  # these, and the mean
    assert "12 of 14 members" in tab.inner_text("#members-note")
    assert tab.locator("#map-spread").count() == 1
    # The ensembles are the model and the one of three members; all sources have a CRPS, and the mean its MAE.
    assert tab.locator("#ensemble-source option").all_inner_texts() == ["model", "small"]
    assert tab.locator("#spread-plot path").count() == 2
    assert tab.locator("#ratio-plot path").count() == 2
    assert tab.locator("#ratio-plot .reference").count() == 1
    assert tab.locator("#crps-plot path").count() == 5
    tab.select_option("#ensemble-event", label="above 99000")
    assert tab.locator("#brier-plot path").count() == 0  # u has no threshold of this value
    tab.select_option("#ensemble-event", label="above quantile 0.9")
    assert tab.locator("#brier-plot path").count() == 4
    tab.select_option("#ensemble-variable", "sp")
    for source, n in (("model", MEMBERS), ("small", 3)):
        tab.select_option("#ensemble-source", source)
        at = {"region": "global", "source": source}
        expected = results["sp_rank_histogram"].sel(at).isel(lead_time=-1).values
        heights = tab.locator("#rank-plot rect").evaluate_all(
            "all => all.map(bar => Number(bar.getAttribute('height')))"
        )
        assert len(heights) == n + 1
        np.testing.assert_allclose(np.array(heights) / sum(heights), expected[: n + 1], atol=1e-5)
        parts = results["sp_reliability"].sel(at).isel(lead_time=-1).sel(threshold="above quantile 0.9")
        told = [text.split(": observed ") for text in tab.locator("#reliability-plot circle title").all_text_contents()]
        there = parts.values[parts.sel(reliability_part="fraction").values > 0]
        assert len(told) == len(there)
        np.testing.assert_allclose([float(p.removeprefix("probability ")) for p, _ in told], there[:, 1], atol=6e-3)
        np.testing.assert_allclose([float(o.split(",")[0]) for _, o in told], there[:, 2], atol=6e-3)
    tab.focus("#map-panels")
    tab.keyboard.press("ArrowUp")
    assert "spread" in tab.inner_text("#map-probe")
    unnamed = tab.evaluate("[...document.querySelectorAll('select, input')].filter(e => !e.labels.length).length")
    assert unnamed == 0
    assert errors == []
    context.close()


POINTS = """id => [...document.querySelectorAll(`#${id} circle`)].map(
    (dot) => [dot.querySelector("title").textContent, Number(dot.getAttribute("cx")), Number(dot.getAttribute("cy"))])"""
TICKS = """id => [...document.querySelectorAll(`#${id} text:not([transform])`)].map(
    (one) => [one.textContent, one.getAttribute("text-anchor"), Number(one.getAttribute("x")), Number(one.getAttribute("y"))])"""
CHOOSE = """([id, value]) => { const select = document.getElementById(id); select.value = value;
    select.dispatchEvent(new Event("change")); return select.value === value; }"""


def number(text):
    digits, _, exponent = text.replace("−", "-").partition(" × 10")
    return float(digits) * 10.0 ** int(exponent.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)


def read_off(tab, plot):
    """The points of a diagram by the labels of its axes, (curve, lead, value), as a reader would; their titles say the same."""
    ticks, found = tab.evaluate(TICKS, plot), []
    below = max(y for _, anchor, _, y in ticks if anchor == "middle") - 22  # under the ticks is the name of the axis
    along = [(number(text), x) for text, anchor, x, y in ticks if anchor == "middle" and y == below]
    up = [(number(text), y - 4) for text, anchor, _, y in ticks if anchor == "end"]
    x_of, y_of = (np.polyfit([at for _, at in axis], [value for value, _ in axis], 1) for axis in (along, up))
    for title, x, y in tab.evaluate(POINTS, plot):
        curve, told = title.split(": ")
        value, lead = map(number, told.split(" at "))
        found.append((curve, np.polyval(x_of, x), np.polyval(y_of, y)))
        assert lead == pytest.approx(found[-1][1])
        assert value == pytest.approx(found[-1][2], rel=0.06, abs=1e-3 * abs(y_of[0]))
    return found


@pytest.mark.parametrize("grid", ["global", "regional"])
def test_points_of_curves_are_the_scores(browser, made, tmp_path, grid):
    """Of every variable, level, region and metric, and of each ensemble the scores of the whole grid."""
    _, results, dataset, variables, store = made
    results = results.assign_attrs(grid=grid)
    tab = browser.new_page()
    tab.goto(write_report(tmp_path / "report.html", results, dataset, store, variables).as_uri())
    tab.wait_for_selector("html[data-ready]", timeout=900_000)
    hours = results["lead_time"].values / np.timedelta64(1, "h")

    def check(plot, scores, curves):
        """Compare with the scores (name of the curve, source, metric)."""
        expected = [
            (name, lead, value)
            for name, source, metric in curves
            for lead, value in zip(hours, scores.sel(source=source, metric=metric).values, strict=True)
            if np.isfinite(value)
        ]
        found = read_off(tab, plot)
        assert [point[0] for point in found] == [point[0] for point in expected]
        wanted, got = (np.array([point[1:] for point in points]) for points in (expected, found))
        np.testing.assert_allclose(got, wanted, rtol=1e-4)

    sources = list(results["source"].values)
    for variable, level in (("temperature", 850.0), ("rain", None)):
        scores = results[variable] if level is None else results[variable].sel(level=level)
        for part in ("curve", "ensemble"):
            assert tab.evaluate(CHOOSE, [f"{part}-variable", variable])
            assert level is None or tab.evaluate(CHOOSE, [f"{part}-level", f"{level:g}"])
        for region in results["region"].values:
            shown = "whole regional grid" if (grid, region) == ("regional", "global") else region
            assert tab.evaluate(CHOOSE, ["curve-region", shown])
            for metric in ("rmse", "fair-crps", "spread"):
                assert tab.evaluate(CHOOSE, ["curve-metric", metric])
                check("curve-plot", scores.sel(region=region), [(source, source, metric) for source in sources])
        whole = scores.sel(region="global")
        for source in ("model", "small"):
            assert tab.evaluate(CHOOSE, ["ensemble-source", source])
            check("spread-plot", whole, [("error", source, "rmse"), ("spread", source, "spread")])
            check("ratio-plot", whole, [(name, name, "spread-error") for name in ("model", "small")])
            names = {name: f"{name}, CRPS" if name in ("model", "small") else name for name in sources}
            crps = [(shown, name, "fair-crps") for name, shown in names.items()]
            check("crps-plot", whole, [crps[0], ("mean, MAE", source, "mae"), *crps[1:]])
    where = "globe" if grid == "global" else "whole regional grid"
    assert tab.inner_text("#ensemble-note").startswith(f"Over the {where}. ")
    tab.close()


def test_leads_of_the_page_are_those_of_the_scores(made):
    assert data_of(made[0])["scores"]["leads"] == [6 * (lead + 1) for lead in range(LEADS)]
