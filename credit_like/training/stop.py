"""Conditions that stop a run before it is finished: signals, `stop_after` and the walltime of the batch system."""

from __future__ import annotations

import datetime as dt
import logging
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_ONE_REQUEST = 1.0
"""Seconds within which a further SIGINT belongs to the first: `timeout` sends it to a process and then to its group."""
_MARGIN = 60.0
"""Seconds before the walltime's end that are left for what follows the last save."""


class StopRequest:
    """Why this process should stop at the next step boundary, if it should. As a context manager it handles signals.

    A signal is only recorded: what is being written is finished first, and a second signal changes nothing, except that
    a second SIGINT (Ctrl-C) raises KeyboardInterrupt.
    Times are measured on the monotonic clock, so that a clock set forward or back does not end a run.
    """

    def __init__(self, stop_after: dt.timedelta | None = None, limit: float | None = None) -> None:
        self._start = time.monotonic()
        self._stop_after = stop_after
        self._limit = None if limit is None else self._start + limit
        self._signal: str | None = None
        self._interrupted = math.inf
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if now - self._interrupted > _ONE_REQUEST:
                raise KeyboardInterrupt
            self._interrupted = min(now, self._interrupted)
        self._signal = signal.Signals(number).name

    @property
    def interrupted(self) -> bool:
        """Return whether SIGINT has asked for a stop."""
        return self._interrupted < math.inf

    def reason(self, reserve: float = 0.0) -> str | None:
        """Return the reason for a stop now, if there is one; `reserve`: seconds that the next step and a save may take."""
        if self._signal:
            return f"signal {self._signal}"
        now = time.monotonic()
        if self._stop_after and now - self._start >= self._stop_after.total_seconds():
            return f"trainer.stop_after ({self._stop_after})"
        if self._limit is not None and now + reserve + _MARGIN >= self._limit:
            return "walltime of the batch job"
        return None


def seconds_left(
    environment: Mapping[str, str] | None = None,
    run: Callable[[list[str]], str] | None = None,
    now: Callable[[], float] = time.time,
) -> float | None:
    """Return the seconds until the batch system ends this job; None outside a job, or where they are not known.

    They come from SLURM_JOB_END_TIME, else from `squeue`; under PBS from the walltime requested and used in `qstat`,
    else from PBS_WALLTIME counted from now, because no other start of the job is known.
    """
    environment = os.environ if environment is None else environment
    run = run or _run
    if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return float(end) - now()
    if job := environment.get("SLURM_JOB_ID"):
        return _clock(run(["squeue", "-h", "-j", job, "-o", "%L"]))
    if job := environment.get("PBS_JOBID"):
        fields = dict(re.findall(r"^\s*([\w.]+) = (.*)$", run(["qstat", "-f", job]), re.MULTILINE))
        walltime = _clock(fields.get("Resource_List.walltime", ""))
        used = _clock(fields.get("resources_used.walltime", "")) or 0.0
        if walltime is None and (seconds := environment.get("PBS_WALLTIME", "")).isdigit():
            walltime = float(seconds)
        if walltime is None:
            log.warning("the walltime of PBS job %s is not known; set trainer.stop_after to stop before it", job)
            return None
        return walltime - used
    return None


def _run(command: list[str]) -> str:
    """Return the output of a command; empty if it does not exist, fails, or takes longer than 10 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s: %s", " ".join(command), error)
        return ""


def _clock(text: str) -> float | None:
    """Convert `[days-]hours:minutes:seconds` or `minutes:seconds` to seconds, anything else (UNLIMITED) to None."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
