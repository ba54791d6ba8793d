"""The protocol of batch systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from credit_like.errors import UserError
from credit_like.launch.local import Local
from credit_like.launch.pbs import Pbs
from credit_like.launch.slurm import Slurm
from credit_like.schema.launch import SiteSection


class Scheduler(Protocol):
    """Protocol of a batch system; all methods but `states` only produce or parse text."""

    prefix: str
    """Prefix of a directive, such as `#PBS`."""
    programs: tuple[str, ...]
    """Programs that must be on the PATH to submit."""
    job: str
    """Bash expression of the job's id."""
    hosts: str
    """Bash command that sets the array `hosts`, one name per node."""
    index: str
    """Bash expression of the job's position in its array."""
    extend: str
    """Bash command that submits `$script` to run after `$job` ends, successfully or not."""
    orphans: str
    """What happens to jobs that wait for a job that is cancelled before it has begun."""

    def array(self, count: int) -> list[str]:
        """Return the directives for an array of jobs 0 … count − 1."""
        ...

    def submit(self, script: Path, after: Sequence[str] = (), index: int | None = None) -> list[str]:
        """Return the command that submits a script to run after other jobs.

        `index` is the position in an array, for sites that do not support arrays.
        """
        ...

    def job_id(self, answer: str) -> str:
        """Return the job's id from the output of the submit command."""
        ...

    def cancel(self, ids: Sequence[str]) -> list[str]:
        """Return the command that removes jobs from the queue."""
        ...

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """Return those of the jobs to wait for that the scheduler does not know, although it would accept the dependency."""
        ...

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the state of each job that the scheduler still knows."""
        ...


def of(site: SiteSection) -> Scheduler:
    """Return the batch system of a site."""
    return by_name(site.scheduler)


def by_name(name: str) -> Scheduler:
    """Return the dialect of `pbs`, `slurm` or `local`. Raises UserError for another name, as a damaged history may hold."""
    dialects: dict[str, type[Scheduler]] = {"pbs": Pbs, "slurm": Slurm, "local": Local}
    if name not in dialects:
        raise UserError(
            f"expected the scheduler of the run's jobs to be one of {', '.join(dialects)}, got {name!r}; submit again"
        )
    return dialects[name]()
