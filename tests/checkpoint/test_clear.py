"""`--fresh --force` removes what a run has made and nothing else."""

from __future__ import annotations

import multiprocessing
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from credit_like import build
from credit_like.checkpoint.clear import clear_run
from credit_like.errors import UserError
from credit_like.lock import FileLock, Locked, RunLock
from credit_like.parallel.runtime import Runtime
from credit_like.schema import places
from tests.checkpoint.test_manager import saved
from tests.experiments import contents
from tests.faults import tiny

THEIRS = {
    "thesis/chapter.tex": b"\\chapter",
    "good.zarr/zarr.json": b"{}",
    "checkpoints/notes.txt": b"the third is best",
    "checkpoints/best-model/manifest.json": b"{}",
    "tensorboard/notes.txt": b"",
    "evaluation/report.html": b"<html>",
    "jobs/history.jsonl": b"",
    "demo.yml": b"",
    ".x.tmp": b"",
    ".experiment.yml.swp": b"",  # of an editor
    ".statistics.nc.swp": b"",
    "statistics.txt": b"",
}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def run(tmp_path):
    """The folder of a training that ended, with what others keep in it."""
    folder = tmp_path / "run"
    assert tiny.trainer(folder).fit().state == "finished"
    (folder / "checkpoints" / ".damaged-step-2").mkdir()
    write(folder, {"statistics.nc": b"", "forecasts/forecast.json": b"{}", "forecasts/forecast.zarr/zarr.json": b"{}"})
    write(folder, {f"forecasts/forecast/20000101T000000.{end}": b"" for end in ("nc", "nc.part", "grib", "grib.part")})
    write(folder, THEIRS)
    return folder


def test_only_what_a_run_makes_is_removed(run) -> None:
    clear_run(run, force=True)
    left = contents(run)
    assert left.pop(".lock") is not None
    assert b"save_loc:" in left.pop("experiment.yml")
    assert left == THEIRS
    assert not (run / "forecasts").exists()
    assert tiny.trainer(run).fit().state == "finished"
    assert THEIRS.items() <= contents(run).items()


def test_statistics_that_the_experiment_names_stay(run) -> None:
    clear_run(run, force=True, statistics=False)
    assert (run / "statistics.nc").exists()


def test_links_are_removed_and_what_they_point_to_is_not(run, tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run / "checkpoints").rename(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere)
    write(tmp_path / "other", {"precious": b""})
    (elsewhere / "step-999").symlink_to(tmp_path / "other")
    clear_run(run, force=True)
    assert sorted(path.name for path in elsewhere.iterdir()) == ["best-model", "notes.txt"]
    assert contents(tmp_path / "other") == {"precious": b""}


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("files", [THEIRS, {"experiment.yml": b"mine"}, {"checkpoints/step-1/x": b""}])
def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path, files, force) -> None:
    write(tmp_path, files)
    with pytest.raises(UserError, match=r"expected an empty folder or one of a run for --fresh"):
        clear_run(tmp_path, force)
    assert contents(tmp_path) == files


@pytest.mark.parametrize("log", ["", "epoch 1: loss 0.3\n"])
def test_the_run_of_another_program_is_refused_and_left_alone(tmp_path, log) -> None:
    """Its files have the names of a run's, and none has a run's content."""
    write(tmp_path, {
        "experiment.yml": b"my: notes\n", "checkpoints/step-1000/pytorch_model.bin": b"weights", "log.jsonl": log.encode(),
        "tensorboard/events.out.tfevents.1": b"", "status.json": b"", ".lock": b"",
    })  # fmt: skip
    before = contents(tmp_path)
    with pytest.raises(UserError, match="expected an empty folder or one of a run for --fresh"):
        clear_run(tmp_path, force=True)
    assert contents(tmp_path) == before


def test_a_run_of_which_one_file_is_left_intact_is_a_run(run) -> None:
    """Damage to the others does not make it another program's."""
    manifest = next((run / "checkpoints").glob("step-*/manifest.json"))
    intact = {
        path: path.read_bytes() for path in (run / "experiment.yml", run / "log.jsonl", run / "status.json", manifest)
    }
    for left in intact:
        for path, content in intact.items():
            path.write_bytes(content if path == left else b"")
        for other in (run / "checkpoints").glob("step-*/manifest.json"):
            other.write_bytes(intact.get(other, b"") if other == left else b"")
        assert places.shows_a_run(run), left


def test_a_run_is_not_removed_without_force(run) -> None:
    before = contents(run)
    with pytest.raises(UserError, match="add --force"):
        clear_run(run, force=False)
    assert contents(run) == before


def test_nothing_is_removed_while_another_process_trains(run) -> None:
    """The lock is of another process: those of one process do not exclude each other."""
    with held_by_another(RunLock(run)):
        before = contents(run)
        with pytest.raises(Locked, match="is in use by"):
            clear_run(run, force=True)
        # All ranks are refused alike, so the error that is raised is the one that was broadcast.
        with pytest.raises(UserError, match="is in use by"):
            build._start_anew(run, True, True, Runtime())
        assert contents(run) == before
    clear_run(run, force=True)
    assert not (run / "log.jsonl").exists()


def test_nothing_is_removed_while_forecasts_are_written(run) -> None:
    """The store would be lost under a process that goes on to write to it, here the second of several forecasts."""
    forecasts = run / "forecasts"
    with held_by_another(FileLock(forecasts / ".lock", forecasts, "", places=[1], names=["the second"])):
        before = contents(run)
        with pytest.raises(Locked, match=r"forecasts is in use by a rollout; wait for it to end or stop it"):
            clear_run(run, force=True)
        assert contents(run) == before
    clear_run(run, force=True)
    assert not forecasts.exists()


@contextmanager
def held_by_another(lock: FileLock):
    """Have another process hold a lock."""
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(lock, held, done))
    other.start()
    assert held.wait(900)
    try:
        yield
    finally:
        done.set()
        other.join(900)


def _hold(lock, held, done) -> None:
    with lock:
        held.set()
        done.wait(900)


def test_forecasts_that_begin_during_a_removal_stay(run, monkeypatch) -> None:
    """They were not there when it looked which locks it needs."""
    forecasts = run / "forecasts"
    shutil.rmtree(forecasts)
    enter = RunLock.__enter__

    def begun_before(lock):
        write(forecasts, {"forecast.json": b"{}", "forecast.zarr.part/zarr.json": b"{}"})
        return enter(lock)

    monkeypatch.setattr(RunLock, "__enter__", begun_before)
    clear_run(run, force=True)
    assert sorted(contents(forecasts)) == ["forecast.json", "forecast.zarr.part/zarr.json"]
    assert not (run / "checkpoints" / "step-2").exists()


def test_a_store_is_renamed_before_it_is_removed_piece_by_piece(run, monkeypatch) -> None:
    forecasts, seen, rmtree = run / "forecasts", [], shutil.rmtree

    def removing(path, *arguments, **options):
        seen.append((path.name, (forecasts / "forecast.zarr").exists()))
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", removing)
    clear_run(run, force=True)
    assert ("forecast.zarr.removed.part", False) in seen
    assert not forecasts.exists()


def test_a_run_that_is_removed_while_its_checkpoints_are_looked_for_has_none(run, monkeypatch) -> None:
    is_dir = Path.is_dir

    def removed_then(path):
        found = is_dir(path)
        if path == run / "checkpoints":
            shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "is_dir", removed_then)
    assert not places.has_checkpoints(run)


def test_an_interrupted_removal_can_be_repeated(run, monkeypatch) -> None:
    """Stopped after any number of removals, and also after the last one, the folder still counts as a run."""
    import shutil

    from credit_like.checkpoint import clear

    total = 0
    while True:
        copy = run.with_name(f"copy-{total}")
        shutil.copytree(run, copy)
        left = total

        def limited(path: Path, remove=clear.remove) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            remove(path)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(clear, "remove", limited)
                clear_run(copy, force=True)
        except KeyboardInterrupt:
            pass
        clear_run(copy, force=True)
        kept = {".lock", "experiment.yml"}
        assert {name: content for name, content in contents(copy).items() if name not in kept} == THEIRS
        if left:
            break
        shutil.rmtree(copy)
        total += 1
    assert total > 5


def test_empty_and_absent_folders_need_no_force(tmp_path) -> None:
    clear_run(tmp_path, force=False)
    clear_run(tmp_path / "absent", force=False)
    (tmp_path / ".lock").touch()
    clear_run(tmp_path, force=False)
    saved(tmp_path / "checkpoints", 1)
    with pytest.raises(UserError, match="expected an empty folder"):
        clear_run(tmp_path, force=False)
