"""The commands and directives of PBS Pro and OpenPBS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from credit_like.launch.query import ask

_STATES = {
    "Q": "queued", "H": "waiting", "W": "waiting", "R": "running", "B": "running", "E": "ending", "F": "ended",
    "X": "ended", "S": "suspended", "T": "moving", "M": "moved",
}  # fmt: skip


class Pbs:
    """The `Scheduler` of PBS Pro and OpenPBS."""

    prefix = "#PBS"
    programs: tuple[str, ...] = ("qsub",)
    job = "${PBS_JOBID:?}"
    hosts = """mapfile -t hosts < <(awk '!seen[$0]++' "${PBS_NODEFILE:?}")"""
    index = "${PBS_ARRAY_INDEX:-${CREDIT_LIKE_INDEX:-0}}"
    extend = 'qsub -W "depend=afterany:$job" "$script"'
    orphans = "PBS deletes the jobs that wait for one that is deleted before it has begun"

    def array(self, count: int) -> list[str]:
        """Return the directive for an array; none for a single job, because PBS refuses arrays of one."""
        return [f"-J 0-{count - 1}"] if count > 1 else []

    def submit(self, script: Path, after: Sequence[str] = (), index: int | None = None) -> list[str]:
        command = ["qsub"]
        if after:
            command += ["-W", f"depend=afterany:{':'.join(after)}"]
        if index is not None:
            command += ["-v", f"CREDIT_LIKE_INDEX={index}"]
        return [*command, str(script)]

    def job_id(self, answer: str) -> str:
        return answer.split()[-1]

    def cancel(self, ids: Sequence[str]) -> list[str]:
        return ["qdel", *ids]

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the unknown jobs: `qsub` accepts a dependency on an unknown job, and the server then drops the new one."""
        numbers = {job.split(".")[0] for job in self.states(ids)}
        return [job for job in ids if job.split(".")[0] not in numbers]

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        """Return states from `qstat -f`, and for jobs that it does not list from `qstat -x -f`.

        The latter lists ended jobs for some days, but prints nothing at all if the server keeps no history.
        """
        if not ids:
            return {}
        states = _read(ask(["qstat", "-f", *ids]))
        unknown = [job for job in ids if job not in states]
        return (_read(ask(["qstat", "-x", "-f", *unknown])) if unknown else {}) | states


def _read(answer: str) -> dict[str, str]:
    """Parse the state of each job from the output of `qstat -f`, with the reason of one that waits."""
    states = {}
    whole_lines = answer.replace("\n\t", "")
    for part in re.split(r"^Job Id: ", whole_lines, flags=re.MULTILINE)[1:]:
        found: dict[str, str] = dict(
            re.findall(r"^\s+(job_state|Exit_status|comment) = (.*)$", part, flags=re.MULTILINE)
        )
        state = found.get("job_state", "unknown")
        word = _STATES.get(state, state)
        if word == "ended" and "Exit_status" in found:
            word += f", exit status {found['Exit_status']}"
        elif word in ("queued", "waiting") and "comment" in found:
            word += f": {found['comment']}"
        states[part.split(maxsplit=1)[0]] = word
    return states
