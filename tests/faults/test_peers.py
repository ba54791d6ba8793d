"""A rank that hangs or raises ends the others, with the first cause; `torchrun --max-restarts` brings a run back by itself."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.faults import harness, planted
from tests.faults.test_agents import agent
from tests.faults.test_signals import wait_for_rows
from tests.integration import test_restart

SECTION = {"epochs": 2, "checkpoint": {"every": 2}, "parallelism": {"data": "fsdp2"}}


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_within_the_timeout(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.01")
    harness.reference(tmp_path / "whole", SECTION, 2)
    job = harness.Job(tmp_path / "run", {**SECTION, "patience": 20, "hold_at": 8}, 2)
    wait_for_rows(tmp_path / "run", 5)
    job.signal(signal.SIGSTOP, 1)
    harness.release(tmp_path / "run")
    job.processes[0].join(300)
    assert job.processes[0].exitcode == 1
    text = (tmp_path / "run.0.out").read_text()
    assert text.count("Traceback (most recent call last)") - text.count("direct cause of the following") == 1, text
    reason = json.loads((tmp_path / "run" / "status.json").read_text())["reason"]
    assert reason.startswith("rank 0: another rank did not answer within trainer.timeout: rank 1 held up the others")
    job.end()
    harness.reference(tmp_path / "run", SECTION, 2)
    harness.assert_same(tmp_path / "run", tmp_path / "whole")


def raising(rank, world, port, save_loc, section):
    """Rank 1 meets an error of its own at its fifth step, in the first start."""
    if rank == 1 and section.get("raises"):
        from credit_like.training.step import TrainStep

        inner = TrainStep.__call__

        def step(self, micro_batches, count, learning_rate, number):
            if number == 5:
                raise RuntimeError("the wind has changed")
            return inner(self, micro_batches, count, learning_rate, number)

        TrainStep.__call__ = step
    return harness._train(rank, world, port, save_loc, {k: v for k, v in section.items() if k != "raises"})


def test_a_rank_that_raises_ends_the_others_and_is_the_one_to_blame(tmp_path) -> None:
    harness.reference(tmp_path / "whole", SECTION, 2)
    job = harness.Job(tmp_path / "run", {**SECTION, "raises": True}, 2, body=raising)
    assert job.wait()
    assert job.end() == [1, 1]
    assert (tmp_path / "run.1.out").read_text().count("RuntimeError: the wind has changed") == 1
    harness.reference(tmp_path / "run", SECTION, 2)
    harness.assert_same(tmp_path / "run", tmp_path / "whole")


ONE_EPOCH = [*planted.SETTINGS, "trainer.checkpoint={every: 2, keep: 2, async: false}"]


def killed_once(save_loc: str) -> None:
    """Train as one process of a launch, of which rank 1 is killed in its first start."""
    try:
        planted.main(save_loc, "1", "validation", "killed", ONE_EPOCH[-1])
    except SystemExit as end:
        if end.code:
            os._exit(1)


@pytest.mark.slow
def test_torchrun_brings_a_killed_rank_back(tmp_path) -> None:
    """In the first restart; to the bits of a run without torchrun."""
    test_restart.whole(tmp_path / "whole", ONE_EPOCH, 2)
    run = tmp_path / "run"
    job = harness.Job(run, {"ranks": 2, "restarts": 1, "rank": killed_once}, body=agent)
    assert job.wait(600)
    said = run.with_suffix(".0.out").read_text()
    assert job.end() == [0], said[-3000:]
    assert said.count("continuing from") == 2  # each rank once
    harness.assert_same(run, tmp_path / "whole")
