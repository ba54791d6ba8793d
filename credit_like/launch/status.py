"""The status of a run, from the trainer's files and the scheduler."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credit_like.errors import UserError
from credit_like.launch import scheduler
from credit_like.launch.chain import (
    Event,
    best_checkpoint,
    history,
    newest_checkpoint,
    queued_ids,
    run_status,
    submissions,
)
from credit_like.runs import newest_row
from credit_like.schema import sites
from credit_like.schema.launch import SiteSection

_TRIES = 3
"""Listings of the checkpoints, each of which a training may prune before it is used."""


@dataclass(frozen=True)
class JobRow:
    """One job of the run."""

    job: str
    mode: str
    state: str
    began: str = ""
    ended: str = ""
    step: int | None = None
    """Training step at the end of the job."""


@dataclass(frozen=True)
class RunStatus:
    """A summary of a run; None means not known yet."""

    save_loc: Path
    state: str
    reason: str | None
    step: int | None
    phase: int | None
    """Position in `trainer.phases`; None where the training has one phase alone."""
    epoch: float | None
    loss: float | None
    samples_per_second: float | None
    valid_loss: float | None
    checkpoint: int | None
    checkpoint_time: str | None
    best: tuple[int, float] | None
    """Step and validation loss of the best checkpoint, which is kept."""
    origin: Mapping[str, Any] | None
    """Of a run that started from other weights: their path, checksum, step, experiment and kind."""
    jobs: tuple[JobRow, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Return the known facts as rows of a table."""
        loss = None if self.loss is None else f"{self.loss:.6g}"
        valid = None if self.valid_loss is None else f"{self.valid_loss:.6g}"
        rate = None if self.samples_per_second is None else f"{self.samples_per_second:.4g} samples/s"
        checkpoint = None if self.checkpoint is None else f"step {self.checkpoint}, {self.checkpoint_time}"
        facts = {
            "run": self.save_loc, "state": self.state, "reason": self.reason, "step": self.step,
            "phase": self.phase, "epoch": self.epoch,
            "loss": loss, "validation loss": valid, "throughput": rate, "last checkpoint": checkpoint,
            "best checkpoint": None if self.best is None else f"step {self.best[0]}, validation loss {self.best[1]:.6g}",
            "started from": None if self.origin is None else _origin_text(self.origin),
        }  # fmt: skip
        return [(name, str(value)) for name, value in facts.items() if value is not None]


def status(save_loc: Path) -> RunStatus:
    """Return the status of the run in a folder.

    Raises UserError where there is no run.
    """
    events = history(save_loc)
    told = run_status(save_loc)
    if not (events or told or (save_loc / "log.jsonl").exists()):
        raise UserError(
            f"expected the folder of a run (save_loc), got {save_loc}, which holds no status.json, log or jobs"
        )
    log = save_loc / "log.jsonl"
    step: Event = newest_row(log, "loss")
    validation: Event = newest_row(log, "valid_loss", "val_loss")
    checkpoint, checkpoint_time = _newest_checkpoint(save_loc)
    return RunStatus(
        save_loc=save_loc,
        state=str(told.get("state", "not begun")),
        reason=told.get("reason"),
        step=_number(step, "step") if "step" in step else _number(told, "step"),
        phase=_number(step, "phase"),
        epoch=_number(step, "epoch"),
        loss=_number(step, "loss"),
        samples_per_second=_number(step, "samples_per_second"),
        valid_loss=_number(validation, "valid_loss", "val_loss"),
        checkpoint=checkpoint,
        checkpoint_time=checkpoint_time,
        best=best_checkpoint(save_loc),
        origin=told["origin"] if isinstance(told.get("origin"), dict) else None,
        jobs=tuple(job_rows(events, states_of(events, queued_ids(events)[-50:]))),
    )


def _origin_text(origin: Mapping[str, Any]) -> str:
    """Return where the first weights of a run came from in one line."""
    of = [str(origin["experiment"])] if origin.get("experiment") else []
    of += [f"step {origin['step']}"] if origin.get("step") is not None else []
    of += [f"{origin['weights']} weights"] if origin.get("weights") else []
    of.append(f"SHA-256 {str(origin.get('sha256'))[:12]}…")
    return f"{origin.get('path')} ({', '.join(of)})"


def job_rows(events: list[Event], states: dict[str, str]) -> list[JobRow]:
    """Return a row for each job in the order of submission.

    The scheduler's state takes precedence over what the job itself recorded.
    """
    rows: dict[str, dict[str, Any]] = {}
    jobs_of: dict[str | None, list[str]] = {}
    for event in events:
        kind, time = event["event"], event["time"]
        if kind in ("submission", "cancellation"):
            continue
        if kind == "submitted":
            jobs_of.setdefault(event.get("submission"), []).extend(event["ids"])
            for job in event["ids"]:  # the first may have begun before its id was recorded
                rows.setdefault(job, {"mode": event["mode"], "state": "submitted"})
        elif kind == "withdrawn":
            for job in jobs_of.get(event["submission"], ()):
                if rows[job]["state"] == "submitted":
                    rows[job]["state"] = "withdrawn"
        elif kind == "extended":
            rows.setdefault(event["next"], {"mode": event["mode"], "state": "submitted"})
        else:
            row = rows.setdefault(event["job"], {"mode": event["mode"]})
            if kind == "begin":
                row |= {"began": time, "state": "running"}
            elif kind == "end":
                outcome = event.get("state", "done" if event["code"] == 0 else "failed")
                row |= {"ended": time, "state": f"{outcome}, exit status {event['code']}", "step": event.get("step")}
            else:
                row |= {"ended": time, "state": f"{kind}: {event['reason']}"}
    result = []
    for job, row in rows.items():
        told = states.get(job)
        if told and not (told.startswith("ended") and "ended" in row):
            row["state"] = told
        result.append(JobRow(job, **row))
    return result


def states_of(events: Sequence[Event], jobs: Sequence[str]) -> dict[str, str]:
    """Return the states of the jobs that are still known to their schedulers; each scheduler is asked for its own jobs.

    Raises UserError for a scheduler that there is not.
    """
    of = job_schedulers(events)
    found: dict[str, str] = {}
    for name in scheduler_names(events):
        found |= scheduler.by_name(name).states([job for job in jobs if of.get(job) == name])
    return found


def scheduler_names(events: Sequence[Event]) -> list[str]:
    """Return the schedulers of all submissions, each once."""
    return list(dict.fromkeys(name for event in submissions(events) if (name := _scheduler(event)) is not None))


def job_schedulers(events: Sequence[Event]) -> dict[str, str]:
    """Return the scheduler of each job: that of its own submission."""
    by_name: dict[str | None, str | None] = {}
    newest: dict[str, str | None] = {}
    found: dict[str, str | None] = {}
    for event in events:
        if event["event"] == "submission":
            newest[event["mode"]] = by_name[event.get("submission")] = _scheduler(event)
        elif event["event"] == "submitted":  # of an earlier version, without the name of its submission
            name = by_name.get(event.get("submission"), newest.get(event["mode"]))
            found |= dict.fromkeys(event["ids"], name)
        elif event["event"] == "begin":  # maybe before its id was recorded
            found.setdefault(event["job"], by_name.get(event.get("submission"), newest.get(event["mode"])))
        elif event["event"] == "extended":
            found[event["next"]] = found.get(event["job"], newest.get(event["mode"]))
    return {job: name for job, name in found.items() if name is not None}


def _scheduler(submission: Event) -> str | None:
    """Return the scheduler of a submission; None where its record does not tell."""
    name: str | None = submission.get("scheduler")
    if name is None and submission.get("site") in sites.profiles():  # a record that does not name it
        return SiteSection.model_validate(submission["site"]).scheduler
    return name


def _number(row: Event, *names: str) -> Any:
    """Return the first of these that is a number; None where there is none."""
    return next((row[name] for name in names if isinstance(row.get(name), int | float)), None)


def _newest_checkpoint(save_loc: Path) -> tuple[int, str] | tuple[None, None]:
    """Return the step of the newest checkpoint and when it was written; a training may replace it by a newer one meanwhile."""
    for _ in range(_TRIES):
        if (step := newest_checkpoint(save_loc)) < 0:
            break
        with suppress(FileNotFoundError):
            written = (save_loc / "checkpoints" / f"step-{step}").stat().st_mtime
            return step, dt.datetime.fromtimestamp(written, dt.UTC).isoformat(timespec="seconds")
    return None, None
