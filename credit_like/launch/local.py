"""The local machine as a batch system: it runs one job after the other, each with a walltime."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_GRACE = 10.0
"""Seconds between SIGTERM at the walltime and SIGKILL (the default of PBS)."""
_POLL = 0.2


class Local:
    """The `Scheduler` of this machine."""

    prefix = "#LOCAL"
    programs: tuple[str, ...] = ("bash", "pkill")
    job = "${CREDIT_LIKE_JOB:?}"
    hosts = "hosts=(127.0.0.1)"
    index = "${CREDIT_LIKE_INDEX:-0}"
    extend = ""
    orphans = ""

    def array(self, count: int) -> list[str]:
        return []

    def submit(self, script: Path, after: Sequence[str] = (), index: int | None = None) -> list[str]:
        return ["bash", str(script)]

    def job_id(self, answer: str) -> str:
        return answer.strip()

    def cancel(self, ids: Sequence[str]) -> list[str]:
        return ["kill", *ids]

    def unknown(self, ids: Sequence[str]) -> list[str]:
        return []

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        return {}


def run_job(script: Path, job: str, log: Path, walltime: float, index: int = 0) -> int:
    """Run a script as a job and return its exit status.

    Send SIGTERM at the walltime (seconds), and SIGKILL ten seconds later to the processes that remain.
    Ctrl-C ends the job in the same way and is raised again.
    """
    env = {**os.environ, "CREDIT_LIKE_JOB": job, "CREDIT_LIKE_INDEX": str(index)}
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    deadline = time.monotonic() + walltime
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL)
    finally:
        _end(process)
    return process.returncode


def run_all(
    count: int | None, run: Callable[[int], int], is_over: Callable[[], bool], report: Callable[[int, int], None]
) -> list[int]:
    """Run jobs 0, 1, … until `count` of them have run or `is_over()`; a failed job does not stop the series."""
    codes: list[int] = []
    while (count is None or len(codes) < count) and not (codes and is_over()):
        code = run(len(codes))
        report(len(codes), code)
        codes.append(code)
    return codes


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process and its descendants, each by its id, because torchrun's workers have their own sessions."""
    if process.poll() is not None:
        return
    _signal([process.pid, *descendants(process.pid)], signal.SIGTERM)
    limit = time.monotonic() + _GRACE
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(_POLL)
    if process.poll() is None:
        _signal([process.pid, *descendants(process.pid)], signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, from the process table."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
