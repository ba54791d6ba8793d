"""Starts of a run: one that is refused leaves every file as it was, and one that takes no step loses nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from credit_like.checkpoint import format as format_module
from credit_like.checkpoint.clear import clear_run
from credit_like.checkpoint.errors import SaveFailed
from credit_like.checkpoint.manager import Checkpoint, steps
from credit_like.errors import RunError, UserError
from credit_like.parallel.runtime import Runtime
from credit_like.training.loop import Loop
from credit_like.training.trainer import record_failed_start
from tests.faults import harness, tiny

SECTION = {"epochs": 2, "checkpoint": {"every": 5, "keep": 2, "async": False}}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run in its second epoch, with checkpoints of steps 9 (the best), 10 and 12."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert tiny.trainer(folder, **SECTION, stop_at=12).fit().state == "continue"
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock, which names its newest owner."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def other_variables(run: Path, monkeypatch) -> dict:
    """The same variables in another order."""
    inner = tiny.experiment

    def experiment(save_loc, **section):
        made = inner(save_loc, **section).to_dict()
        made["data"]["prognostic"]["surface"] = made["data"]["prognostic"]["surface"][::-1]
        return type(inner(save_loc)).model_validate(made)

    monkeypatch.setattr(tiny, "experiment", experiment)
    return SECTION


def all_damaged(run: Path, monkeypatch) -> dict:
    for file in (run / "checkpoints").glob("*/*.safetensors"):
        file.write_bytes(b"")
    return SECTION


REFUSALS = {
    "optimiser": (lambda *_: {**SECTION, "optimizer": {"type": "muon"}}, r"trainer\.optimizer"),
    "phases": (lambda *_: {"phases": [{"epochs": 1}, {"epochs": 1}], "checkpoint": SECTION["checkpoint"]}, "phases"),
    "model": (lambda *_: {**SECTION, "width": 16}, "expected shape"),
    "variables": (other_variables, "the order of the inputs"),
    "all damaged": (all_damaged, "got only damaged ones"),
}


@pytest.mark.parametrize("state", ["continue", "finished", "failed"])
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_start_that_is_refused_changes_no_file(stopped, tmp_path, monkeypatch, kind, state) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    (run / "status.json").write_text(json.dumps({"state": state, "step": 12, "reason": "before"}))
    change, message = REFUSALS[kind]
    section = change(run, monkeypatch)
    before = contents(run)
    with pytest.raises(UserError, match=message):
        tiny.trainer(run, **section).fit()
    assert contents(run) == before


def test_a_newer_damaged_checkpoint_is_set_aside_by_the_start_that_goes_on(stopped, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    (run / "checkpoints" / "step-12" / "manifest.json").unlink()
    before = contents(run)
    with pytest.raises(UserError, match="expected shape"):
        tiny.trainer(run, **SECTION, width=16).fit()
    assert contents(run) == before
    assert tiny.trainer(run, **{**SECTION, "epochs": 3}, stop_at=11).fit().state == "continue"
    assert steps(run / "checkpoints") == [9, 10, 11]
    assert (run / "checkpoints" / ".damaged-step-12").is_dir()
    assert "epochs: 3" in (run / "experiment.yml").read_text()


def test_a_checkpoint_that_cannot_be_read_now_fails_the_start_and_the_next_one_goes_on(
    stopped, tmp_path, monkeypatch
) -> None:
    """A limit of open files once took the newest checkpoint for damaged, and with the only one began anew."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    before = contents(run)

    def digest(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(format_module, "digest", digest)
        with pytest.raises(RunError, match="Too many open files; the checkpoint is left as it is"):
            tiny.trainer(run, **SECTION).fit()
    status = json.loads(contents(run)["status.json"])
    assert (status["state"], status["step"]) == ("failed", 12)
    assert {**contents(run), "status.json": before["status.json"]} == before
    assert tiny.trainer(run, **SECTION).fit().state == "finished"
    tiny.trainer(tmp_path / "whole", **SECTION).fit()
    harness.assert_same(run, tmp_path / "whole")


@pytest.mark.parametrize(
    ("state", "error", "recorded"),
    [
        ("continue", UserError("no"), False),
        ("finished", UserError("no"), False),
        ("failed", UserError("no"), False),
        ("running", UserError("no"), True),  # no process trains there any more
        ("finished", RunError("no"), True),
        (None, UserError("no"), True),
    ],
)
def test_a_start_that_is_refused_before_it_holds_the_lock_is_recorded_where_there_is_no_other_record(
    tmp_path, state, error, recorded
) -> None:
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    if state is not None:
        (tmp_path / "status.json").write_text(json.dumps({"state": state, "step": 3, "reason": "before"}))
    before = contents(tmp_path)
    record_failed_start(tmp_path, Runtime(), error)
    if recorded:
        assert json.loads(contents(tmp_path)["status.json"]) == {"state": "failed", "step": 3, "reason": "no"}
    else:
        assert contents(tmp_path) == before


def test_a_start_that_stops_before_its_first_step_keeps_the_loss_of_its_checkpoint(tmp_path) -> None:
    section = {"checkpoint": {"every": 1000, "keep": 1}}
    assert tiny.trainer(tmp_path, epochs=1, **section).fit().state == "finished"
    (last,) = steps(tmp_path / "checkpoints")
    (loss,) = [row["valid_loss"] for row in harness.rows(tmp_path) if "valid_loss" in row]
    again = tiny.trainer(tmp_path, epochs=2, **section)
    tiny.stop_before_first_step(again)
    outcome = again.fit()
    assert (outcome.state, outcome.step) == ("continue", last)
    assert Checkpoint.open(tmp_path / "checkpoints" / f"step-{last}").score == loss


def test_a_refused_first_start_leaves_a_folder_that_fresh_clears(tmp_path) -> None:
    trainer = tiny.trainer(tmp_path / "run", **SECTION)

    def start() -> None:
        raise UserError("start_from.path: no")

    trainer.state.start = start
    with pytest.raises(UserError, match="start_from"):
        trainer.fit()
    with pytest.raises(UserError, match="add --force"):
        clear_run(tmp_path / "run", force=False)
    clear_run(tmp_path / "run", force=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {".lock", "experiment.yml"}


def test_the_loss_of_a_step_is_saved_with_it_also_where_the_save_before_it_failed(tmp_path, monkeypatch) -> None:
    """The save of step 4, which is not waited for, fails while the next step is taken and validated."""
    trainer = tiny.trainer(tmp_path, epochs=1, valid_every=5, checkpoint={"every": 4, "keep": 9, "async": True})
    manager = trainer.manager
    wait, failed = manager.wait, []

    def failing() -> None:
        was_in_flight = manager.in_flight
        wait()
        if was_in_flight and not failed:
            failed.append(trainer.state.progress.step)
            raise SaveFailed("cannot save step 4")

    real = Loop._poll
    # It would notice the failure before the validation.
    monkeypatch.setattr(Loop, "_poll", lambda loop: real(loop) if failed else None)
    monkeypatch.setattr(manager, "wait", failing)
    trainer.fit()
    assert failed == [5]
    losses = {row["step"]: row["valid_loss"] for row in harness.rows(tmp_path) if "valid_loss" in row}
    assert Checkpoint.open(tmp_path / "checkpoints" / "step-5").score == losses[5]
