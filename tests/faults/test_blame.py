"""A rank that fails, at any moment: one message, from the rank that has the error, and all ranks end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from credit_like import build, cli
from credit_like.data.store import ReadError
from credit_like.errors import UserError
from credit_like.lock import RunLock
from credit_like.parallel import blame
from credit_like.parallel.environment import Environment
from credit_like.processes import identity
from credit_like.schema.load import load_experiment
from tests.experiments import DEMO
from tests.faults import harness, planted
from tests.faults.planted import ERRORS, MOMENTS, STATUS
from tests.integration.test_restart import TINY


def failing(rank, world, port, save_loc, section) -> int:
    """Train, with an error planted on one rank."""
    if rank == section["rank"]:
        planted.plant(save_loc, section["moment"], section["error"])
    planted.train(save_loc)
    return 0


def one_cause(folder: Path, rank: int, moment: str, error: str) -> None:
    run = folder / "run"
    job = harness.Job(run, {"rank": rank, "moment": moment, "error": error}, 2, body=failing)
    with harness.Waiting(job.pids) as waiting:
        assert job.wait(), "a rank did not end"
    assert waiting.since(float(run.with_suffix(".planted").read_text())) < harness.LIMIT
    assert job.end() == [STATUS[error]] * 2, run.with_suffix(f".{rank}.out").read_text()[-3000:]
    said = [run.with_suffix(f".{r}.out").read_text() for r in range(2)]
    words = ERRORS[error].args[0]
    assert said[rank].count(words) == 1, said[rank]
    assert f"rank {rank}: " in said[rank]
    assert words not in said[1 - rank]
    for text, expected in ((said[rank], error == "fault"), (said[1 - rank], False)):
        assert text.count("Traceback (most recent call last)") == expected, text
    if moment != "start" or error != "user":  # a folder is not made for what the user has to correct
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "failed"
        assert status["reason"].startswith(f"rank {rank}: ")
        assert words in status["reason"]


@pytest.mark.parametrize(
    ("rank", "moment", "error"),
    [
        (1, "start", "user"),
        (0, "statistics", "fault"),
        (1, "step", "read"),
        *(
            pytest.param(rank, moment, error, marks=[pytest.mark.slow, pytest.mark.long])
            for rank in range(2)
            for moment in MOMENTS
            for error in ERRORS
        ),
    ],
)
def test_one_cause_reported_once(tmp_path, rank, moment, error) -> None:
    one_cause(tmp_path, rank, moment, error)


def lonely(rank, world, port, save_loc, section) -> int:
    """Rank 1 fails while rank 0 waits for something that no other process can end."""
    import datetime as dt

    import torch

    from credit_like.parallel.runtime import Runtime
    from credit_like.schema.trainer import Parallelism

    with (
        cli._OneMessage(on_ranks=True),
        Runtime.start(Parallelism(data="ddp"), torch.device("cpu"), dt.timedelta(minutes=10)),
    ):
        if rank == 1:
            Path(save_loc).with_suffix(".planted").write_text(str(time.time()))
            raise UserError("the wind has changed")
        time.sleep(600)
    return 0


def test_a_rank_that_waits_for_ever_is_ended(tmp_path) -> None:
    """As one in an NCCL collective does, whose peers have gone."""
    job = harness.Job(tmp_path / "run", {}, 2, body=lonely)
    with harness.Waiting(job.pids) as waiting:
        assert job.wait()
    seconds = waiting.since(float((tmp_path / "run.planted").read_text()))
    assert seconds < harness.LIMIT
    assert job.end() == [2, 2]


POLL = 0.05
"""Seconds by which a wait may be longer."""


class Clock:
    """A clock that only sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(blame, "time", clock)
    return clock


def ranks(store, world: int) -> list[blame.Causes]:
    return [blame.Causes(Environment(rank, world, rank, "localhost", 1), store) for rank in range(world)]


@pytest.mark.parametrize("peers", ["lost", "silent", ""])
@pytest.mark.parametrize("reports", [True, False])
def test_what_a_rank_waits_in_all_is_limited(clock, monkeypatch, peers, reports) -> None:
    """Whatever it waits for: others that do not answer, the report of the first cause, those that have to see it."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first, other, _ = ranks(dist.HashStore(), 3)
    began = clock.now
    cause = first.claim(blame.Cause(0, "another rank did not answer: it hangs", peers=peers))
    assert cause.rank == 0
    if peers:
        assert "ranks 1, 2 held up the others" in cause.message
    if reports:
        first.reported()
    assert clock.now - began <= blame._IN_ALL + POLL
    began = clock.now
    assert other.claim(blame.Cause(1, "the connection to another rank was lost", peers="lost")).rank == 0
    other.wait_for_report()
    other.wait_for_report()
    assert clock.now - began <= blame._IN_ALL + POLL


def test_a_rank_that_has_ended_is_not_waited_for(clock, monkeypatch) -> None:
    """One of this machine; of another one it is not known."""
    store = dist.HashStore()
    first, other, remote = ranks(store, 3)
    first.announce()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with child:
        monkeypatch.setattr(blame, "identity", lambda: identity(child.pid))
        other.announce()
        monkeypatch.setattr(blame, "identity", lambda: "elsewhere 17 4")
        remote.announce()
        assert not first._has_ended(1)
        child.kill()
        child.wait()
    assert first._has_ended(1)
    assert not first._has_ended(2)
    store.set("failed/0/position/2", blame.hang.Position().to_json())
    cause = first.claim(blame.Cause(0, "another rank did not answer: it hangs", peers="silent"))
    assert "rank 1 held up the others: rank 1 does not respond" in cause.message
    store.set("failed/0/seen/2", "yes")
    first.reported()
    assert clock.now == 0.0


def start_that_fails(folder: Path, error: Exception, monkeypatch) -> dict | None:
    """The status that a run leaves whose statistics raise `error`."""

    def fail(*arguments):
        raise error

    monkeypatch.setattr(build, "load_statistics", fail)
    with pytest.raises(type(error)):
        build.train(load_experiment(DEMO, [*TINY, f"save_loc={folder}"]))
    status = folder / "status.json"
    return json.loads(status.read_text()) if status.exists() else None


@pytest.mark.parametrize("error", ERRORS.values())
def test_a_start_that_fails_is_recorded_at_the_newest_checkpoint(tmp_path, monkeypatch, error) -> None:
    (tmp_path / "checkpoints" / "step-12").mkdir(parents=True)
    (tmp_path / "status.json").write_text('{"state": "running", "step": 14}')
    said = error.args[0] if isinstance(error, (UserError, ReadError)) else f"KeyError: {error}"
    assert start_that_fails(tmp_path, error, monkeypatch) == {"state": "failed", "step": 12, "reason": said}


def test_a_start_that_fails_leaves_the_record_of_another_process_and_makes_no_folder_to_be_corrected(
    tmp_path, monkeypatch
) -> None:
    with RunLock(tmp_path):
        assert start_that_fails(tmp_path, ERRORS["fault"], monkeypatch) is None
    assert start_that_fails(tmp_path / "run", ERRORS["user"], monkeypatch) is None
    assert not (tmp_path / "run").exists()
    assert start_that_fails(tmp_path / "run", ERRORS["read"], monkeypatch)["state"] == "failed"
