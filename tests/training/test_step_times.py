"""The time of a step is that of the step: without validations and saves, and counted over all jobs of a run."""

from __future__ import annotations

import types

import pytest

from credit_like.checkpoint.manager import CheckpointManager, steps
from credit_like.training import loop, trainer
from credit_like.training.state import Progress
from credit_like.training.validation import Validation
from tests.faults import harness, tiny

BATCH = 4
SECTION = {"epochs": 2, "valid_every": 2, "checkpoint": {"every": 3, "keep": 9, "async": False}}


@pytest.fixture
def loops(monkeypatch):
    """The loops of the trainers, by a clock that stands still but for a second per step, and more for other things."""
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0], sleep=lambda _: None)
    monkeypatch.setattr(loop, "time", clock)

    def takes(owner, name, seconds):
        inner = getattr(owner, name)

        def wrapped(self, *args):
            now[0] += seconds
            return inner(self, *args)

        monkeypatch.setattr(owner, name, wrapped)

    takes(trainer.TrainStep, "__call__", 1.0)
    takes(Validation, "__call__", 100.0)
    takes(CheckpointManager, "save", 1000.0)
    takes(loop.Loop, "_blame", 50.0)
    made = []

    class Recorded(loop.Loop):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(trainer, "Loop", Recorded)
    return made


def test_validations_and_saves_are_no_part_of_a_step(loops, tmp_path):
    assert tiny.trainer(tmp_path, **SECTION).fit().state == "finished"
    rows = harness.rows(tmp_path)
    trained = [row["step"] for row in rows if "loss" in row]
    assert len([row for row in rows if "valid_loss" in row]) > 3
    assert {row["samples_per_second"] for row in rows if "loss" in row} == {BATCH / 1.0}
    assert loops[0].longest == 1.0
    assert loops[0].state.progress.trained == len(trained)


def test_the_diagnosis_of_a_skipped_step_is_no_part_of_one(loops, tmp_path):
    tiny.trainer(tmp_path, poison={8, 9}, **SECTION).fit()
    assert any(row.get("skipped") for row in harness.rows(tmp_path))
    assert loops[0].longest == 1.0


def test_the_time_in_steps_and_in_forecasts_is_that_of_all_jobs(loops, tmp_path, monkeypatch):
    """So that forecasts whose cost is more than the share of one job's time come in a later job."""
    told = []
    inner = Validation.__call__

    def paying(self, stop, ended, trained, count):
        told.append((trained, count, self.allowance.spent))
        self.allowance.pay(5.0)
        return inner(self, stop, ended, trained, count)

    monkeypatch.setattr(Validation, "__call__", paying)
    assert tiny.trainer(tmp_path, stop_at=5, **SECTION).fit().state == "continue"
    assert tiny.trainer(tmp_path, **SECTION).fit().state == "finished"
    assert [job.longest for job in loops] == [1.0, 1.0]
    assert [count for _, count, _ in told] == sorted({count for _, count, _ in told})
    assert [trained for trained, _, _ in told] == [count for _, count, _ in told]
    assert [spent for _, _, spent in told] == [5.0 * i for i in range(len(told))]
    assert loops[1].state.progress.trained == steps(tmp_path / "checkpoints")[-1]


def test_progress_of_an_earlier_version_has_the_whole_time_alone():
    assert Progress.of({"step": 3, "seconds": 60.0}).trained == 60.0
    assert Progress.of({"step": 3, "seconds": 60.0, "trained": 50.0}).trained == 50.0
    with pytest.raises(ValueError, match="could not convert"):
        Progress.of({"step": 3, "trained": "long"})


def test_a_checkpoint_of_an_earlier_version_may_have_a_lowest_loss() -> None:
    """Which nothing needs; the losses tell it."""
    assert Progress.of({"step": 3, "best": 0.5, "losses": [0.5]}) == Progress.of({"step": 3, "losses": [0.5]})


@pytest.mark.parametrize("left", [-1, "x", 1.5])
def test_an_epoch_to_go_on_with_is_a_number_of_epochs(left) -> None:
    with pytest.raises((TypeError, ValueError)):
        Progress.of({"step": 3, "left": left})
