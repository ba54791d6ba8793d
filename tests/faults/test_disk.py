"""A disk that fills, cannot be written or goes away during a run: one clear error, and the last checkpoint intact."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_like.checkpoint import manager as manager_module
from credit_like.checkpoint.manager import Checkpoint, CheckpointManager, steps
from credit_like.data.files import netcdf_files
from credit_like.errors import RunError
from credit_like.lock import Locked
from credit_like.training import loop as loop_module
from tests.faults import harness, tiny

SECTION = {"checkpoint": {"every": 2, "keep": 2}, "width": 4096}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_during_saves(small_disk, monkeypatch) -> None:
    """Each checkpoint is 2.5 MiB, two are kept: the third has no room for its neighbour once a file takes the rest."""
    monkeypatch.setattr(loop_module.time, "sleep", lambda seconds: None)
    trainer = tiny.trainer(small_disk / "run", **SECTION, epochs=1)
    filler = small_disk / "filler"
    inner = trainer.train_step

    def fill(micro_batches, count, learning_rate, step):
        if step == 5:
            trainer.manager.wait()
            with filler.open("wb") as file:
                file.write(b"x" * (shutil.disk_usage(small_disk).free - 2**20))
        return inner(micro_batches, count, learning_rate, step)

    monkeypatch.setattr(trainer, "train_step", fill)
    outcome = trainer.fit()
    assert outcome.state == "failed"
    assert outcome.exit_status != 0
    assert "No space left" in outcome.reason
    folder = small_disk / "run" / "checkpoints"
    newest = CheckpointManager(folder).latest()
    assert newest is not None
    assert newest.step == 4
    assert not list(folder.glob(".*"))
    filler.unlink()
    # With room again, the same command goes on and ends as if nothing had been.
    assert tiny.trainer(small_disk / "run", **SECTION, epochs=1).fit().state == "finished"
    harness.assert_same(small_disk / "run", _whole(small_disk.parent / "whole"))


def _whole(folder):
    tiny.trainer(folder, **SECTION, epochs=1).fit()
    return folder


def test_a_disk_without_room_for_a_netcdf_file_is_one_message_with_its_path(small_disk) -> None:
    dataset = xr.Dataset({"valid": (("latitude", "longitude"), np.random.default_rng(0).random((1000, 1000)))})
    netcdf_files.save(dataset.isel(latitude=slice(500)), small_disk / "fits.nc")
    with pytest.raises(
        RunError, match=f"{small_disk / 'statistics.nc'} cannot be written .*; free some space on its disk"
    ):
        netcdf_files.save(dataset, small_disk / "statistics.nc")


def test_a_netcdf_file_that_a_full_disk_does_not_take_is_no_lack_of_permission(small_disk) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 2**20)
    with pytest.raises(OSError, match=r"No space left on device: .*statistics\.nc"):
        netcdf_files.save(xr.Dataset({"a": 1.0}), small_disk / "statistics.nc")
    assert {path.name for path in small_disk.iterdir()} <= {"filler", "statistics.nc"}


def wait_in_steps(trainer) -> None:
    """Have every step take as long as a thread of a save."""
    inner = trainer.train_step

    def step(*arguments):
        if trainer.manager.in_flight:
            trainer.manager._save.thread.join()
        return inner(*arguments)

    trainer.train_step = step


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("every", "epochs", "failing", "saved"),
    [(2, 1, [2], [3, 4, 6, 8, 9]), (4, 2, [4, 8, 12, 16], [5, 9, 13, 17, 18])],
    ids=["once", "again and again"],
)
def test_a_save_that_fails_is_tried_again_once(
    tmp_path, monkeypatch, asynchronous, every, epochs, failing, saved
) -> None:
    """After the next step; all other saves are those of a run in which none fails, and failures apart do not add up."""
    real, tried = manager_module.write_tensors, []

    def write(path, tensors):
        tried.append(int(path.parent.name.removeprefix(".step-").removesuffix(".tmp")))
        if tried[-1] in failing:
            raise OSError(5, "Input/output error")
        return real(path, tensors)

    monkeypatch.setattr(manager_module, "write_tensors", write)
    section = {"checkpoint": {"every": every, "keep": 9, "async": asynchronous}, "epochs": epochs}
    trainer = tiny.trainer(tmp_path / "run", **section)
    wait_in_steps(trainer)
    assert trainer.fit().state == "finished"
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert steps(tmp_path / "run" / "checkpoints") == saved
    assert tried == sorted([*failing, *saved])


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("phase", ["_write", "_commit"])
def test_the_last_save_is_tried_again_too(tmp_path, monkeypatch, phase, failures) -> None:
    """It runs while nothing is left to compute, and records the loss of the last validation."""
    monkeypatch.setattr(loop_module.time, "sleep", lambda seconds: None)
    section = {"epochs": 1, "checkpoint": {"every": 1000, "keep": 2}}
    last = tiny.trainer(tmp_path, **section).total_steps
    inner, failed = getattr(CheckpointManager, phase), []

    def failing(self, *args):
        if len(failed) < failures:
            failed.append(args)
            raise OSError(5, "Input/output error")
        return inner(self, *args)

    monkeypatch.setattr(CheckpointManager, phase, failing)
    outcome = tiny.trainer(tmp_path, **section).fit()
    assert len(failed) == failures
    if failures == 3:
        assert outcome.state == "failed"
        assert "Input/output error" in outcome.reason
        return
    assert outcome.state == "finished"
    assert steps(tmp_path / "checkpoints") == [last]
    (loss,) = [row["valid_loss"] for row in harness.rows(tmp_path) if "valid_loss" in row]
    assert Checkpoint.open(tmp_path / "checkpoints" / f"step-{last}").score == loss


@pytest.mark.parametrize("phase", ["_stage", "_prepare", "_write", "_commit"])
def test_a_loss_stays_with_the_step_that_it_was_computed_for(tmp_path, monkeypatch, phase) -> None:
    """Where the save after a validation fails, whenever that is seen, the checkpoint of a later step has no loss.

    It fails twice, because at the end of an epoch the first try may be repeated before the next step.
    """
    section = {"epochs": 2, "checkpoint": {"every": 1000, "keep": 9}}
    inner, failed = getattr(CheckpointManager, phase), []

    def failing(self, *args):
        if len(failed) < 2:
            failed.append(args)
            raise OSError(5, "Input/output error")
        return inner(self, *args)

    monkeypatch.setattr(CheckpointManager, phase, failing)
    trainer = tiny.trainer(tmp_path, **section)
    wait_in_steps(trainer)
    assert trainer.fit().state == "finished"
    losses = {row["step"]: row["valid_loss"] for row in harness.rows(tmp_path) if "valid_loss" in row}
    kept = steps(tmp_path / "checkpoints")
    assert kept[-1] in losses
    assert set(kept) - set(losses)
    for step in kept:
        assert Checkpoint.open(tmp_path / "checkpoints" / f"step-{step}").score == losses.get(step)


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(Locked, match="save_loc: expected a folder that can be written"):
        tiny.trainer(blocked / "run").fit()


def _vanishing(rank, world, port, save_loc, section) -> int:
    """Train, and in step 5 put a file where the run's folder was."""
    loop_module.time.sleep = lambda seconds: None
    run = Path(save_loc)
    trainer = tiny.trainer(run, checkpoint={"every": 2}, epochs=1)
    inner = trainer.train_step

    def vanish(micro_batches, count, learning_rate, step):
        if step == 5:
            trainer.manager.wait()
            shutil.rmtree(run)
            run.write_text("something else now")
        return inner(micro_batches, count, learning_rate, step)

    trainer.train_step = vanish
    return trainer.fit().exit_status


def test_a_save_loc_that_vanishes_fails_with_the_cause(tmp_path) -> None:
    job = harness.Job(tmp_path / "run", {}, body=_vanishing)
    assert job.wait()
    assert job.end() == [1]
    said = (tmp_path / "run.0.out").read_text()
    assert said.count("ERROR") == 1
    assert "could not save step 8: [Errno 20] Not a directory" in said


def test_a_poisoned_sample_is_skipped_and_named(tmp_path, caplog) -> None:
    """One time with a NaN: the steps that see it are skipped and logged; the others train."""
    outcome = tiny.trainer(tmp_path / "run", poison={20}, epochs=1).fit()
    assert outcome.state == "finished"
    rows = [row for row in harness.rows(tmp_path / "run") if "loss" in row]
    skipped = [row for row in rows if row.get("skipped")]
    assert 1 <= len(skipped) <= 2
    assert all(row["loss"] is None for row in skipped)
    assert all(row["loss"] is not None for row in rows if not row.get("skipped"))
    messages = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(messages) == len(skipped)
    assert all("first offending: input v" in m or "first offending: target v" in m for m in messages)
    assert all("2000-01-06T00" in m or "2000-01-05T18" in m for m in messages)


def test_too_many_skipped_steps_stop_the_run(tmp_path) -> None:
    outcome = tiny.trainer(tmp_path / "run", poison=set(range(48)), epochs=2, max_skipped=3).fit()
    assert outcome.state == "failed"
    assert outcome.exit_status == 1
    assert "3 steps in a row" in outcome.reason
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    # With a checkpoint of weights that no bad step has touched.
    fresh = tiny.trainer(tmp_path / "fresh").state.pieces()
    saved = harness.tensors(tmp_path / "run")
    for name, piece in fresh.items():
        if name.startswith("model/") and "calls" not in name:
            assert saved[name].equal(piece.local), name
