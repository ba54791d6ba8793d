"""Whatever happened to the files of a run, every command ends with a status and one message, never with a traceback."""

from __future__ import annotations

import gc
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from credit_like import cli
from credit_like.checkpoint.format import Piece
from credit_like.checkpoint.manager import CheckpointManager
from tests.experiments import representatives

ROOT = Path(__file__).parents[2]
TINY = [
    "data.source.steps=60",
    "data.train=[2000-01-01, 2000-01-09]",
    "data.valid=[2000-01-09T06, 2000-01-11]",
    "data.test=[2000-01-11T06, 2000-01-15T18]",
    "model={type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 8}",
    "trainer.epochs=1",
    "trainer.batches_per_epoch=2",
    "trainer.valid_batches=1",
    "trainer.scheduler.warmup_steps=1",
    "inference={init: [2000-01-11T06, 2000-01-12T06, 12h], lead: 12h, batch_size: 2}",
]
FROM_FILE = ("train", "rollout", "evaluate", "plot", "preprocess")
SECONDS = 5
"""Processor time of a command that only reads; those that compute take a few seconds by themselves."""


def arguments(command: str, save_loc: Path) -> list[str]:
    if command in FROM_FILE:
        sets = [part for item in (*TINY, f"save_loc={save_loc}") for part in ("--set", item)]
        return [command, str(ROOT / "config" / "demo.yml"), *sets]
    if command == "export":
        return ["export", str(save_loc), "-o", str(save_loc / "out.safetensors")]
    if command == "submit":
        sets = [part for item in (*TINY, f"save_loc={save_loc}") for part in ("--set", item)]
        return ["submit", str(ROOT / "config" / "demo.yml"), "--dry-run", "--site", "local", *sets]
    if command == "stored":
        return ["check", str(save_loc / "experiment.yml")]
    return [command, str(save_loc)]


def call(command: str, save_loc: Path) -> int:
    """The exit status of a command in this process; a traceback is the error itself."""
    began = time.process_time()
    try:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments(command, save_loc))
    finally:
        gc.collect()  # files that a refused command has left open
    if command in ("status", "checkpoints", "export"):
        assert time.process_time() - began < SECONDS
    return end.value.code or 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with everything that the commands make."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    for command in ("train", "rollout", "evaluate", "plot"):
        assert call(command, folder) == 0
    gc.freeze()  # the modules that the commands have loaded, for the collections of `call`
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy, beside a current folder in which nothing may appear."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shutil.copytree(finished, tmp_path / "run")
    yield tmp_path / "run"
    assert not list((tmp_path / "here").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"here", "run"}


def refused(status: int, capsys, what: object) -> None:
    """One of the three statuses, and where it is 2, one message."""
    out, err = capsys.readouterr()
    assert status in (0, 1, 2), what
    assert "Traceback" not in out + err, what
    if status == 2:
        assert err.strip(), what


COMMANDS = ("train", "rollout", "evaluate", "plot", "preprocess", "export", "checkpoints", "status", "submit")
STATES = {
    "absent": (),
    "empty": (),
    "only statistics": ("statistics.nc",),
    "only experiment": ("experiment.yml",),
    "only checkpoints": ("checkpoints",),
    "only forecasts": ("forecasts",),
    "only evaluation": ("evaluation",),
    "no statistics": ("experiment.yml", "status.json", "log.jsonl", "checkpoints", "forecasts", "evaluation"),
    "no checkpoints": ("experiment.yml", "status.json", "log.jsonl", "statistics.nc", "forecasts", "evaluation"),
    "no logs": ("experiment.yml", "statistics.nc", "checkpoints", "tensorboard", "forecasts", "evaluation"),
}


@pytest.mark.slow
@pytest.mark.parametrize("state", representatives(list(STATES), "only experiment"))
@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_is_there_before_a_command(finished, tmp_path, monkeypatch, capsys, command, state) -> None:
    folder = tmp_path / "run"
    if state != "absent":
        folder.mkdir()
    for name in STATES[state]:
        (shutil.copytree if (finished / name).is_dir() else shutil.copy)(finished / name, folder / name)
    monkeypatch.chdir(tmp_path)
    refused(call(command, folder), capsys, (command, state))


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("command", ["train", "preprocess"])
def test_named_statistics_and_a_folder_that_is_not_there_yet(finished, tmp_path, monkeypatch, command, there) -> None:
    """`train` needs the statistics that are named, `preprocess` makes them, with their folder."""
    path = finished / "statistics.nc" if there else tmp_path / "made" / "statistics.nc"
    monkeypatch.setattr("tests.faults.test_run_folder.TINY", [*TINY, f"data.statistics={path}"])
    assert call(command, tmp_path / "new" / "run") == (2 if command == "train" and not there else 0)
    assert path.exists() == (there or command == "preprocess")


# ---- garbage ---------------------------------------------------------------------------------------------------------


def nothing(path: Path, content: bytes) -> None:
    path.write_bytes(b"")


def half(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


def noise(path: Path, content: bytes) -> None:
    path.write_bytes(random.Random(path.name).randbytes(max(64, len(content) // 3)))


def altered(path: Path, content: bytes) -> None:
    """The last third is other bytes: the head of a file of a known form stays."""
    keep = 2 * len(content) // 3
    path.write_bytes(content[:keep] + random.Random(path.name).randbytes(len(content) - keep))


def other_encoding(path: Path, content: bytes) -> None:
    path.write_bytes(content.decode("latin-1").encode("utf-16"))


def nested(path: Path, content: bytes) -> None:
    path.write_bytes(b"[" * 100_000)


def number(path: Path, content: bytes) -> None:
    path.write_bytes(b"9" * 10_000)


def other_json(path: Path, content: bytes) -> None:
    path.write_bytes(
        b'{"state": ["[/x]"], "step": "[/x]", "loss": [], "event": "begin", "time": 1, "reason": {}}\n'
        b'{"event": "end", "time": "[/x]", "job": "[/x]", "mode": "[/x]", "code": 3}\n[]\n"x"\n'
    )


def markup(path: Path, content: bytes) -> None:
    path.write_bytes(b'{"state": "failed", "step": 3, "reason": "ValueError: [/tmp] [bold"}')


def folder(path: Path, content: bytes) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def gone(path: Path, content: bytes) -> None:
    path.unlink()


KINDS = (nothing, half, noise, altered, other_encoding, nested, number, other_json, markup, folder, gone)
OF_ALL = (
    "experiment.yml", "status.json", "log.jsonl", "checkpoints/*/manifest.json", "checkpoints/*/*.safetensors",
    "jobs/history.jsonl",
)  # fmt: skip
AFFECTED = {
    "experiment.yml": ("stored", "train"),
    "status.json": ("train", "submit"),
    "log.jsonl": ("train",),
    "statistics.nc": ("rollout", "evaluate", "train", "preprocess"),
    "checkpoints/*/manifest.json": ("rollout", "train"),
    "checkpoints/*/*.safetensors": ("rollout", "train"),
    "forecasts/forecast.json": ("rollout", "evaluate"),
    "forecasts/forecast.zarr/zarr.json": ("evaluate", "plot", "rollout"),
    "forecasts/forecast.zarr/u/zarr.json": ("evaluate", "plot"),
    "forecasts/forecast.zarr/time/zarr.json": ("evaluate", "plot"),
    "forecasts/forecast.zarr/latitude/c/*": ("evaluate", "plot"),
    "forecasts/forecast.zarr/u/c/*/*/*/*/*": ("evaluate", "plot"),
    "evaluation/model.nc": ("plot",),
    "evaluation/persistence.nc": ("plot", "evaluate"),
}


def targets(run: Path, pattern: str) -> list[Path]:
    """The newest checkpoint's file and the first of everything else."""
    found = sorted(run.glob(pattern))
    return found[-1:] if "checkpoints" in pattern else found[:1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("pattern", OF_ALL)
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_shown_for_what_it_is(run, capsys, pattern, kind) -> None:
    """The commands that look at a run, for every kind of garbage in every file that they may read."""
    if pattern.startswith("jobs"):
        (run / "jobs").mkdir()
        (run / pattern).write_text(
            '{"event": "submission", "time": "x", "mode": "train", "site": null}\n'
            '{"event": "begin", "time": "x", "mode": "train", "job": "1", "checkpoint": -1}\n'
        )
    for path in targets(run, pattern):
        kind(path, path.read_bytes())
    for command in ("status", "checkpoints", "export"):
        refused(call(command, run), capsys, (pattern, kind, command))


CASES = [(pattern, command) for pattern, commands in AFFECTED.items() for command in commands]


def garbage(run: Path, finished: Path, capsys, pattern: str, command: str, kinds) -> None:
    for kind in kinds:
        shutil.rmtree(run)
        shutil.copytree(finished, run)
        found = targets(run, pattern)
        assert found, pattern
        for path in found:
            kind(path, path.read_bytes())
        refused(call(command, run), capsys, (pattern, kind, command))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    representatives(range(len(CASES)), *map(str, range(0, len(CASES), 2))),
    ids=lambda case: "-".join(CASES[case]),
)
def test_some_garbage_is_refused_or_passed_over(run, finished, capsys, case) -> None:
    """The commands that compute: every file that they need with one kind of garbage, every kind in turn."""
    garbage(run, finished, capsys, *CASES[case], [KINDS[case % len(KINDS)]])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("pattern", "command"), CASES)
def test_garbage_is_refused_or_passed_over(run, finished, capsys, pattern, command) -> None:
    """Every kind of garbage in each file."""
    garbage(run, finished, capsys, pattern, command, KINDS)


@pytest.mark.parametrize(
    "kind", [kind if kind in (noise, nested) else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_who_looks_at_a_run_of_garbage_gets_an_answer(tmp_path, capsys, kind) -> None:
    """The same for every day, in a folder that was written by hand."""
    run = tmp_path / "run"
    (run / "jobs").mkdir(parents=True)
    (run / "experiment.yml").write_text("name: x\n")
    (run / "status.json").write_text('{"state": "running", "step": 2, "reason": ""}')
    (run / "log.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    (run / "jobs" / "history.jsonl").write_text(
        '{"event": "submission", "time": "x", "mode": "train", "site": null}\n'
        '{"event": "begin", "time": "x", "mode": "train", "job": "1", "checkpoint": -1}\n'
    )
    manager = CheckpointManager(run / "checkpoints")
    for step in (1, 2):
        pieces = {"model/x": Piece.whole(torch.arange(5.0))}
        manager.save(step, pieces, {"layout": {"world": 1}, "progress": {"epoch": 0}})
    manager.wait()
    assert call("status", run) == 0
    assert call("checkpoints", run) == 0
    for pattern in OF_ALL:
        for path in targets(run, pattern):
            before = path.read_bytes()
            kind(path, before)
            for command in ("status", "checkpoints"):
                refused(call(command, run), capsys, (pattern, kind, command))
            if path.is_dir():
                shutil.rmtree(path)
            path.write_bytes(before)


@pytest.mark.slow
def test_stray_folders_do_not_stop_a_run(run, capsys) -> None:
    """What is none of ours is left alone; what has the name of a file of a run is refused before anything is written."""
    (run / ".x.tmp").mkdir()
    assert call("train", run) == 0
    assert (run / ".x.tmp").is_dir()
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").mkdir()
    capsys.readouterr()
    assert call("train", run) == 2
    assert "log.jsonl is a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_statistics_of_another_grid_are_refused(run, finished, capsys) -> None:
    import xarray as xr

    statistics = xr.load_dataset(finished / "statistics.nc")
    for changed in (
        statistics.isel(latitude=slice(0, 16)),
        statistics.assign_coords(longitude=statistics.longitude + 1),
    ):
        (run / "statistics.nc").unlink()
        changed.to_netcdf(run / "statistics.nc")
        capsys.readouterr()
        assert call("rollout", run) == 2
        assert "expected statistics of the data's" in capsys.readouterr().err
