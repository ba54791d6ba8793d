"""A stop asked for by signals or time: at a step boundary, with a checkpoint, exit status 0, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time

import pytest

from credit_like.training.stop import seconds_left
from tests.faults import harness

SECTION = {"epochs": 2, "checkpoint": {"every": 4}, "parallelism": {"data": "none"}}


def status(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


def wait_for_rows(folder, count: int) -> None:
    deadline = time.monotonic() + 300
    path = folder / "log.jsonl"
    while not (path.exists() and len(path.read_bytes().splitlines()) >= count):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def once(job) -> None:
    job.signal(signal.SIGTERM, 0)


def both(job) -> None:
    job.signal(signal.SIGTERM)
    job.signal(signal.SIGUSR1)


def storm(job) -> None:
    rng = random.Random(0)
    while not job.wait(0):
        for process in job.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    job.signal(rng.choice([signal.SIGTERM, signal.SIGUSR1]), job.processes.index(process))
        time.sleep(0.0005)


def begun(folder, section, world) -> harness.Job:
    """A training in the midst of its first epoch, where it stays until it is released."""
    job = harness.Job(folder, {**section, "hold_at": 6}, world)
    wait_for_rows(folder, 3)
    return job


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (1, once),
        (2, storm),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, both), (1, storm), (2, once))),
    ],
)
def test_signals_end_the_run_to_be_continued(tmp_path, world, how, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.01")
    section = {**SECTION, "parallelism": {"data": "none" if world == 1 else "ddp"}}
    harness.reference(tmp_path / "whole", section, world)
    run = tmp_path / "stopped"
    job = begun(run, section, world)
    once(job) if how is storm else how(job)
    harness.release(run)
    # A storm also hits the interpreter's end, after the handlers are gone; nothing may be half-written even then.
    if how is storm:
        how(job)
        job.end()
    else:
        assert job.wait()
        assert job.end() == [0] * world
    assert status(run)["state"] == "continue"
    assert "SIG" in status(run)["reason"] or "another process" in status(run)["reason"]
    assert status(run)["step"] < 18
    harness.reference(run, section, world)
    harness.assert_same(run, tmp_path / "whole")


def test_stop_after_is_a_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.02")
    section = {**SECTION, "stop_after": "0.4s"}
    job = harness.Job(tmp_path / "run", section)
    assert job.wait()
    assert job.end() == [0]
    found = status(tmp_path / "run")
    assert found["state"] == "continue"
    assert "stop_after" in found["reason"]
    assert found["step"] < 18  # which takes at least 1.4 s


def test_an_end_of_the_job_that_is_no_time_is_asked_of_the_queue() -> None:
    environment = {"SLURM_JOB_END_TIME": "soon", "SLURM_JOB_ID": "7"}
    assert seconds_left(environment, run=lambda _: "1:30") == 90


def _under_a_jumping_clock(rank, world, port, save_loc, section) -> int:
    """Every look at the clock on the wall finds it up to three years off, before or after."""
    draw, truth = random.Random(3), time.time
    time.time = lambda: truth() + draw.uniform(-1e8, 1e8)
    return harness._train(rank, world, port, save_loc, section)


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.02")
    section = {**SECTION, "checkpoint": {"every": 4, "keep": 2}}
    harness.reference(tmp_path / "whole", section)
    run = tmp_path / "run"
    job = harness.Job(run, {**section, "stop_after": "0.4s"}, body=_under_a_jumping_clock)
    assert job.wait()
    assert job.end() == [0]
    assert status(run)["step"] < 18
    job = harness.Job(run, section, body=_under_a_jumping_clock)
    assert job.wait()
    assert job.end() == [0]
    harness.assert_same(run, tmp_path / "whole")


def test_a_stop_during_validation_validates_after_the_restart(tmp_path, monkeypatch) -> None:
    """The validation that was given up is made up for, once, from the same weights."""
    monkeypatch.setenv("PAUSE", "0.01")
    harness.reference(tmp_path / "whole", SECTION)
    run = tmp_path / "run"
    harness.reference(run, {**SECTION, "stop_at": 9})
    assert status(run) == {
        "state": "continue",
        "step": 9,
        "reason": "signal SIGTERM",
        "precision": "float32",
    }
    assert not [row for row in harness.rows(run) if "valid_loss" in row]
    harness.reference(run, SECTION)
    harness.assert_same(run, tmp_path / "whole")


def test_a_finished_run_has_nothing_to_do(tmp_path) -> None:
    harness.reference(tmp_path / "run", SECTION)
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    harness.reference(tmp_path / "run", SECTION)
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    assert status(tmp_path / "run")["state"] == "finished"
