"""Two runs on one page: the same figures as the table, hostile text as text, and nothing asked of a network."""

import numpy as np
import pytest
import xarray as xr
import yaml

from credit_like.cli import main
from credit_like.errors import UserError
from credit_like.evaluation.compare_page import write_comparison
from credit_like.evaluation.results import save_results
from tests.evaluation.test_report import data_of
from tests.test_runs import make_run
from tests.test_terminal import scores

HOSTILE = "<!--<script>alert(1)</script><img src=x onerror=alert(2)>{{title}}&amp;"


@pytest.fixture
def pair(tmp_path):
    """Two runs with scores and intervals, the second with half the error, and hostile text in names and values."""
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / HOSTILE.replace("/", ""), rate=0.01)]
    for run, factor in zip(runs, (1.0, 0.5), strict=True):
        document = yaml.safe_load((run / "experiment.yml").read_text())
        document["loss"]["type"] = HOSTILE + str(factor)
        (run / "experiment.yml").write_text(yaml.safe_dump(document, sort_keys=False))
        results = scores()
        rmse = results.sel(metric=["rmse"])
        ends = [(rmse * scale).assign_coords(metric=[name]) for scale, name in ((0.9, "rmse_low"), (1.1, "rmse_high"))]
        joined = {"data_vars": "minimal", "coords": "minimal", "compat": "override", "join": "outer"}
        results = xr.concat([results, *ends], "metric", **joined) * factor
        results["u"].attrs["units"] = HOSTILE
        results = results.assign(initial_times=21).assign_coords(provenance=("source", ["x"] * 3))
        save_results(results, run / "evaluation")
    return runs


def test_the_page_holds_differences_curves_and_scores(pair, tmp_path):
    data = data_of(write_comparison(tmp_path / "page.html", *pair))
    assert data["names"] == [pair[0].name, pair[1].name]
    facts = {label: values for label, *values in data["facts"]}
    assert facts["trainer.optimizer.learning_rate"] == ["0.001", "0.01"]
    assert facts["loss.type"] == [HOSTILE + "1.0", HOSTILE + "0.5"]
    training, validation = data["curves"]
    assert training["runs"][0]["x"] == list(range(1, 21))
    np.testing.assert_allclose(training["runs"][0]["y"], 1 / np.arange(1, 21))
    assert validation["runs"][1]["y"] == [0.5, 0.25, 0.3]
    assert data["scores"]["leads"] == [6, 24, 72]
    assert len(data["scores"]["channels"]) == 4
    for row in data["scores"]["channels"]:
        assert row["ratios"] == [[0.5, None, False, 2]] * 3
        assert row["runs"][0]["low"] == pytest.approx(0.9 * np.array(row["runs"][0]["y"]))


def test_a_run_without_scores_and_without_a_log(tmp_path):
    runs = [make_run(tmp_path / name) for name in "ab"]
    (runs[1] / "log.jsonl").unlink()
    data = data_of(write_comparison(tmp_path / "page.html", *runs))
    assert data["scores"] is None
    assert data["lacking"] == ["a", "b"]
    assert data["curves"][0]["runs"][1]["x"] == []


def test_what_cannot_be_compared(tmp_path):
    with pytest.raises(UserError, match="--compare: expected the folder of a run"):
        write_comparison(tmp_path / "page.html", tmp_path, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["runs", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert ended.value.code == 2


def test_long_logs_are_averaged(tmp_path):
    runs = [make_run(tmp_path / name, steps=2000) for name in "ab"]
    one = data_of(write_comparison(tmp_path / "page.html", *runs))["curves"][0]["runs"][0]
    assert len(one["x"]) == 400
    np.testing.assert_allclose(np.mean(one["y"]), np.mean(1 / np.arange(1, 2001)))


def test_a_browser_shows_the_page_and_asks_for_nothing(browser, pair, tmp_path):
    page = write_comparison(tmp_path / "page.html", *pair)
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    asked, errors = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("dialog", lambda dialog: errors.append("a dialog"))
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert pair[1].name in tab.inner_text("#facts")
    assert HOSTILE in tab.inner_text("#facts")
    assert tab.locator("#losses svg path").count() == 4
    cells = tab.locator("#ratio-table tbody tr").first.locator("td").all_inner_texts()
    assert cells == ["0.50"] * 3
    assert tab.locator("#ratio-table td.sure").count() == 0
    assert "run credit-like evaluate" in tab.inner_text("#ratio-note").replace("`", "")
    assert tab.locator("#difference-plot").count() == 0
    tab.select_option("#score-variable", "q")
    tab.select_option("#score-level", "85000")
    assert tab.get_attribute("#score-plot", "aria-label") == "RMSE of q 850 hPa"
    assert tab.locator("#score-plot path").count() == 2
    assert tab.locator("#score-plot polygon").count() == 2
    assert tab.locator("img").count() == 0
    assert errors == []
    assert asked == [page.as_uri()]
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_seen_of_runs_with_long_names_and_values(browser, tmp_path, contrast, scheme):
    names = "a", "phases_of-a-curriculum " + "x" * 40 + " learning_rate-0.001_seed-3"
    runs = [make_run(tmp_path / name) for name in names]
    with (runs[1] / "experiment.yml").open("a") as file:
        file.write(f"phases: [{', '.join(f'{{epochs: {n}, freeze: [stages.{n}.*]}}' for n in range(20))}]\n")
    for run, factors in zip(runs, ([1.0, 1.0, 1.0], [0.3, 0.8, 1.6]), strict=True):
        results = scores()
        results = results * xr.DataArray(factors, dims="lead_time", coords={"lead_time": results["lead_time"]})
        save_results(results.assign_coords(provenance=("source", ["x"] * 3)), run / "evaluation")
    page = write_comparison(tmp_path / "page.html", *runs)
    context = browser.new_context(offline=True, viewport={"width": 900, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert tab.evaluate("document.getElementById('facts').scrollWidth <= document.body.clientWidth")
    ends = "texts => Math.max(...texts.map(text => text.getBBox().x + text.getBBox().width))"
    for plot in ("#losses svg >> nth=0", "#score-plot"):
        texts = tab.locator(plot).locator("text")
        assert texts.evaluate_all(ends) <= 760
        assert names[1] in "".join(texts.all_text_contents())
    assert contrast(tab, "#ratio-table td") >= 4.5
    context.close()
