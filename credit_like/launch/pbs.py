"""The commands and directives of PBS Pro and OpenPBS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from credit_like.launch.scheduler import ask

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

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the state of each job, from `qstat -x -f`, which lists ended jobs for some days."""
        states = {}
        for part in re.split(r"^Job Id: ", ask(["qstat", "-x", "-f", *ids]) if ids else "", flags=re.MULTILINE)[1:]:
            job = part.split(maxsplit=1)[0]
            state = re.search(r"^\s+job_state = (\w)", part, flags=re.MULTILINE)
            code = re.search(r"^\s+Exit_status = (-?\d+)", part, flags=re.MULTILINE)
            word = _STATES.get(state[1], state[1]) if state else "unknown"
            states[job] = f"{word}, exit status {code[1]}" if code and word == "ended" else word
        return states
