"""A command that is told a path to write replaces only what it has made itself, and refuses others before it does anything."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
import yaml

from credit_like import cli, demo
from credit_like.checkpoint import credit
from credit_like.data.statistics import Statistics
from credit_like.data.tools.prepare import prepare
from credit_like.errors import UserError
from credit_like.evaluation.compare_page import write_comparison
from credit_like.outputs import draft_beside, replacing
from credit_like.plan import calibrate
from credit_like.plan.machine import PRESETS
from credit_like.plan.memory_plot import check_plot, plot_memory
from credit_like.schema.checks import section_findings
from credit_like.schema.load import load_experiment
from tests.checkpoint.test_credit import ARGUMENTS, credit_state
from tests.experiments import DEMO
from tests.faults import tiny
from tests.faults.test_run_folder import TINY
from tests.plan.test_estimate import MACHINE, Candidate, PlanReport, rank, row

WRITES = {
    ("new", "output"): ["new", "absent.nc", "-o", "{}.yml"],
    ("forecast", "output"): ["forecast", "absent", "--from", "absent.nc", "-o", "{}.nc"],
    ("plan", "plot"): ["plan", "absent.yml", "--gpus", "4", "--plot", "{}.png"],
    ("bench", "output"): ["bench", "-o", "{}.yml"],
    ("runs", "html"): ["runs", "--compare", "absent", "absent", "--html", "{}.html"],
    ("export", "output"): ["export", "absent", "-o", "{}.safetensors"],
    ("export", "package"): ["export", "absent", "--package", "{}"],
    ("import-credit", "output"): ["import-credit", "absent.yml", "-o", "{}.yml"],
    ("preprocess", "rechunk"): ["preprocess", str(DEMO), "--rechunk", "{}.zarr"],
}
"""The options that name a path to write, and a command line whose path for it is {}; what is read need not be there."""
READS = {
    *((command, "file") for command in (
        "check", "verify", "preprocess", "bench-data", "train", "rollout", "evaluate", "plot", "plan", "submit",
        "import-credit",
    )),
    *((command, "save_loc") for command in ("status", "cancel", "checkpoints", "export")),
    ("forecast", "export"), ("runs", "folder"), ("runs", "compare"), ("import-credit", "weights"), ("import-credit", "config"),
}  # fmt: skip
FURTHER = {
    "card of an export": (["export", "absent", "-o", "{}.safetensors"], "{}.md"),
    "weights of an import": (["import-credit", "absent.pt", "-o", "{}"], "{}/model.safetensors"),
    "section of an import": (["import-credit", "absent.pt", "-o", "{}"], "{}/model.model.yml"),
    "experiment of the demonstration": (["demo", "--save-loc", "{}"], "{}/demo.yml"),
    "report of the demonstration": (["demo", "--save-loc", "{}"], "{}/report.md"),
    "statistics": (["preprocess", str(DEMO), "--set", "save_loc={}.run", "--set", "data.statistics={}.nc"], "{}.nc"),
    "climatology": (["preprocess", str(DEMO), "--set", "save_loc={}", "--climatology"], "{}/climatology.zarr"),
}
"""A command line and a path that follows from what it names."""
CASES = {
    **{f"{command} --{option}": (line, line[-1]) for (command, option), line in WRITES.items()},
    **FURTHER,
}


def experiment(path: Path) -> None:
    path.write_text("name: mine\nsave_loc: runs/mine\nmodel: {type: wxformer}\n")


def noise(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(5000))


def folder(path: Path) -> None:
    path.mkdir()
    noise(path / "data.bin")


def link(path: Path) -> None:
    path.symlink_to(path.parent / "a-disk-that-is-not-mounted")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def found(folder: Path) -> dict[str, object]:
    """Everything in a folder: what files hold, and the kind of the rest."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.rglob("*")
    }


def test_every_path_of_a_command_is_known() -> None:
    paths = {
        (info.name or info.callback.__name__, name)
        for info in cli.app.registered_commands
        for name, kind in get_type_hints(info.callback).items()
        if "Path" in str(kind)
    }
    assert paths - READS - {("demo", "save_loc")} == set(WRITES)


@pytest.mark.parametrize("other", [experiment, noise, folder, link, pipe])
@pytest.mark.parametrize("case", CASES)
def test_what_a_command_has_not_made_is_refused_first_and_stays(tmp_path, monkeypatch, capsys, case, other) -> None:
    line, written = CASES[case]
    path = Path(written.format(tmp_path / "named"))
    path.parent.mkdir(exist_ok=True)
    other(path)
    before = found(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main([part.format(tmp_path / "named") for part in line])
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert str(path) in said
    assert "remove it or name another" in said
    assert len(said.splitlines()) == 1, said
    assert found(tmp_path) == before


PLACES = {
    "nothing can be kept there": "/proc/named",
    "is a file": "{}/file/named",
    "is a link to nothing": "{}/dangling/named",
    "too many levels of symbolic links": "{}/loop/named",
    "too long": "{}/" + "x" * 300,
    "not UTF-8": "{}/named-\udcff",
}


@pytest.mark.parametrize("why", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capsys, case, why) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before, named = found(tmp_path), PLACES[why].format(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main([part.format(named) for part in CASES[case][0]])
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    # In `--set`, YAML has no such characters.
    assert any(told in said for told in (why, "in an existing folder", "special characters are not allowed")), said
    assert found(tmp_path) == before


def test_a_folder_of_forecasts_has_a_name_that_files_can_hold(tmp_path) -> None:
    experiment = load_experiment(DEMO, [f'inference.output.path="{tmp_path}/named-\\udcff"'])
    ((key, problem),) = section_findings(experiment, None)
    assert key == ("inference", "output", "path")
    assert "its name is not UTF-8" in problem


def test_a_save_loc_that_cannot_be_written_is_one_problem(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", str(DEMO), "--set", f"save_loc={tmp_path}/{'x' * 300}"])
    said = capsys.readouterr().err
    assert "a name in it is too long" in said
    assert len(said.splitlines()) == 1, said


def test_what_a_command_has_made_is_replaced(tmp_path, monkeypatch) -> None:
    """Figures of a machine, plots, pages, exports, imports and the files of the demonstration."""
    machine = tmp_path / "machine.yml"
    for speed in (1.0, 2.0):
        monkeypatch.setattr(calibrate, "measure", lambda runtime, speed=speed: replace(PRESETS["h100"], peak=speed))
        calibrate.bench(machine)
        assert yaml.safe_load(machine.read_text())["peak"] == speed
    report = PlanReport("x", 4, MACHINE, (row(Candidate(4), rank(10**9)),), ())
    for ending in ("png", "svg", "pdf"):
        for _ in range(2):
            check_plot(tmp_path / f"plot.{ending}")
            plot_memory([report], tmp_path / f"plot.{ending}")
    for name in ("a", "b"):
        tiny.trainer(tmp_path / name, epochs=1).fit()
    for order in (("a", "b"), ("b", "a")):
        page = write_comparison(tmp_path / "page.html", *(tmp_path / name for name in order))
        assert f"<h1>{order[0]} and {order[1]}</h1>" in page.read_text()
    for _ in range(2):
        demo.experiment_files(tmp_path / "demo", ensemble=True)


def test_an_import_is_repeated(tmp_path) -> None:
    converted = credit.convert_model_args(ARGUMENTS, upsample="transpose")
    _, state = credit_state(converted.config, converted, old_keys=False)
    torch.save({"model_state_dict": state}, tmp_path / "checkpoint.pt")
    (tmp_path / "credit.yml").write_text(yaml.safe_dump({"model": {"type": "wxformer", **ARGUMENTS}}))
    for _ in range(2):
        credit.import_credit(tmp_path / "checkpoint.pt", tmp_path / "credit.yml", tmp_path / "ours.safetensors")


def test_statistics_and_a_climatology_are_made_anew(tmp_path) -> None:
    statistics = tmp_path / "statistics.nc"
    made = load_experiment(DEMO, [*TINY, f"save_loc={tmp_path / 'run'}", f"data.statistics={statistics}"])
    for _ in range(2):
        prepare(made, climatology=True)
        assert Statistics.is_file(statistics)
        assert [path.name for path in (tmp_path / "run").glob("*climatology*")] == ["climatology.zarr"]


@pytest.mark.parametrize("name", ["plot", "plot.txt", "plot.html"])
def test_a_plot_of_no_known_kind_is_refused(tmp_path, name) -> None:
    with pytest.raises(UserError, match=r"--plot: expected a file that ends in \.png, \.svg, \.pdf"):
        check_plot(tmp_path / name)


def write_half(path: Path) -> None:
    path.write_text("ha")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_draft_replaces_the_file_whole_or_is_removed(tmp_path) -> None:
    path = tmp_path / "scores.csv"
    with replacing(path) as file:
        file.write_text("new")
    assert path.read_text() == "new"
    with pytest.raises(OSError, match="No space"), replacing(path) as file:
        write_half(file)
    assert path.read_text() == "new"
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UserError, match="got a folder"), replacing(folder) as file:
        file.write_text("new")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "scores.csv"]


def test_two_processes_may_write_one_file_at_once(tmp_path) -> None:
    """Each has a draft of its own; a dead one's is removed, file or folder, and that of a process of another host stays."""
    path = tmp_path / "scores.csv"
    stem = draft_beside(path).name.removesuffix(str(os.getpid()))
    with subprocess.Popen(["true"]) as ended:
        pass
    for dead in (ended.pid, os.getpid()):
        (tmp_path / f"{stem}{dead}").mkdir()
        (tmp_path / f"{stem}{dead}" / "x").write_text("")
    kept = [*(f"{stem}{x}" for x in (os.getppid(), "x", 10**30)), f".scores.csv.00000000-{ended.pid}"]
    for name in kept:
        (tmp_path / name).write_text("")
    begun, go_on = multiprocessing.Event(), multiprocessing.Event()

    def slow() -> None:
        with replacing(path) as draft:
            draft.write_text("slow")
            begun.set()
            go_on.wait(900)

    process = multiprocessing.get_context("fork").Process(target=slow)
    process.start()
    assert begun.wait(900)
    with replacing(path) as draft:
        draft.write_text("fast")
    assert path.read_text() == "fast"
    go_on.set()
    process.join(900)
    assert process.exitcode == 0
    assert path.read_text() == "slow"
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*kept, "scores.csv"])
