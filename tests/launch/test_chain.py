"""When the next job of a chain starts, and when the chain stops."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from credit_like.launch import chain
from credit_like.launch.chain import decide

SUBMITTED = {"event": "submission", "mode": "train"}
CANCELLED = {"event": "cancellation"}


def began(job, checkpoint):
    return {"event": "begin", "mode": "train", "job": job, "checkpoint": checkpoint}


def ended(job, code):
    return {"event": "end", "mode": "train", "job": job, "code": code}


@pytest.mark.parametrize(
    ("state", "checkpoint", "events", "verdict"),
    [
        (None, -1, [SUBMITTED], "run"),  # the first of all
        (None, -1, [], "run"),  # a script submitted by hand
        ("continue", 40, [SUBMITTED, began("1", -1), ended("1", 0)], "run"),
        ("running", 40, [SUBMITTED, began("1", -1)], "run"),  # killed, but it got somewhere
        ("running", -1, [SUBMITTED, began("1", -1)], "stop"),  # killed before its first checkpoint
        ("running", 40, [SUBMITTED, began("1", 40), ended("1", 137)], "stop"),
        ("continue", 40, [SUBMITTED, began("1", 40), ended("1", 0)], "stop"),  # a walltime too short for one step
        ("running", 40, [SUBMITTED, began("2", 40)], "run"),  # the same job, started again by the scheduler
        ("failed", 40, [SUBMITTED, began("1", 20), ended("1", 1)], "stop"),
        ("failed", 40, [SUBMITTED, began("1", 20), ended("1", 1), SUBMITTED], "run"),  # submitted again
        ("failed", 40, [SUBMITTED, began("1", 20), SUBMITTED | {"mode": "rollout"}], "stop"),
        ("continue", 40, [SUBMITTED, began("1", 20), ended("1", 0), CANCELLED], "stop"),
        ("running", 40, [SUBMITTED, began("2", 20), CANCELLED], "stop"),  # started again by the scheduler
        ("continue", 40, [SUBMITTED, began("1", 20), CANCELLED, SUBMITTED], "run"),
        ("continue", 40, [SUBMITTED, began("1", 20), CANCELLED, SUBMITTED | {"mode": "rollout"}], "stop"),
        ("finished", 40, [SUBMITTED, CANCELLED], "stop"),
        ("finished", 40, [SUBMITTED], "run"),  # submitted again for more epochs
        ("finished", 40, [SUBMITTED, began("1", 20), ended("1", 0), SUBMITTED], "run"),
        ("finished", 40, [SUBMITTED, began("1", 20), ended("1", 0)], "finished"),
    ],
)
def test_decision(state, checkpoint, events, verdict):
    status = {} if state is None else {"state": state, "step": checkpoint, "reason": "loss is nan"}
    decision = decide(status, checkpoint, events, "2")
    assert decision.verdict == verdict
    assert bool(decision.reason) == (verdict != "run")


def test_a_submission_that_was_withdrawn_was_not_cancelled():
    events = [submitted(2), WITHDRAWN]
    assert "this submission was not completed" in decide({}, 0, events, "2", "train-2").reason
    assert "cancelled" in decide({}, 0, [*events, CANCELLED], "2", "train-3").reason


def submitted(number):
    return SUBMITTED | {"submission": f"train-{number}"}


def of(number, event):
    return event | {"submission": f"train-{number}"}


WITHDRAWN = {"event": "withdrawn", "mode": "train", "submission": "train-2"}
FIRST_FAILED = [submitted(1), of(1, began("1", 20)), ended("1", 1)]


@pytest.mark.parametrize(
    ("state", "events", "submission", "verdict"),
    [
        # another submission says nothing about the chain of this one
        ("failed", [*FIRST_FAILED, submitted(2)], 1, "stop"),
        ("failed", [*FIRST_FAILED, submitted(2)], 2, "run"),
        ("failed", [submitted(1), of(1, began("1", 20)), submitted(2), ended("1", 1)], 1, "stop"),
        ("continue", [submitted(1), CANCELLED, submitted(2)], 1, "stop"),
        ("continue", [submitted(1), CANCELLED, submitted(2)], 2, "run"),
        ("continue", [submitted(1), submitted(2), CANCELLED], 1, "stop"),
        # a failure that came after the submission is one that the user has not dealt with
        ("failed", [submitted(1), of(1, began("1", 20)), submitted(2), ended("1", 1)], 2, "stop"),
        ("failed", [submitted(1), submitted(2), of(1, began("1", 20)), ended("1", 1)], 2, "stop"),
        ("running", [submitted(1), submitted(2), of(1, began("1", 40))], 2, "stop"),
        ("running", [submitted(1), of(1, began("1", 40)), submitted(2)], 2, "run"),  # killed before, or still running
        ("running", [submitted(1), of(1, began("1", 40)), CANCELLED, {"event": "cancelled", "job": "1"}, submitted(2),
                     ended("1", 9)], 2, "run"),
        # one that the scheduler refused has never begun
        ("continue", [submitted(1), of(1, began("1", 20)), ended("1", 0), submitted(2), WITHDRAWN], 1, "run"),
        ("failed", [submitted(1), of(1, began("1", 20)), ended("1", 1), submitted(2), WITHDRAWN], None, "stop"),
        ("continue", [submitted(1), submitted(2), WITHDRAWN], 2, "stop"),
        # what the jobs of another submission finished may be less than this one asks for
        ("finished", [submitted(1), submitted(2), of(1, began("1", 20)), ended("1", 0)], 2, "run"),
        ("finished", [submitted(1), submitted(2), of(1, began("1", 20)), ended("1", 0)], 1, "finished"),
        ("finished", [submitted(1), submitted(2), of(1, began("1", 20)), of(2, began("3", 20))], 2, "finished"),
    ],
)  # fmt: skip
def test_decision_among_several_submissions(state, events, submission, verdict):
    status = {"state": state, "step": 40, "reason": "loss is nan"}
    assert decide(status, 40, events, "2", submission and f"train-{submission}").verdict == verdict


def test_next_job_is_submitted_once(tmp_path):
    command = ["bash", "-c", f"echo x >> {tmp_path}/calls; echo 7.server"]
    assert [chain.extend(tmp_path, "train", "6", command) for _ in range(2)] == [0, 0]
    assert (tmp_path / "calls").read_text() == "x\n"
    assert chain.history(tmp_path)[-1]["next"] == "7.server"


def test_cancelled_chain_submits_no_other_job(tmp_path):
    chain.record(tmp_path, "cancellation")
    assert chain.extend(tmp_path, "train", "6", ["touch", str(tmp_path / "called")]) == 0
    assert not (tmp_path / "called").exists()
    chain.record(tmp_path, "submission", mode="train")
    chain.extend(tmp_path, "train", "6", ["touch", str(tmp_path / "called")])
    assert (tmp_path / "called").exists()


def test_cancelled_chain_stays_so_beside_a_later_submission(tmp_path):
    chain.record(tmp_path, "submission", mode="train", submission="train-1")
    assert chain.main(["begin", str(tmp_path), "train", "6", "train-1"]) == 0
    chain.record(tmp_path, "cancellation")
    chain.record(tmp_path, "submission", mode="train", submission="train-2")
    chain.extend(tmp_path, "train", "6", ["touch", str(tmp_path / "called")])
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("mode", ["preprocess", "train", "rollout", "evaluate"])
def test_cancelled_jobs_of_every_mode_do_not_begin(tmp_path, capsys, mode):
    for number in (1, 2):
        chain.record(tmp_path, "submission", mode=mode, submission=f"{mode}-{number}")
        if number == 1:
            chain.record(tmp_path, "submission", mode="evaluate" if mode == "rollout" else "rollout")
            chain.record(tmp_path, "cancellation")
    assert chain.main(["begin", str(tmp_path), mode, "6", f"{mode}-1"]) == 1
    assert "the run's jobs were cancelled, submit again to go on" in capsys.readouterr().out
    assert chain.history(tmp_path)[-1]["event"] == "stopped"
    assert chain.main(["begin", str(tmp_path), mode, "7", f"{mode}-2"]) == 0
    assert mode == "train" or chain.main(["begin", str(tmp_path), mode, "8"]) == 0  # a script of an earlier version


def test_refused_successor_is_said_and_does_not_stop_the_job(tmp_path, capsys):
    assert chain.extend(tmp_path, "train", "6", ["bash", "-c", "echo no >&2; exit 3"]) == 1
    assert "refused the next job, submit again after this one: no" in capsys.readouterr().out
    assert chain.history(tmp_path) == []


def test_newest_checkpoint_counts_only_whole_ones(tmp_path):
    assert chain.newest_checkpoint(tmp_path) == -1
    for name in ("step-9", "step-10", ".step-11.tmp", "step-12.damaged"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert chain.newest_checkpoint(tmp_path) == 10


def test_history_passes_over_a_line_cut_short(tmp_path):
    chain.record(tmp_path, "begin", mode="train", job="1", checkpoint=-1)
    with (tmp_path / "jobs" / "history.jsonl").open("a") as out:
        out.write('{"event": "en\n')
    assert [event["event"] for event in chain.history(tmp_path)] == ["begin"]


def test_an_event_is_not_lost_where_a_refused_submission_removes_the_history(tmp_path, monkeypatch):
    """The other one has opened the file before it is removed."""
    chain.record(tmp_path, "submission", mode="train", submission="train-1")
    opened = Path.open

    def opened_before_the_removal(path, *arguments):
        file = opened(path, *arguments)
        if path == chain.history_file(tmp_path) and arguments == ("a+b",):
            monkeypatch.setattr(Path, "open", opened)
            chain.withdraw(tmp_path, "train", "train-1", begins_history=True)
        return file

    monkeypatch.setattr(Path, "open", opened_before_the_removal)
    chain.record(tmp_path, "submission", mode="train", submission="train-2")
    assert [event["submission"] for event in chain.history(tmp_path)] == ["train-2"]


def test_a_history_to_which_others_write_is_not_removed(tmp_path):
    chain.record(tmp_path, "submission", mode="train", submission="train-1")
    chain.record(tmp_path, "submission", mode="rollout", submission="rollout-1")
    chain.withdraw(tmp_path, "train", "train-1", begins_history=True)
    assert [event["event"] for event in chain.history(tmp_path)] == ["submission", "submission", "withdrawn"]
    assert [event["submission"] for event in chain.submissions(chain.history(tmp_path))] == ["rollout-1"]


def test_who_writes_to_the_history_waits_for_another_one_but_not_for_ever(tmp_path, monkeypatch):
    """One that removes the history must not do so while another one writes to it."""
    chain.record(tmp_path, "submission", mode="train", submission="train-1")
    monkeypatch.setattr(chain, "_PATIENCE", 0.0)
    context, asked = multiprocessing.get_context("spawn"), []
    ours, theirs = context.Pipe()
    other = context.Process(target=_hold, args=(chain.history_file(tmp_path), theirs))
    other.start()
    assert ours.recv() == "locked"
    lockf = chain.fcntl.lockf
    monkeypatch.setattr(chain.fcntl, "lockf", lambda *arguments: asked.append(1) or lockf(*arguments))
    chain.record(tmp_path, "submission", mode="train", submission="train-2")
    ours.send("end")
    other.join()
    assert asked == [1]
    assert len(chain.history(tmp_path)) == 2


def _hold(path, pipe):
    with chain._locked(path):
        pipe.send("locked")
        pipe.recv()


@pytest.mark.parametrize("state", ["finished", "continue", "failed"])
def test_a_status_of_the_job_before_is_not_that_of_this_one(tmp_path, capsys, state):
    """A job that fails before it trains, as where a package cannot be imported, writes none."""
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "step": 3}))
    chain.record(tmp_path, "submission", mode="train", submission="train-2")
    assert chain.main(["begin", str(tmp_path), "train", "1", "train-2"]) == 0
    assert chain.main(["end", str(tmp_path), "train", "1", "0"]) == 1
    assert "ended while not begun, exit status 0" in capsys.readouterr().out
    assert chain.main(["begin", str(tmp_path), "train", "1", "train-2"]) == 0  # restarted by the scheduler
    assert chain.main(["end", str(tmp_path), "train", "1", "9"]) == 9
    assert chain.main(["begin", str(tmp_path), "train", "2", "train-2"]) == 1
    assert "job 1 ended with exit status 9 and without a new checkpoint" in capsys.readouterr().out
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "step": 3}))
    os.utime(tmp_path / "status.json", ns=(1, 1))  # the same text, but written anew
    assert chain.main(["end", str(tmp_path), "train", "1", "9"]) == (9 if state == "failed" else 0)


@pytest.mark.parametrize(
    ("state", "code", "exit_status"),
    [("finished", 0, 0), ("continue", 143, 0), ("failed", 0, 1), ("running", 0, 1), ("running", 9, 9)],
)
def test_exit_status_of_a_job(tmp_path, state, code, exit_status):
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "step": 3, "reason": "disk full"}))
    assert chain.main(["end", str(tmp_path), "train", "1", str(code)]) == exit_status
