"""What a batch system must be able to do, whatever its dialect."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from credit_like.schema.launch import SiteSection


class Scheduler(Protocol):
    """The dialect of one batch system: text only, but for `states`."""

    prefix: str
    """What starts a directive."""
    programs: tuple[str, ...]
    """What must be on the PATH to submit."""
    job: str
    """Bash for the job's id."""
    hosts: str
    """Bash that sets the array `hosts`, one name per node."""
    index: str
    """Bash for the job's position in its array."""
    extend: str
    """Bash: the command that submits `$script` to run after `$job`, however that ends."""
    orphans: str
    """What becomes of jobs that wait for one that is cancelled before it has begun."""

    def array(self, count: int) -> list[str]:
        """Directives for an array of jobs 0 … count − 1."""
        ...

    def submit(self, script: Path, after: Sequence[str] = (), index: int | None = None) -> list[str]:
        """The command that submits a script to run after other jobs; `index` where the site has no arrays."""
        ...

    def job_id(self, answer: str) -> str:
        """The id in what the command printed."""
        ...

    def cancel(self, ids: Sequence[str]) -> list[str]:
        """The command that takes jobs out of the queue."""
        ...

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """Those of the jobs to wait for that the scheduler would not refuse, although it does not know them."""
        ...

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        """What the scheduler says of each job it still knows."""
        ...


def of(site: SiteSection) -> Scheduler:
    """The dialect of a site."""
    return by_name(site.scheduler)


def by_name(name: str) -> Scheduler:
    """The dialect of `pbs`, `slurm` or `local`."""
    from credit_like.launch.local import Local
    from credit_like.launch.pbs import Pbs
    from credit_like.launch.slurm import Slurm

    dialects: dict[str, type[Scheduler]] = {"pbs": Pbs, "slurm": Slurm, "local": Local}
    return dialects[name]()


def ask(command: Sequence[str]) -> str:
    """What a query command prints; nothing where it is missing or refuses."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
