"""`credit-like runs`, and scores and logs as frames."""

import io
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from credit_like import runs
from credit_like.errors import UserError
from credit_like.evaluation import compare, load_log, load_scores
from credit_like.evaluation.compare import print_comparison, print_runs
from credit_like.evaluation.frames import COLUMNS, save_scores
from credit_like.evaluation.results import save_results
from credit_like.launch.status import status
from credit_like.runs import differing_keys, experiment_keys, find_runs, read_run
from credit_like.terminal import plain_console
from tests.test_terminal import scores

EXPERIMENT = {
    "name": "a",
    "data": {"levels": [500, 850], "timestep": "6h"},
    "loss": {"type": "mse"},
    "trainer": {"epochs": 2, "optimizer": {"type": "adamw", "learning_rate": 0.001}},
}


def make_run(folder, rate=0.001, state="finished", steps=20, losses=(0.5, 0.25, 0.3)):
    folder.mkdir(parents=True)
    document = json.loads(json.dumps(EXPERIMENT))
    document["name"], document["save_loc"] = folder.name, str(folder)
    document["trainer"]["optimizer"]["learning_rate"] = rate
    (folder / "experiment.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    (folder / "status.json").write_text(json.dumps({"state": state, "step": steps, "reason": ""}))
    rows = [
        {"step": n, "epoch": 0, "learning_rate": rate, "samples_per_second": 8.0, "data_wait": 0.0, "loss": 1 / n}
        for n in range(1, steps + 1)
    ]
    rows += [
        {"step": steps, "epoch": 0, "valid_loss": loss, "rmse": {"u@500": loss}, "acc": {"u@500": 0.9}}
        for loss in losses
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def shown(function, *arguments, width=160):
    console = plain_console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    function(*arguments, console)
    return console.file.getvalue()


def test_runs_at_any_depth_and_what_differs(tmp_path):
    make_run(tmp_path / "sweep" / "a")
    make_run(tmp_path / "sweep" / "b", rate=0.01, state="failed", steps=7)
    (tmp_path / "sweep" / "b" / "checkpoints" / "step-7").mkdir(parents=True)
    (tmp_path / "sweep" / "b" / "checkpoints" / "status.json").write_text("{}")  # inside a run: none of its own
    (tmp_path / "notes").mkdir()
    runs = find_runs(tmp_path)
    assert [run.folder.name for run in runs] == ["a", "b"]
    assert [run.state for run in runs] == ["finished", "failed"]
    assert [run.step for run in runs] == [20, 7]
    assert [run.best for run in runs] == [0.25, 0.25]
    assert runs[0].loss == pytest.approx(0.05)
    assert differing_keys(runs) == ["trainer.optimizer.learning_rate"]
    text = shown(print_runs, tmp_path)
    head, *rows = text.splitlines()
    assert head.split()[-1] == "learning_rate"
    assert rows[0].split() == ["sweep/a", "finished", "20", "0.05", "0.25", "8", "0.001"]
    narrow = shown(print_runs, tmp_path, width=50)
    assert "learning_rate" in narrow.splitlines()[-1]
    assert max(map(len, narrow.splitlines()[:-1])) <= 50


def test_experiments_are_read_as_yaml_reads_them(tmp_path):
    run = make_run(tmp_path / "a")
    keys = experiment_keys(run / "experiment.yml")
    assert keys["data.levels"] == [500, 850]
    assert keys["trainer.optimizer.learning_rate"] == 0.001
    assert set(keys) == {
        "name", "save_loc", "data.levels", "data.timestep", "loss.type", "trainer.epochs", "trainer.optimizer.type",
        "trainer.optimizer.learning_rate",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["status.json", "log.jsonl", "experiment.yml"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe: [", b"[1, 2]\n", b'{"step": 3, "lo', b"x: 2000-13-45", b"x: " + b"1" * 5000]
)
def test_a_damaged_file_hides_only_its_own_facts(tmp_path, name, content):
    run = make_run(tmp_path / "a")
    (run / name).write_bytes(content)
    (found,) = find_runs(tmp_path)
    assert (found.state == "finished") == (name != "status.json")
    assert (found.step == 20) == (name != "log.jsonl")
    assert ("loss.type" in found.keys) == (name != "experiment.yml")
    assert shown(print_runs, tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["status.json", "log.jsonl", "experiment.yml", "checkpoints/step-20/manifest.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    run = make_run(tmp_path / "a")
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(run / name)
    assert shown(print_runs, tmp_path)
    assert status(run).step == 20


@pytest.mark.parametrize("size", [10_000, 70_000, 300_000])
def test_a_row_of_any_length_hides_no_step(tmp_path, size):
    """The short forecasts of a validation have a score for every channel and lead."""
    run = make_run(tmp_path / "a")
    with (run / "log.jsonl").open("a") as log:
        forecast = {"lead_hours": list(range(size // 3))}
        log.write(json.dumps({"step": 20, "epoch": 0, "valid_loss": 0.1, "rmse": {}, "forecast": forecast}) + "\n")
        log.write('{"step": 21, "loss": 0.')  # still being written
    (found,) = find_runs(tmp_path)
    assert (found.step, found.loss, found.samples_per_second, found.best) == (20, 1 / 20, 8.0, 0.1)
    told = status(run)
    assert (told.step, told.loss, told.samples_per_second, told.valid_loss) == (20, 1 / 20, 8.0, 0.1)


def test_the_best_loss_is_that_of_the_newest_phase(tmp_path):
    """Losses of phases are not comparable."""
    run = make_run(tmp_path / "a")
    rows = [(0, 0.1), (1, 0.45), (1, 0.4), (1, None)]
    lines = [json.dumps({"step": step, "phase": phase, "valid_loss": loss}) for step, (phase, loss) in enumerate(rows)]
    (run / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert read_run(run).best == 0.4


def test_the_phase_is_told_where_there_are_phases(tmp_path):
    assert "phase" not in shown(print_runs, make_run(tmp_path / "one" / "a").parent)
    first, second = (make_run(tmp_path / "two" / name) for name in "ab")
    with (first / "log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 21, "phase": 2, "loss": 0.5, "samples_per_second": 8.0}) + "\n")
    head, *rows = shown(print_runs, tmp_path / "two").splitlines()
    assert head.split()[:4] == ["run", "state", "phase", "step"]
    assert rows[0].split()[:5] == ["a", "finished", "2", "21", "0.5"]
    assert rows[1].split()[:4] == ["b", "finished", "20", "0.05"]
    assert ["phase", "2"] in [line.split() for line in shown(print_comparison, first, second).splitlines()]


def test_the_origin_of_the_weights_is_told(tmp_path):
    run = make_run(tmp_path / "a")
    origin = {
        "path": "/runs/pre/step-9",
        "sha256": "0123456789abcdef",
        "step": 9,
        "experiment": "pre",
        "weights": "ema",
    }
    (run / "status.json").write_text(json.dumps({"state": "finished", "step": 20, "origin": origin}))
    told = dict(status(run).rows())
    assert told["started from"] == "/runs/pre/step-9 (pre, step 9, ema weights, SHA-256 0123456789ab…)"
    (run / "status.json").write_text(json.dumps({"state": "finished", "step": 20, "origin": "what"}))
    assert "started from" not in dict(status(run).rows())


def test_status_of_a_run_whose_checkpoints_are_replaced_meanwhile(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run") / "checkpoints"
    (folder / "step-3").mkdir(parents=True)
    listdir = os.listdir

    def listed_just_before_the_removal(path):
        names = listdir(path)
        if (folder / "step-3").exists():
            (folder / "step-3").rename(folder / "step-4")
        return names

    monkeypatch.setattr(os, "listdir", listed_just_before_the_removal)
    told = status(folder.parent)
    assert told.checkpoint == 4
    assert told.checkpoint_time is not None


@pytest.mark.parametrize("name", ["status.json", "checkpoints"])
def test_status_of_a_run_that_is_removed_meanwhile(tmp_path, monkeypatch, name):
    """`train --fresh --force` removes it."""
    folder = make_run(tmp_path / "run")
    (folder / "checkpoints").mkdir()
    is_file, is_dir = Path.is_file, Path.is_dir

    def then_removed(check):
        def checked(path):
            found = check(path)
            if path == folder / name:
                shutil.rmtree(path) if path.name == "checkpoints" else path.unlink(missing_ok=True)
            return found

        return checked

    monkeypatch.setattr(Path, "is_file", then_removed(is_file))
    monkeypatch.setattr(Path, "is_dir", then_removed(is_dir))
    assert status(folder).checkpoint is None


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_lines_are_read_backwards_whatever_the_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(runs, "_BLOCK", block)
    for text in (b"", b"\n", b"a", b"a\n", b"ab\ncd\n\nefghijkl", b"\n\nab\n"):
        (tmp_path / "log").write_bytes(text)
        assert list(runs._lines_backwards(tmp_path / "log")) == text.split(b"\n")[::-1]
    assert list(runs._lines_backwards(tmp_path / "nothing")) == []


def test_no_runs(tmp_path):
    with pytest.raises(UserError, match="expected runs below"):
        find_runs(tmp_path)
    with pytest.raises(UserError, match="expected a folder with runs"):
        find_runs(tmp_path / "nothing")
    with pytest.raises(UserError, match="--compare: expected the folder of a run"):
        print_comparison(tmp_path, tmp_path)


@pytest.mark.slow
def test_a_thousand_runs(tmp_path):
    for n in range(1000):
        make_run(tmp_path / f"run-{n:04d}", rate=n / 1000, steps=50)
    began = time.process_time()  # processor time does not depend on how busy the machine is
    text = shown(print_runs, tmp_path)
    assert time.process_time() - began < 3
    assert len(text.splitlines()) == 1001


def test_comparison_of_two_runs(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", rate=0.01)
    text = shown(print_comparison, a, b)
    assert "trainer.optimizer.learning_rate" in text
    assert "no scores in" in text
    for run, factor in ((a, 1.0), (b, 0.5)):
        results = scores()
        results = results.map(lambda array, f=factor: array * f if "metric" in array.dims else array)
        results = results.assign_coords(provenance=("source", ["x"] * 3))
        save_results(results, run / "evaluation")
    text = shown(print_comparison, a, b)
    row = next(line for line in text.splitlines() if line.startswith("u 500 hPa"))
    assert row.split()[-3:] == ["0.50", "0.50", "0.50"]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_long_value_leaves_the_others_whole(tmp_path, width):
    """It continues on the next lines of a comparison, and ends with … in the table of all runs."""
    long = ", ".join(f"{{epochs: {n}, freeze: [stages.{n}.*]}}" for n in range(20))
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    with (runs[1] / "experiment.yml").open("a") as file:
        file.write(f"phases: [{long}]\n")
    lines = shown(print_comparison, *runs, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split() for line in lines if line.startswith(("step", "best validation loss"))] == [
        ["step", "20", "20"],
        ["best", "validation", "loss", "0.25", "0.25"],
    ]
    first = next(number for number, line in enumerate(lines) if line.startswith("phases"))
    text = " ".join(line.strip() for line in lines[first : first + 20])
    assert all(f"stages.{n}.*" in text.replace(" ", "") for n in range(20))
    assert max(map(len, shown(print_runs, tmp_path).splitlines())) <= 160
    assert "epochs: 0" in shown(print_runs, tmp_path)


def test_scores_as_a_frame(tmp_path):
    results = scores().assign_coords(provenance=("source", ["x"] * 3))
    save_results(results, tmp_path / "evaluation")
    path = save_scores(results, tmp_path / "evaluation")
    frame = load_scores(tmp_path)
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == 2 * results["u"].size
    for row in frame.sample(20, random_state=0).itertuples():
        lead = np.timedelta64(int(row.lead_hours), "h")
        expected = results[row.variable].sel(
            source=row.source, metric=row.metric, region=row.region, lead_time=lead, level=row.level
        )
        assert row.value == pytest.approx(float(expected))
    assert load_scores(tmp_path / "evaluation").equals(frame)
    header, *lines = path.read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert len(lines) == len(frame)
    assert not list((tmp_path / "evaluation").glob("*.part"))


def test_the_log_as_a_frame(tmp_path):
    run = make_run(tmp_path / "a")
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')  # being written
    frame = load_log(run)
    assert frame["loss"].dropna().tolist() == pytest.approx([1 / n for n in range(1, 21)])
    assert frame["valid_loss"].dropna().tolist() == [0.5, 0.25, 0.3]
    assert frame["rmse/u@500"].dropna().tolist() == [0.5, 0.25, 0.3]
    with pytest.raises(UserError, match=r"which has no log\.jsonl"):
        load_log(tmp_path)
    (run / "log.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="expected JSON in line 2"):
        load_log(run)


def test_cells_are_short_text():
    period = {"start": "2000-01-01T00:00:00", "end": "2000-02-01T06:00:00"}
    assert compare._cell([period, period]) == ", ".join(["2000-01-01 to 2000-02-01T06:00:00"] * 2)
    assert (
        compare._cell([{"type": "mass"}, {"type": "clip", "minimum": 0.0}]) == "{type: mass}, {type: clip, minimum: 0}"
    )
    phase = {"epochs": 2, "loss": {"type": "sum", "terms": []}, "betas": [0.9, 0.95], "freeze": None}
    assert compare._cell([phase]) == "{epochs: 2, loss: {type: sum}, betas: [0.9, 0.95]}"
    assert compare._cell([{"name": "u"}, {"name": "v"}, {"name": "q", "units": "kg"}]) == "u, v, {name: q, units: kg}"
    assert [compare._cell(value) for value in (None, [], 0.12345678, True, "6h")] == ["", "", "0.1235", "true", "6h"]
    keys = ["data.valid", "inference.init.start", "trainer.epochs"]
    assert [compare._short(key, keys) for key in keys] == ["data.valid", "init.start", "epochs"]
