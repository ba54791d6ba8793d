"""The job history, and the decision at the start of a job whether the chain continues.

Job scripts run `python -m credit_like.launch.chain begin SAVE_LOC MODE JOB SUBMISSION`. The history is
`save_loc/jobs/history.jsonl` with one event per line: `submission` (with its name) before jobs are queued (the first may
begin at once), `submitted` (with its id) after each, `withdrawn` if the scheduler refused one of them, then `begin`,
`extended` (with the next job) and `end`. `credit-like cancel` adds a `cancellation`, which stops every job that was
submitted before, and `cancelled` for each job. The trainer's `status.json` shows whether work is left, and the newest
checkpoint shows whether the previous job made progress.
"""

from __future__ import annotations

import datetime as dt
import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

Event = dict[str, Any]
FINISHED = 3
"""What `begin` exits with where nothing is left to do."""
_MOST_BYTES = 256 * 2**20
_TRIES = 10
"""Attempts to open the history, each of which somebody may have removed again."""
_PATIENCE = 10.0
"""Seconds to wait for another process that writes to the history."""
_CHECKPOINT = re.compile(r"step-(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Decision:
    """Whether a job has work to do and, if not, why."""

    verdict: Literal["run", "finished", "stop"]
    reason: str = ""


_CANCELLED = Decision("stop", "the run's jobs were cancelled, submit again to go on")
_WITHDRAWN = Decision("stop", "this submission was not completed, submit again")


def history_file(save_loc: Path) -> Path:
    """Return the path of the job history."""
    return save_loc / "jobs" / "history.jsonl"


def history(save_loc: Path) -> list[Event]:
    """Return all events of a run's jobs, oldest first; malformed lines, as a full disk leaves them, are skipped."""
    return _events(_regular_bytes(history_file(save_loc)) or b"")


def _events(content: bytes) -> list[Event]:
    values = map(_parse, content.splitlines())
    return [value for value in values if isinstance(value, dict) and _is_event(value)]


def _is_event(value: Event) -> bool:
    """Return whether an event has the fields that `record` writes for its kind."""
    kind = value.get("event")
    names = {
        "submission": ("mode",), "submitted": ("mode",), "extended": ("mode", "job", "next"), "cancellation": (),
        "withdrawn": ("mode", "submission"),
        "begin": ("mode", "job"), "end": ("mode", "job"),
    }.get(str(kind), ("mode", "job", "reason"))  # fmt: skip
    numbers = {"end": ("code",), "begin": ("checkpoint",) if value.get("mode") == "train" else ()}.get(str(kind), ())
    scheduler = value.get("scheduler")
    texts = (value.get("submission"), scheduler)
    lists = [value.get("ids", None if kind == "submitted" else []), value.get("after", [])]
    return (
        all(isinstance(value.get(name), str) for name in ("event", "time", *names))
        and all(isinstance(value.get(number), int) for number in numbers)
        and all(isinstance(text, str | None) for text in texts)
        and isinstance(value.get("site"), str | None)
        and isinstance(value.get("written"), int | None)
        and all(isinstance(jobs, list) and all(isinstance(job, str) for job in jobs) for jobs in lists)
    )


def _parse(text: bytes) -> object:
    """Parse a JSON value; None where the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def record(save_loc: Path, event: str, **details: Any) -> None:
    """Append an event to the history, in one write, so that the jobs of an array may do so concurrently."""
    with _locked(history_file(save_loc)) as file:
        _append(file, event, details)


def withdraw(save_loc: Path, mode: str, submission: str, begins_history: bool) -> None:
    """Record that a submission is withdrawn, or remove a history that began with it and has nothing of anybody else.

    A job of it may have begun, and others may write to the history at any time.
    """
    with _locked(history_file(save_loc)) as file:
        file.seek(0)
        events = _events(file.read())
        if begins_history and all(
            event["event"] in ("submission", "submitted") and event.get("submission") == submission for event in events
        ):
            history_file(save_loc).unlink()
        else:
            _append(file, "withdrawn", {"mode": mode, "submission": submission})


def _append(file: BinaryIO, event: str, details: Mapping[str, Any]) -> None:
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    line = json.dumps({"event": event, "time": now, **details})
    # A line whose end was lost, on a full disk or with its node, must not take this one with it.
    end = file.seek(0, os.SEEK_END)
    torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
    file.write(b"\n" * torn + line.encode() + b"\n")


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open the history to read and append, alone among those that do so; it is made anew where somebody has just removed it.

    Nobody waits where files cannot be locked, or for long, as for a process that is stopped.
    """
    for left in reversed(range(_TRIES)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
        except FileNotFoundError:  # the folder has been removed with it
            if not left:
                raise
            continue
        with file:
            _lock(file)
            if not left or _is_at(file, path):
                yield file
                return


def _lock(file: BinaryIO) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES) and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
        return


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether an open file is the one at the path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def submissions(events: Sequence[Event]) -> list[Event]:
    """Return the submissions that were not withdrawn, oldest first."""
    withdrawn = [event["submission"] for event in events if event["event"] == "withdrawn"]
    return [event for event in events if event["event"] == "submission" and event.get("submission") not in withdrawn]


def queued_ids(events: Sequence[Event]) -> list[str]:
    """Return the ids of all jobs that were submitted, in that order."""
    return [job for event in events for job in (*event.get("ids", ()), event.get("next")) if job]


def run_status(save_loc: Path) -> Event:
    """Return the trainer's `status.json`: empty where there is none yet, `unknown` where it is malformed."""
    path = save_loc / "status.json"
    content = _regular_bytes(path)
    if content is None:
        return {}
    status = _parse(content)
    if not isinstance(status, dict) or not isinstance(status.get("state"), str):
        return {"state": "unknown", "reason": f"{path} is damaged"}
    return status


def status_written(save_loc: Path) -> int | None:
    """Return when `status.json` was written, in nanoseconds; None where there is none.

    It is compared with what it was at another time alone, so the clock does not matter.
    """
    try:
        return (save_loc / "status.json").stat().st_mtime_ns
    except OSError:
        return None


def best_checkpoint(save_loc: Path) -> tuple[int, float] | None:
    """Return step and validation loss of the best checkpoint of the newest phase; None without a validation."""
    found = []
    for step in _checkpoints(save_loc):
        try:
            manifest = json.loads(_regular_bytes(save_loc / "checkpoints" / f"step-{step}" / "manifest.json") or b"")
            score, phase = manifest["score"], int(manifest["meta"].get("phase", 0))
            if score is not None:
                found.append((-phase, float(score), -int(manifest["step"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # being removed, or damaged: training reports it
    best = min(found, default=None)
    return None if best is None else (-best[2], best[1])


def _regular_bytes(path: Path) -> bytes | None:
    """Return the content of a file, or None where there is none; another process may remove it at any time.

    There is nothing in a pipe, which would wait for a writer, or in a file of far more than such files have.
    """
    try:
        found = path.stat()
        return path.read_bytes() if stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES else b""
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def newest_checkpoint(save_loc: Path) -> int:
    """Return the step of the newest checkpoint, or −1 if there is none."""
    return max(_checkpoints(save_loc), default=-1)


def _checkpoints(save_loc: Path) -> list[int]:
    """Return the steps of the checkpoints; none where there is no folder of them, or no longer."""
    names: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(save_loc / "checkpoints")
    return [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]


def epochs_done(save_loc: Path) -> int | None:
    """Return the number of epochs that the newest checkpoint has completed; None if no checkpoint records it."""
    try:
        newest = save_loc / "checkpoints" / f"step-{newest_checkpoint(save_loc)}"
        manifest = json.loads(_regular_bytes(newest / "manifest.json") or b"")
        return int(manifest["meta"]["progress"]["epoch"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # damaged: training reports it


def decide(
    status: Event,
    checkpoint: int,
    events: Sequence[Event],
    job: str,
    submission: str | None = None,
    written: int | None = None,
) -> Decision:
    """Decide whether the training job `job` of a submission (by default the newest) has work to do.

    The first job of a submission runs: a user who submits again has dealt with earlier failures, and may ask for more
    epochs than a finished run has. A later job stops if the previous one failed or ended without a new checkpoint, because
    it would fail likewise; so does a first job after one of another submission that began or ended in the meantime. A job
    that the scheduler restarts continues. No job continues after a cancellation. A status that was `written` before a job
    began is none of that job's.
    """
    before, since = _at_submission(events, "train", submission)
    if ended := _ended(events, "train", submission):
        return ended
    own = [event for event in _begun(since) if submission in (None, event.get("submission"))]
    state = status.get("state")
    if own and state == "finished" and _has_changed(own[0], written):
        return Decision("finished", f"finished at step {status.get('step')}")
    ends = {event["job"]: event["code"] for event in since if event["event"] == "end" and event["mode"] == "train"}
    cancelled = [event["job"] for event in events if event["event"] == "cancelled"]
    others = [event for event in _begun(before) if event["job"] in ends] + _begun(since)
    last = next(reversed(own or [event for event in others if event["job"] not in cancelled]), None)
    if last is None or last["job"] == job:
        return Decision("run")
    if _has_changed(last, written) and state == "finished":  # what another submission asked for
        return Decision("run")
    if _has_changed(last, written) and state == "failed":
        return Decision("stop", f"job {last['job']} failed at step {status.get('step')}: {status.get('reason')}")
    if checkpoint <= last["checkpoint"]:
        how = f"with exit status {ends[last['job']]}" if last["job"] in ends else "without an exit status"
        return Decision("stop", f"job {last['job']} ended {how} and without a new checkpoint; see its log")
    return Decision("run")


def _has_changed(begun: Event, written: int | None) -> bool:
    """Return whether `status.json` was written since a job began, if the job's event records its state at that time."""
    return "written" not in begun or begun["written"] != written


def _begun(events: Sequence[Event]) -> list[Event]:
    """Return the events with which training jobs began."""
    return [event for event in events if event["event"] == "begin" and event["mode"] == "train"]


def is_cancelled(events: Sequence[Event], mode: str, submission: str | None = None) -> bool:
    """Return whether the jobs were cancelled after this submission of a mode, by default the newest, or it was withdrawn."""
    return _ended(events, mode, submission) is not None


def _ended(events: Sequence[Event], mode: str, submission: str | None) -> Decision | None:
    """Return why no job of this submission of a mode may begin any more; None where one may."""
    if any(event["event"] == "withdrawn" and event["submission"] == submission for event in events):
        return _WITHDRAWN
    later = _at_submission(events, mode, submission)[1]
    return _CANCELLED if any(event["event"] == "cancellation" for event in later) else None


def _at_submission(
    events: Sequence[Event], mode: str, submission: str | None
) -> tuple[Sequence[Event], Sequence[Event]]:
    """Return the events before this submission of a mode, by default the newest, and those from it on.

    Where there is none, all events count as later ones.
    """
    known = submissions(events)
    found = [
        i
        for i, event in enumerate(events)
        if event in known and event["mode"] == mode and submission in (None, event.get("submission"))
    ]
    at = max(found, default=0)
    return events[:at], events[at:]


def begin(save_loc: Path, mode: str, job: str, submission: str | None = None) -> int:
    """Record that a job begins; return 0 to run it, FINISHED if nothing is left to do, 1 to stop the chain."""
    named = {} if submission is None else {"submission": submission}
    facts: dict[str, Any] = {}
    if mode == "train":
        facts = {"checkpoint": newest_checkpoint(save_loc), "written": status_written(save_loc)}
        events = history(save_loc)
        decision = decide(run_status(save_loc), facts["checkpoint"], events, job, submission, facts["written"])
    else:
        decision = _ended(history(save_loc), mode, submission) or Decision("run")
    if decision.verdict == "run":
        record(save_loc, "begin", mode=mode, job=job, **facts, **named)
        return 0
    record(
        save_loc,
        "not needed" if decision.verdict == "finished" else "stopped",
        mode=mode,
        job=job,
        reason=decision.reason,
    )
    stops = "the chain stops" if mode == "train" else "the job ends"
    _say(f"job {job}: {decision.reason}; {'nothing left to do' if decision.verdict == 'finished' else stops}")
    return FINISHED if decision.verdict == "finished" else 1


def extend(save_loc: Path, mode: str, job: str, command: Sequence[str]) -> int:
    """Submit the next job of the chain, once per job even if the scheduler restarts it; return the exit status.

    No job is submitted if the chain was cancelled since this job was submitted.
    """
    events = history(save_loc)
    begun = [event for event in events if event["event"] == "begin" and event["job"] == job]
    submission = begun[-1].get("submission") if begun else None
    if is_cancelled(events, mode, submission) or any(
        event["event"] == "extended" and event["job"] == job for event in events
    ):
        return 0
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        _say(f"job {job}: {command[0]} refused the next job, submit again after this one: {done.stderr.strip()}")
        return 1
    record(save_loc, "extended", mode=mode, job=job, next=done.stdout.split()[-1].split(";")[0])
    return 0


def end(save_loc: Path, mode: str, job: str, code: int) -> int:
    """Record that a job ends; return its exit status, 0 if the run is finished or can be continued.

    A job that has not written `status.json` has not trained, whatever the one before it has left there.
    """
    if mode != "train":
        record(save_loc, "end", mode=mode, job=job, code=code)
        return code
    begun = [event for event in _begun(history(save_loc)) if event["job"] == job]
    changed = not begun or _has_changed(begun[-1], status_written(save_loc))
    status = run_status(save_loc) if changed else {}
    state = status.get("state", "not begun")
    record(save_loc, "end", mode=mode, job=job, code=code, state=state, step=status.get("step"))
    words = {"finished": "finished", "continue": "to be continued", "failed": f"failed: {status.get('reason')}"}
    _say(f"job {job}: {words.get(state, f'ended while {state}, exit status {code}')} at step {status.get('step')}")
    return 0 if state in ("finished", "continue") else code or 1


def main(arguments: Sequence[str]) -> int:
    """Run one action of the command line and return its exit status.

    The actions are `begin SAVE_LOC MODE JOB [SUBMISSION]`, `extend SAVE_LOC MODE JOB -- COMMAND…` and `end SAVE_LOC MODE JOB CODE`.
    """
    action, folder, mode, job, *rest = arguments
    if action == "begin":
        return begin(Path(folder), mode, job, *rest)
    if action == "extend":
        return extend(Path(folder), mode, job, rest[1:])
    assert action == "end"
    return end(Path(folder), mode, job, int(rest[0]))


def _say(message: str) -> None:
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
