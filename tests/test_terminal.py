"""What a terminal of 80, 100 and 160 columns shows of tables and of the training bar."""

import io
import json
import logging
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyte
import pytest
import xarray as xr
from rich.table import Table

from credit_like import build, terminal
from credit_like.cli import main
from credit_like.demo import _ratio, print_tables
from credit_like.evaluation.scorecard import print_scorecard, scorecard
from credit_like.naming import counted
from credit_like.schema.load import load_experiment
from credit_like.terminal import duration, fitted, logging_above, plain_console, progress_bar, shortened
from credit_like.training.monitor import Monitor
from tests.experiments import DEMO
from tests.integration.test_restart import TINY

WIDTHS = (80, 100, 160)
ROW = {
    "loss": 1.08123, "grad_norm": 1.0, "learning_rate": 1e-3, "samples_per_second": 0.2451, "data_wait": 0.03,
    "memory_mib": 598.0, "epoch": 1,
}  # fmt: skip


def screenshot(text: str, width: int) -> list[str]:
    """The lines that a terminal of this width shows of what was written to it."""
    screen = pyte.Screen(width, 500)
    screen.set_mode(pyte.modes.LNM)  # a new line begins in the first column, as the terminal's driver has it
    pyte.Stream(screen).feed(text)
    return [line.rstrip() for line in screen.display if line.strip()]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("phase", [None, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_step_and_time_left_are_always_seen_and_no_line_is_in_the_bar(tmp_path, monkeypatch, width, phase):
    terminal, row = Terminal(), ROW if phase is None else {**ROW, "phase": phase}
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler(terminal)
    handler.setFormatter(logging.Formatter("21:22:51 %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        monitor = Monitor(tmp_path, total_steps=123456)
        monitor.open(0, validated=False)
        progress = monitor._progress
        for step in (1, 2, 3):
            monitor.step({**row, "step": step})
            progress.refresh()
        monitor.validation({"valid_loss": 0.2517, "step": 3, "rmse": {}, "acc": {}})
        monitor.step({**row, "step": 87})
        progress.refresh()
        monitor.close()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    lines = screenshot(terminal.getvalue(), width)
    assert "21:22:51 step 3  validation loss 0.2517" in lines
    bars = [line for line in lines if "training" in line]
    assert len(bars) == 1
    assert re.search(r"87/123456 (\d+:\d\d:\d\d|\d+ d \d+ h|-:--:--)", bars[0])
    assert ("phase 2" in bars[0]) == (phase is not None)
    assert ("loss 1.081" in bars[0]) == (phase is None or width >= 100)
    assert ("0.245 samples/s" in bars[0]) == (width >= 100)
    assert ("598 MiB" in bars[0]) == (width >= 160)
    assert handler.stream is terminal


def scores(sources=("model", "persistence", "climatology"), levels=(50000.0, 85000.0)):
    """Scores of u in m/s and of q in kg/kg, whose numbers are small."""
    metrics, leads = ["rmse", "acc", "bias"], np.array([6, 24, 72], "timedelta64[h]").astype("timedelta64[ns]")
    shape = (len(sources), len(metrics), 1, len(leads), len(levels))
    noise = 1 + np.arange(np.prod(shape)).reshape(shape) / 7
    dims = ("source", "metric", "region", "lead_time", "level")
    dataset = xr.Dataset(
        {"u": (dims, noise, {"units": "m s**-1"}), "q": (dims, noise * 1.2345e-6, {"units": "kg kg**-1"})},
        {"source": list(sources), "metric": metrics, "region": ["global"], "lead_time": leads, "level": list(levels)},
    )
    dataset["level"].attrs["units"] = "Pa"
    dataset["initial_times"] = 21
    return dataset


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_of_the_scorecard_is_cut(width):
    results = scores(sources=("model", "persistence", "climatology", "another_baseline"))
    console = plain_console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_scorecard(results, console)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "q 500 hPa" in text
    assert "10⁻⁶ kg kg⁻¹" in text
    assert "m s⁻¹" in text
    rows = [line for line in text.splitlines() if re.search(r"\d h ", line)]
    first = float(results["q"].sel(source="model", metric="rmse").values[0, 0, 0]) * 1e6
    assert f" {first:.2f} " in next(line for line in rows if "q 500 hPa" in line)
    header = text.splitlines()[2]
    assert ("bias" in header) == (width == 160)
    assert ("not shown in" in text) == (width < 160)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("longest", ["q", "relative_humidity_above_the_surface"])
def test_no_heading_and_no_number_of_the_demonstration_is_cut(width, longest):
    results = scores().rename(q=longest)
    console = plain_console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_tables(results, console)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    heading = next(line for line in text.splitlines() if "/ pers." in line)
    kept, full = heading.count("/"), 6
    assert ("not shown in" in text) == (kept < full)
    assert kept == full if longest == "q" or width == 160 else 2 <= kept < full
    assert set(heading.replace("/ ", "").split()) <= {"pers.", "clim."}
    rmse = results[longest].sel(metric="rmse", lead_time=np.timedelta64(6, "h"), level=50000.0, region="global")
    ratio = float(rmse.sel(source="model") / rmse.sel(source="persistence"))
    row = next(line for line in text.splitlines() if f"{longest} 500 hPa" in line)
    assert row.split()[3] == f"{ratio:.{2 if ratio >= 0.095 else 3}f}"
    assert len(row.split()) == 3 + kept


ODD = "[x] [/y] :a: [bold]z"


def test_names_and_units_are_printed_as_they_are(tmp_path, capsys):
    """What is in brackets or between colons is neither markup nor emoji."""
    results = scores().rename(q=f"q{ODD}")
    results["u"].attrs["units"] = ODD
    console = plain_console(file=io.StringIO(), width=200)
    print_scorecard(results, console)
    assert f"q{ODD} 500 hPa" in console.file.getvalue()
    assert ODD in console.file.getvalue().replace(f"q{ODD}", "")
    print_tables(results, console)
    assert console.file.getvalue().count(f"q{ODD} 500 hPa") == 2
    folder = tmp_path / f"{'x' * 80} {ODD}"
    with pytest.raises(SystemExit):
        main(["check", str(DEMO), "--set", f"save_loc={json.dumps(str(folder))}"])
    assert "".join(str(folder).split()) in "".join(capsys.readouterr().out.split())


def test_all_that_is_printed_is_printed_so():
    package = Path(terminal.__file__).parent
    found = [path.name for path in package.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())]
    assert found == ["terminal.py"]


@pytest.mark.parametrize("width", [40, 60, 80, 160])
@pytest.mark.parametrize("longest", [10, 50, 200])
def test_names_are_folded_before_numbers_are_cut(width, longest):
    console = plain_console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    table = Table("run", "step", "loss", box=None, pad_edge=False)
    names = ["x" * longest, "y " * (longest // 2)]
    for name in names:
        table.add_row(name, "1234567890", "0.0123456789")
    fitted(console, table, ["loss"] if width == 40 else [], folded=["run"])
    console.print(table)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert (text.count("x"), text.count("y")) == (longest, longest // 2)
    assert text.count("1234567890") == 2
    assert text.count("0.0123456789") == (2 if width > 40 or longest == 10 else 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.234, "1.23"), (0.1, "0.10"), (0.0123, "0.012"), (0.00456, "0.0046"), (0, "0.00"), (np.nan, "–")],
)
def test_ratios_have_two_digits_at_least(value, text):
    assert _ratio(value) == text


def test_a_file_gets_every_column():
    console = plain_console(file=io.StringIO(), width=80)
    print_scorecard(scores(), console)
    assert "not shown" not in console.file.getvalue()


def test_parts_are_left_out_from_the_end():
    assert shortened(["loss 1.08", "0.2 samples/s", "3 MiB"], 24) == "loss 1.08  0.2 samples/s"
    assert shortened(["loss 1.08", "0.2 samples/s", "3 MiB"], 23) == "loss 1.08"
    assert shortened(["loss 1.08"], 3) == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (83 * 60 + 5, "1:23:05"), (200_000, "2 d 7 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_handlers_get_their_stream_back_after_an_error():
    stream = io.StringIO()
    progress = progress_bar(plain_console(file=stream), "training")
    before = sys.stderr
    with pytest.raises(ZeroDivisionError), logging_above(progress):
        raise ZeroDivisionError
    assert sys.stderr is before


@pytest.mark.parametrize(
    ("grid", "said"), [("global", "initial times, global;"), ("regional", "initial times, whole regional grid;")]
)
def test_the_title_says_of_which_grid_scores_are(grid, said):
    results = scores()
    results.attrs["grid"] = grid
    assert said in str(scorecard(results).title)


def test_one_unstable_forecast_does_not_hide_the_numbers_of_the_others():
    results = scores()
    results["u"].loc[{"source": "model", "metric": "rmse"}] = 3e19
    cells = [list(column.cells) for column in scorecard(results).columns]
    headings = [str(column.header) for column in scorecard(results).columns]
    of = dict(zip(headings, cells, strict=True))
    assert str(of["model"][0]) == "3.00e+19"
    assert float(of["persistence"][0]) == pytest.approx(
        float(results["u"].isel(lead_time=0, level=0, region=0).sel(source="persistence", metric="rmse")), rel=5e-3
    )
    assert re.fullmatch(r"\d\.\d\de\+\d\d", of["/ pers."][0])


def test_numbers_have_nouns_in_their_number():
    assert [counted(1, "step"), counted(2, "step"), counted(2, "process"), counted(13, "batch")] == [
        "1 step", "2 steps", "2 processes", "13 batches",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with forecasts and scores, and one like it but for its learning rate."""
    folder = tmp_path_factory.mktemp("of-the-terminal")
    forecasts = "inference={init: [2000-01-11T06, 2000-01-13T06, 12h], lead: 24h}"
    experiment = load_experiment(DEMO, [*TINY, forecasts, f"save_loc={folder / 'run-1'}"])
    assert build.train(experiment) == build.rollout(experiment) == build.evaluate(experiment) == 0
    shutil.copytree(folder / "run-1", folder / "run-2")
    file = folder / "run-2" / "experiment.yml"
    text = file.read_text()
    file.write_text(
        text.replace(f"learning_rate: {experiment.trainer.optimizer.learning_rate}", "learning_rate: 0.00123")
    )
    assert file.read_text() != text
    return folder


COMMANDS = {
    "check": lambda runs: ["check", runs / "run-1" / "experiment.yml"],
    "plan": lambda runs: ["plan", DEMO, "--gpus", "1", "--gpu", "h100"],
    "preprocess": lambda runs: ["preprocess", runs / "run-1" / "experiment.yml", "--set", f"save_loc={runs / 'new'}"],
    "status": lambda runs: ["status", runs / "run-1"],
    "checkpoints": lambda runs: ["checkpoints", runs / "run-1", "--verify"],
    "runs": lambda runs: ["runs", runs],
    "compare": lambda runs: ["runs", "--compare", runs / "run-1", runs / "run-2"],
    "evaluate": lambda runs: ["evaluate", runs / "run-1" / "experiment.yml"],
}
"""Commands that print tables."""


def shown(monkeypatch, command: list[object], width: int) -> list[str]:
    """Return what a terminal of this width shows of a command."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm")
        patch.delenv("NO_COLOR", raising=False)
        with pytest.raises(SystemExit) as end:
            main([str(part) for part in command])
    assert not end.value.code, terminal.getvalue()
    # A line that is wider than the terminal goes on in the next one: the longest written one is what counts.
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    tables = [line for line in written if re.search(r"[│┃┏└━─╇]", line)]
    assert max((len(line) for line in tables), default=0) <= width
    return screenshot(terminal.getvalue(), width)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_table_fits_and_cuts_no_number(runs, monkeypatch, name):
    """All numbers that a terminal shows are those that a very wide one shows."""
    number = re.compile(r"(?<![^\s│┃(])[-−+]?\d+(?:\.\d+)?(?:[eE][-+]\d+)?(?=[\s│┃),]|$)")
    command = COMMANDS[name](runs)
    everything = set(number.findall("\n".join(shown(monkeypatch, command, 400))))
    assert everything
    for width in WIDTHS:
        lines = shown(monkeypatch, command, width)
        assert not [line for line in lines if "…" in line]
        found = set(number.findall("\n".join(lines)))
        assert found
        assert found - everything <= {str(width)}  # "not shown in 80 columns"
