"""The report: what is in the page, and what a person with a keyboard gets to see of it in a browser."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from world import forecasts_of_truth, make_context, make_data, make_experiment

from credit_like.evaluation import report
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.projections import unrolled
from credit_like.evaluation.report import MISSING, quantise, thin, write_report
from credit_like.evaluation.scorecard import print_scorecard
from credit_like.grid import Grid
from credit_like.terminal import plain_console

LEADS = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(page, scores, forecasts, truth store, variables): forecasts that are the truth with noise that grows."""
    folder = tmp_path_factory.mktemp("report")
    experiment = make_experiment(make_data(folder / "world.nc", masked=True), folder)
    experiment = experiment.model_copy(
        update={"evaluation": experiment.evaluation.model_copy(update={"bootstrap": 20})}
    )
    context = make_context(experiment)
    store, variables = context.store, context.variables
    rng = np.random.default_rng(3)

    def noisy(truth):
        noise = rng.standard_normal(truth.shape) * np.arange(1, LEADS + 1)[:, None, None, None]
        return truth + np.nanstd(truth) * 0.1 * noise

    dataset = forecasts_of_truth(store, variables, [32, 34, 36], LEADS, noisy)
    results = evaluate(experiment, dataset, store, store, variables)
    page = write_report(folder / "report.html", results, dataset, store, variables)
    return page, results, dataset, store, variables


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def points(entry, kind, shape):
    values = np.frombuffer(base64.b64decode(entry[kind]), np.uint8).reshape(shape)
    low, high = limits(entry, kind)
    return np.where(values == MISSING, np.nan, low + (high - low) * values / 254.0), (high - low) / 254


def limits(entry, kind):
    """The lower and the upper end of the colours, for every lead where they differ."""
    if kind != "error":
        return entry["range"]
    return np.array(entry["error_ranges"]).T[..., None, None]


def test_the_page_holds_the_scores(made):
    page, results, *_ = made
    scores = data_of(page)["scores"]
    shape = [len(scores[key]) for key in ("sources", "metrics", "regions", "leads")]
    names = []
    for row in scores["channels"]:
        expected = results[row["variable"]]
        expected = expected.sel(level=row["level"]) if row["level"] is not None else expected
        expected = expected.transpose("source", "metric", "region", "lead_time").values
        np.testing.assert_array_equal(floats(row["values"]).reshape(shape), expected.astype("f4"))
        names.append(row["name"])
    assert names == ["u@500", "u@850", "temperature@500", "temperature@850", "sp", "rain"]
    assert scores["leads"] == [6, 12, 18, 24]


def test_the_page_holds_the_fields_to_half_a_byte_step(made):
    page, _, dataset, store, variables = made
    maps = data_of(page)["maps"]
    assert maps["init"] == "2000-01-09T00:00:00"
    assert maps["valid"][-1] == "2000-01-10T00:00:00"
    by_name = {variable.name: variable for variable in variables.outputs}
    for entry in maps["entries"]:
        variable, level = by_name[entry["variable"]], entry["level"]
        forecast = dataset[variable.name].isel(time=0)
        forecast = (forecast if level is None else forecast.sel(level=level)).values
        k = 0 if level is None else variable.levels.index(level)
        truth = store.read([variable], range(33, 33 + LEADS))[:, k]
        for kind, expected in (("truth", truth), ("forecast", forecast), ("error", forecast - truth)):
            got, step = points(entry, kind, expected.shape)
            # Where the truth lacks data the forecast may have some; both are shown as they are.
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            low, high = limits(entry, kind)
            inside = (expected >= low) & (expected <= high)
            assert inside.sum() > 0.98 * np.isfinite(expected).sum()
            assert (np.abs(got - expected) / step)[inside].max() <= 0.501


def test_the_page_holds_the_spectra(made):
    page, results, *_ = made
    spectra = data_of(page)["spectra"]
    assert spectra["leads"] == [6, 12, 18, 24]
    row = next(row for row in spectra["channels"] if row["name"] == "sp")
    expected = results["sp_spectrum"].sel(region="global").transpose("source", "lead_time", "zonal_wavenumber").values
    np.testing.assert_array_equal(floats(row["values"]), expected.astype("f4").ravel())


def test_the_page_refers_to_nothing_outside(made):
    text = made[0].read_text()
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches

    found = []

    class References(HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.extend(value for key, value in attributes if key in ("src", "href", "srcset", "data", "action"))

    References().feed(text)
    assert found == []
    assert "{{" not in text
    assert not list(made[0].parent.glob("*.part"))


HOSTILE = (
    "<!--<script>",
    "</script><img src=x onerror=alert(1)>",
    "]]>&lt;&#60;script&amp;'\"`",
    "{{title}}{{report.js}}{{nothing}}",
    "\\u003c\\",
    "a\u2028b\u2029c\0d\ue000\n\r\t",
)


def with_everywhere(data, text):
    """The data of a page with a text in whatever a file or an experiment may name."""

    def row(entry):
        named = {key: entry[key] + text for key in ("name", "title", "variable") if key in entry}
        return {**entry, **named, **({"unit": text} if "unit" in entry else {})}

    scores = data["scores"]
    changed = {
        "sources": [scores["sources"][0], *(name + text for name in scores["sources"][1:])],
        "regions": [*scores["regions"][:1], *(name + text for name in scores["regions"][1:])],
        "provenance": [text for _ in scores["provenance"]],
        "channels": [row(entry) for entry in scores["channels"]],
    }
    return {
        **data,
        "experiment": text,
        "made": text,
        "scores": {**scores, **changed},
        "ensemble": {**data["ensemble"], "events": [event + text for event in data["ensemble"]["events"]]},
        "spectra": {**data["spectra"], "channels": [row(entry) for entry in data["spectra"]["channels"]]},
        "maps": {**data["maps"], "entries": [row(entry) for entry in data["maps"]["entries"]]},
    }


class Elements(HTMLParser):
    """The elements of a page, and the text of each of its scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.scripts = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, sorted(name for name, _ in attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text):
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += text


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_and_no_unit_changes_the_page(made, text):
    data = data_of(made[0])
    changed = with_everywhere(data, text)
    ours, theirs = Elements(), Elements()
    ours.feed(report.page(data))
    theirs.feed(report.page(changed))
    assert theirs.tags == ours.tags
    assert json.loads(theirs.scripts[0].removesuffix("\n")) == changed
    assert [script.strip() for script in theirs.scripts[1:]] == [script.strip() for script in ours.scripts[1:]]
    # What a browser makes of a script depends on these alone (HTML, "restrictions for contents of script elements").
    assert not set("<>&\u2028\u2029") & set(theirs.scripts[0])


@pytest.mark.parametrize("text", [HOSTILE[0], *(pytest.param(text, marks=pytest.mark.slow) for text in HOSTILE[1:])])
def test_a_browser_shows_hostile_names_as_text(browser, made, tmp_path, text, contrast):
    file = tmp_path / "report.html"
    file.write_text(report.page(with_everywhere(data_of(made[0]), text)), encoding="utf-8")
    context = browser.new_context(offline=True)
    tab = context.new_page()
    asked, errors = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("dialog", lambda dialog: errors.append("a dialog"))
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert tab.locator("#card-table tbody tr").count() == 6
    assert contrast(tab, "#card-table td, #card-legend span") >= 4.5
    for select in (
        "map-variable",
        "card-region",
        "card-baseline",
        "curve-variable",
        "curve-region",
        "spectrum-variable",
    ):
        for index in range(tab.locator(f"#{select} option").count()):
            tab.select_option(f"#{select}", index=index)
    shown = "".join(tab.locator("#provenance").inner_text().split())
    assert "".join(text.replace("\0", "").split()) in shown.replace("\ufffd", "").replace("\0", "")
    assert tab.locator("img").count() == 0
    assert errors == []
    assert asked == [file.as_uri()]
    context.close()


@given(st.integers(0, 99), st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_quantisation_loses_at_most_half_a_step(seed, low, width):
    x = (low + width * np.random.default_rng(seed).uniform(-0.2, 1.2, 200)).astype("f4")
    x[::7] = np.nan
    got = quantise(x, low, low + width)
    np.testing.assert_array_equal(got == MISSING, np.isnan(x))
    shown = low + width * got / 254.0
    rounding = np.spacing(np.float32(abs(low) + width))
    assert (np.abs(shown - np.clip(x, low, low + width))[~np.isnan(x)] <= width / 508 + 4 * rounding).all()


@pytest.mark.parametrize("size", [(32, 64), (181, 360), (721, 1440)])
@pytest.mark.parametrize("leads", [1, 40, 240])
@pytest.mark.parametrize("levels", [[1], [18] * 4 + [1] * 12, [37] * 6 + [1] * 20])
def test_a_page_stays_small(size, leads, levels):
    chosen = thin(*size, leads, levels, 12 * 2**20)
    rows, columns = (-(-n // chosen.stride) for n in size)
    shown = sum(len(chosen.of(range(n))) for n in levels)
    assert 3 * rows * columns * len(chosen.leads) * shown <= 12 * 2**20
    assert {0, leads - 1} <= set(chosen.leads) or len(chosen.leads) == 1
    if size == (32, 64) and leads == 40 and levels == [1]:
        assert chosen.stride == 1
        assert len(chosen.leads) == 40


@pytest.fixture
def tab(browser, made):
    """The page, opened from disk; at the end it must have asked for nothing else and raised no error."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(made[0].as_uri())
    page.wait_for_selector("html[data-ready]")
    yield page
    assert errors == []
    assert asked == [made[0].as_uri()]
    context.close()


def lead_shown(tab):
    return tab.inner_text("#map-lead-text").split(" ·")[0]


def test_leads_by_keyboard(tab):
    assert lead_shown(tab) == "6 h"
    tab.focus("#map-lead")
    tab.keyboard.press("ArrowRight")
    assert lead_shown(tab) == "12 h"
    tab.keyboard.press("End")
    assert lead_shown(tab) == "24 h"
    tab.keyboard.press(".")  # and round again
    assert lead_shown(tab) == "6 h"
    tab.keyboard.press(",")
    assert lead_shown(tab) == "24 h"


def test_play_by_keyboard(tab):
    tab.focus("#map-panels")
    tab.keyboard.press("Space")
    assert tab.get_attribute("#map-play", "aria-pressed") == "true"
    tab.locator("#map-lead-text", has_text="18 h").wait_for()
    tab.keyboard.press("Space")
    assert tab.get_attribute("#map-play", "aria-pressed") == "false"
    stopped = lead_shown(tab)
    tab.wait_for_timeout(1300)
    assert lead_shown(tab) == stopped
    tab.focus("#map-play")
    tab.keyboard.press("Space")
    assert tab.get_attribute("#map-play", "aria-pressed") == "true"


def test_everything_is_reached_by_tabs_and_has_a_name(tab):
    reached = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.className"))
    for control in (
        "map-variable",
        "map-level",
        "map-lead",
        "map-errors",
        "map-play",
        "map-panels",
        "card-baseline",
        "curve-metric",
    ):
        assert control in reached, control
    unnamed = tab.evaluate("[...document.querySelectorAll('select, input')].filter(e => !e.labels.length).length")
    assert unnamed == 0


def test_the_variable_is_chosen_by_keyboard_and_values_are_told(tab, made):
    _, _, dataset, store, variables = made
    tab.focus("#map-variable")
    # One key, because on a busy machine the second may come so late that it begins another name.
    tab.keyboard.press("t")
    tab.keyboard.press("Tab")
    tab.keyboard.press("ArrowDown")  # the other level
    assert tab.input_value("#map-variable") == "temperature"
    assert tab.input_value("#map-level") == "850"
    tab.focus("#map-panels")
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowRight")
    told = tab.inner_text("#map-probe")
    row, column = 8 // 2 - 1, 16 // 2 + 1
    there = dataset["temperature"].isel(time=0, prediction_timedelta=0, level=1).values[row, column]
    truth = store.read([variables.outputs[1]], [33])[0, 1, row, column]
    numbers = dict(re.findall(r"(truth|forecast|error) (-?[\d.e-]+)", told))
    assert float(numbers["forecast"]) == pytest.approx(float(there), abs=0.6)
    assert float(numbers["truth"]) == pytest.approx(float(truth), abs=0.6)
    assert told.startswith(("11.2° N, 158° W", "11.3° N, 158° W"))
    assert told.endswith(" K")


def test_points_have_the_colours_of_their_values(tab, made):
    maps = data_of(made[0])["maps"]
    entry = maps["entries"][0]
    values = np.frombuffer(base64.b64decode(entry["truth"]), np.uint8).reshape(LEADS, 8, 16)[0]
    table = np.frombuffer(base64.b64decode(maps["colours"][entry["colours"]]), np.uint8).reshape(255, 3)
    pixels = tab.evaluate(
        """() => { const c = document.getElementById('map-truth'), n = c.width / 16;
        const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, out = [];
        for (let y = 0; y < 8; y++) for (let x = 0; x < 16; x++) {
            const at = 4 * (Math.floor((y + 0.5) * n) * c.width + Math.floor((x + 0.5) * n));
            out.push([all[at], all[at + 1], all[at + 2]]); }
        return out; }"""
    )
    expected = np.where((values == MISSING)[..., None], 190, table[np.minimum(values, 254)]).reshape(-1, 3)
    same = (np.array(pixels) == expected).all(1)
    assert same.mean() > 0.9  # some centres lie on a coastline
    assert (values == MISSING).sum() == 6


@pytest.mark.parametrize(
    ("low", "high"),
    [(298.3, 300.4), (1009.2, 1011.4), (1.0e6, 1.2e6), (0, 1), (-3e-5, 4e-5), (0, 120), (2e-9, 9e-9), (-40, 40)],
)
def test_every_tick_has_its_own_label_which_is_its_value(tab, low, high):
    script = f"(() => {{ const t = ticks({low}, {high}); return t.map((x) => [x, tickText(x, t[1] - t[0])]) }})()"
    found = tab.evaluate(script)
    assert 3 <= len(found) <= 11
    assert len({label for _, label in found}) == len(found)
    step = found[1][0] - found[0][0]
    for value, label in found:
        digits, _, power = label.replace("−", "-").partition(" × 10")
        exponent = int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)
        assert float(digits) * 10.0**exponent == pytest.approx(value, abs=0.01 * step)


def test_leads_are_told_as_they_are(tab):
    assert tab.evaluate("[6, 100.5, 100.25, 1000.5, 0.5].map(leadText)") == [
        "6 h",
        "100.5 h",
        "100.25 h",
        "1000.5 h",
        "0.5 h",
    ]
    assert tab.evaluate("ticks(1, 5, false, true)") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("longitude", "place", "column"),
    [
        (np.arange(0, 360, 10), 340, 34.5),
        (np.arange(350, -1, -10), 340, 1.5),
        (np.r_[0:180:10, -180:0:10], 90, 9.5),
        (np.r_[0:180:10, -180:0:10], -90, 27.5),
        (np.array([170, 180, -170, -160, -150]), 180, 1.5),
        (np.array([170, 180, -170, -160, -150]), -170, 2.5),
    ],
)
def test_coasts_are_at_their_longitude(tab, longitude, place, column):
    """On any longitudes that a grid may have; the page has them without a jump."""
    axis = unrolled(Grid(np.array([10.0, -10.0]), longitude.astype(float))).tolist()
    assert tab.evaluate(f"columnOf({place}, {axis})") == pytest.approx(column, abs=1e-9)


def test_the_scorecard_compares_with_the_chosen_baseline(tab, made):
    results = made[1]
    for baseline in ("persistence", "climatology"):
        tab.select_option("#card-baseline", baseline)
        cells = tab.locator("#card-table tbody tr").all()
        assert len(cells) == 6
        shown = [cell.replace("−", "-") for cell in cells[0].locator("td").all_inner_texts()]
        rmse = results["u"].sel(metric="rmse", region="global", level=500)
        change = 100 * (rmse.sel(source="model") / rmse.sel(source=baseline) - 1).values
        np.testing.assert_allclose([float(cell) for cell in shown], change, atol=0.5)
        assert baseline in tab.inner_text("#card-note")


@pytest.mark.parametrize("metrics", [["acc"], []])
def test_scores_without_the_rmse_have_a_table_and_a_page(browser, made, tmp_path, metrics):
    """As of `metrics: [acc]`, and of `metrics: [spectrum]`, which has wavenumbers beside the leads."""
    _, results, dataset, store, variables = made
    some = results.sel(metric=np.array(metrics, str))
    console = plain_console(file=io.StringIO(), width=120)
    print_scorecard(some, console)
    text = console.file.getvalue()
    assert ("ACC of model over 3 initial times" in text) == bool(metrics)
    assert ("none of the metrics" in text) == (not metrics)
    assert "pers." not in text
    errors = []
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(write_report(tmp_path / "report.html", some, dataset, store, variables).as_uri())
    page.wait_for_selector("html[data-ready]")
    page.close()
    assert errors == []


def test_curves_follow_the_choice(tab, made):
    def drawn():
        return tab.locator("#curve-plot path").count()

    assert drawn() == 3
    tab.select_option("#curve-metric", "acc")
    assert drawn() == 2  # climatology has no anomaly
    assert tab.locator("#curve-plot polygon").count() == 2
    assert tab.get_attribute("#curve-plot", "aria-label") == "ACC of u 500 hPa"
    tab.select_option("#curve-variable", "rain")
    assert tab.locator("#ensemble, #members, #spread-figure").count() == 0  # one member
    assert tab.is_disabled("#curve-level")
    assert tab.locator("#spectrum-plot path").count() == 3


def test_winds_diverge_and_errors_have_the_scale_that_is_chosen(tab, made):
    entry = next(entry for entry in data_of(made[0])["maps"]["entries"] if entry["variable"] == "u")
    assert entry["colours"] == "PuOr_r"
    assert entry["range"][0] == -entry["range"][1]
    shown = tab.inner_text("#bar-error")
    tab.select_option("#map-errors", "common")
    assert tab.inner_text("#bar-error") != shown
    largest = max(high for _, high in entry["error_ranges"])
    assert float(tab.inner_text("#bar-error").split()[-3]) == pytest.approx(largest, rel=0.01)  # and m s⁻¹


def test_maps_have_degrees_at_their_edges(tab):
    ticks = tab.locator("#map-panels figure:first-child .frame span").all_inner_texts()
    assert {"60°N", "0°", "60°S", "60°E", "180°", "60°W"} <= set(ticks)


@pytest.mark.parametrize("last", [7, 21])
def test_spectra_end_where_the_data_end(last):
    k = np.arange(1.0, 33)
    energy = np.concatenate([[1.0], k**-3.0])
    cut = np.where(np.arange(33) > last, energy * 1e-3, energy)
    assert report.truncation(cut[None]) == last
    assert report.truncation(energy[None]) == 32
    for spectra, expected in (([energy, cut], last), ([cut, energy], 32)):
        (row,) = report.describe_spectra(with_spectra(spectra, "Pa"))["channels"]
        assert row["last"] == expected
        assert row["unit"] == "Pa² m"


@pytest.mark.parametrize(("units", "text"), [("1", "m"), ("m s-1", "m² s⁻² m"), ("", "")])
def test_spectra_are_in_squared_units_times_metres(units, text):
    (row,) = report.describe_spectra(with_spectra(np.ones((2, 33)), units))["channels"]
    assert row["unit"] == text


def with_spectra(spectra, units):
    """Return scores with the spectra of the model and of persistence."""
    lead = np.array([6], "timedelta64[h]").astype("timedelta64[ns]")
    coords = {"source": ["model", "persistence"], "metric": ["rmse"], "region": ["global"], "lead_time": lead}
    dims = ("source", "region", "lead_time", "zonal_wavenumber")
    return xr.Dataset(
        {
            "sp": (tuple(coords), np.ones((2, 1, 1, 1)), {"units": units}),
            "sp_spectrum": (dims, np.array(spectra)[:, None, None]),
        },
        coords,
    )


def test_an_axis_of_one_lead_has_its_number(tab):
    draw = """() => {
        const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
        plot(svg, [{ name: 'model', x: [24], y: [1.5] }], { x: 'lead time (h)', y: 'RMSE', label: '' });
        return [...svg.querySelectorAll('text')].filter((one) => one.getAttribute('y') === String(BOX.bottom + 16))
            .map((one) => one.textContent);
    }"""
    assert tab.evaluate(draw) == ["24"]
