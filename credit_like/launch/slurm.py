"""The commands and directives of Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from credit_like.launch.query import ask

_STATES = {
    "PENDING": "queued",
    "CONFIGURING": "running",  # its nodes start
    "RUNNING": "running",
    "RESIZING": "running",
    "STAGE_OUT": "ending",
    "SIGNALING": "ending",
    "COMPLETING": "ending",
    "REQUEUED": "queued",
    "REQUEUE_HOLD": "queued",
    "SPECIAL_EXIT": "queued",
    "SUSPENDED": "suspended",
    "STOPPED": "suspended",
}


class Slurm:
    """The `Scheduler` of Slurm."""

    prefix = "#SBATCH"
    programs: tuple[str, ...] = ("sbatch",)
    job = "${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:?}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    hosts = """mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")"""
    index = "${SLURM_ARRAY_TASK_ID:-${CREDIT_LIKE_INDEX:-0}}"
    extend = 'sbatch --parsable "--dependency=afterany:$job" "$script"'
    orphans = "Slurm lets the jobs that wait for a cancelled one begin at once, also beside the one that runs"

    def array(self, count: int) -> list[str]:
        return [f"--array=0-{count - 1}"] if count > 1 else []

    def submit(self, script: Path, after: Sequence[str] = (), index: int | None = None) -> list[str]:
        command = ["sbatch", "--parsable"]
        if after:
            command.append(f"--dependency=afterany:{':'.join(after)}")
        if index is not None:
            command.append(f"--export=ALL,CREDIT_LIKE_INDEX={index}")
        return [*command, str(script)]

    def job_id(self, answer: str) -> str:
        """Return the job's id from `id` or `id;cluster`, which `--parsable` prints."""
        return answer.split()[-1].split(";")[0]

    def cancel(self, ids: Sequence[str]) -> list[str]:
        return ["scancel", *ids]

    def unknown(self, ids: Sequence[str]) -> list[str]:
        return []

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the state of each job, from `squeue` for active jobs and `sacct` (where available) for ended ones.

        The tasks of an array have one state: `running` if any of them is running.
        """
        if not ids:
            return {}
        ended = ask(
            ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", "--jobs", ",".join(ids)]
        )
        alive = ask(["squeue", "--noheader", "--states=all", "--format=%F|%T", "--jobs", ",".join(ids)])
        found: dict[str, list[str]] = {}
        for line in (ended or "").splitlines() + alive.splitlines():
            job, _, state = line.partition("|")
            found.setdefault(job.split("_")[0], []).append(state.split()[0])
        return {job: _together(states) for job, states in found.items()}


def _together(states: list[str]) -> str:
    words = [_STATES.get(state, f"ended, {state.lower()}") for state in states]
    for word in ("running", "ending", "suspended", "queued"):
        if word in words:
            return word
    return words[-1]
