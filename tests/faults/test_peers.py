"""A rank that hangs or raises ends the others, with the first cause; `torchrun --max-restarts` brings a run back by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import harness, planted
from tests.faults.test_signals import wait_for_rows
from tests.integration import test_restart

ROOT = Path(__file__).parents[2]
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
    assert job.wait(300)
    assert job.end() == [1, 1]
    assert (tmp_path / "run.1.out").read_text().count("RuntimeError: the wind has changed") == 1
    harness.reference(tmp_path / "run", SECTION, 2)
    harness.assert_same(tmp_path / "run", tmp_path / "whole")


def workers(agent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


@pytest.mark.slow
def test_torchrun_brings_a_killed_rank_back(tmp_path) -> None:
    """In the first restart; to the bits of a run without torchrun."""
    settings = [*planted.SETTINGS, "trainer.checkpoint={every: 2, keep: 2, async: false}"]
    test_restart.whole(tmp_path / "whole", settings, 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["-m", "tests.faults.planted", str(tmp_path / "run"), "1", "validation", "killed", *settings[-1:]]
    job = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=600
    )
    assert job.returncode == 0, job.stderr[-3000:]
    assert job.stderr.count("continuing from") == 1
    harness.assert_same(tmp_path / "run", tmp_path / "whole")
