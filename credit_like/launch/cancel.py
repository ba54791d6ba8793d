"""End the jobs of a run: those that wait before the one that runs, so that none of them begins in between."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from credit_like.errors import UserError
from credit_like.launch import scheduler
from credit_like.launch.chain import Event, history, queued_ids, record
from credit_like.launch.scheduler import Scheduler
from credit_like.launch.status import job_schedulers, scheduler_names, states_of

_BEGUN = ("running", "suspended", "ending")


@dataclass(frozen=True)
class Outcome:
    """What became of one job."""

    job: str
    mode: str
    was: str
    """The scheduler's word for its state before."""
    now: str
    refused: bool = False


def cancel(save_loc: Path, job: str | None = None) -> list[Outcome]:
    """End all jobs of a run that are still known to the scheduler, or only `job`; return the outcomes in order.

    A cancellation is recorded first: a job of the run that begins all the same stops at once, and no job submits a
    successor, until somebody submits again. `job` alone leaves no such record.
    Raises UserError where there is nothing to cancel, and for a job whose end would end or start others.
    """
    events = history(save_loc)
    _check_schedulers(save_loc, events)
    active = _active(events)
    if job is not None:
        return [_cancel_one(save_loc, events, _resolve(events, job), active)]
    if not active:
        raise UserError(_nothing(queued_ids(events)))
    record(save_loc, "cancellation")
    outcomes: dict[str, Outcome] = {}
    while True:  # a job may have submitted its successor in the meantime
        events = history(save_loc)
        left = {job: state for job, state in _active(events).items() if job not in outcomes}
        waiting = [job for job, state in left.items() if not _has_begun(state)]
        for each in reversed(waiting or list(left)):  # on PBS the others would go with the first
            outcomes[each] = _end(save_loc, events, each, left[each])
        if not left:
            # One that began in the meantime has found the record and stopped.
            gone = {job: state for job, state in active.items() if job not in outcomes}
            ended = [Outcome(job, _mode(events, job), state, "ended by itself") for job, state in gone.items()]
            return [*outcomes.values(), *ended]


def _cancel_one(save_loc: Path, events: Sequence[Event], job: str, active: dict[str, str]) -> Outcome:
    if job not in active:
        raise UserError(_nothing([job]))
    followers = _followers(events, job, active)
    if followers and not _has_begun(active[job]):
        raise UserError(
            f"expected a job that has begun or that no other waits for, got {job} ({active[job]}) with "
            f"{', '.join(followers)} waiting for it: {_dialect(events, job).orphans}; cancel "
            f"{', '.join(reversed(followers))} first, in this order, or leave out --job to cancel all"
        )
    outcome = _end(save_loc, events, job, active[job])
    if not followers or outcome.refused:
        return outcome
    return Outcome(outcome.job, outcome.mode, outcome.was, f"{outcome.now}; {followers[0]} begins after it")


def _check_schedulers(save_loc: Path, events: Sequence[Event]) -> None:
    """Raise UserError where the run has no jobs of a scheduler, or where no scheduler of theirs has its commands here."""
    names = scheduler_names(events)
    if not names:
        raise UserError(f"nothing to cancel: expected a run with submitted jobs, got {save_loc}, which records none")
    programs = [scheduler.by_name(name).cancel([])[0] for name in names if name != "local"]
    if not programs:
        raise UserError("nothing to cancel: jobs of site local run where submit was called, press Ctrl-C there")
    if all(shutil.which(program) is None for program in programs):
        raise UserError(
            f"expected {' or '.join(programs)} on the PATH to cancel jobs, got none, do this on a login node"
        )


def _dialect(events: Sequence[Event], job: str) -> Scheduler:
    """Return the scheduler of a job."""
    return scheduler.by_name(job_schedulers(events)[job])


def _active(events: Sequence[Event]) -> dict[str, str]:
    """Return the state of each job that has not ended, in the order of submission."""
    ids = queued_ids(events)
    states = states_of(events, ids)
    return {job: states[job] for job in ids if job in states and not states[job].startswith("ended")}


def _nothing(jobs: Sequence[str]) -> str:
    named = ", ".join(jobs[-5:]) or "any job"
    return f"nothing to cancel: the scheduler does not have {named} any more; if it does not answer at the moment, try again"


def _has_begun(state: str) -> bool:
    return state.startswith(_BEGUN)


def _resolve(events: Sequence[Event], job: str) -> str:
    """Return the id of a job of the run; the number alone is enough on PBS.

    Raises UserError for any other.
    """
    ids = queued_ids(events)
    for known in ids:
        if job in (known, known.split(".")[0]):
            return known
    raise UserError(f"--job: expected a job of this run, {' or '.join(ids[-5:]) or 'which has none'}, got {job!r}")


def _mode(events: Sequence[Event], job: str) -> str:
    return next(event["mode"] for event in events if job in (*event.get("ids", ()), event.get("next")))


def _followers(events: Sequence[Event], job: str, active: dict[str, str]) -> list[str]:
    """Return the active jobs that wait for a job, for one that waits for it, and so on."""
    waits_for: dict[str, list[str]] = {}
    for event in events:
        ids = event.get("ids", [])
        for i, each in enumerate(ids):  # a chain; the jobs of other modes do not wait for each other
            waits_for[each] = [ids[i - 1]] if i and event["mode"] == "train" else list(event.get("after", ()))
        if event["event"] == "extended":
            waits_for[event["next"]] = [event["job"]]
    found = [job]
    for each in active:  # in the order of submission, and a job waits for earlier ones only
        if {one.split(".")[0] for one in waits_for.get(each, ())} & {one.split(".")[0] for one in found}:
            found.append(each)
    return found[1:]


def _end(save_loc: Path, events: Sequence[Event], job: str, state: str) -> Outcome:
    """Cancel one job, and record it; one that ends by itself in the meantime is no failure."""
    dialect, mode = _dialect(events, job), _mode(events, job)
    if state.startswith("ending"):
        return Outcome(job, mode, state, "ends already")
    done = subprocess.run(dialect.cancel([job]), capture_output=True, text=True, check=False)
    if done.returncode:
        now = dialect.states([job]).get(job, "ended")
        if not now.startswith(("ended", "ending")):
            said = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
            return Outcome(job, mode, state, f"not cancelled: {said}", refused=True)
        return Outcome(job, mode, state, "ended by itself")
    record(save_loc, "cancelled", mode=mode, job=job, reason="while it ran" if _has_begun(state) else "before it began")
    saves = _has_begun(state) and mode == "train"
    return Outcome(
        job, mode, state, "cancelled" + "; the job saves the current step if the site allows enough time" * saves
    )
