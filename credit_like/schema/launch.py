"""The `site` and `pbs` sections: what a machine is like, and what this experiment asks of it."""

from __future__ import annotations

import string
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from credit_like.errors import UserError
from credit_like.registry import did_you_mean
from credit_like.schema import sites
from credit_like.schema.base import Duration, Line, Section, Word

Mode = Literal["preprocess", "train", "rollout", "evaluate"]
MODES: tuple[Mode, ...] = ("preprocess", "train", "rollout", "evaluate")

PLACEHOLDERS = (
    "job", "account", "queue", "walltime", "stop_before", "logs",
    "nodes", "processes", "gpus", "cpus", "memory_gb", "total_gpus", "total_cpus", "total_memory_gb",
)  # fmt: skip
"""What a directive may hold in braces, besides the site's own fields. `gpus`, `cpus`, `memory_gb` and `processes` are
per node; `walltime` is HH:MM:SS, `stop_before` seconds, `logs` a folder."""

ShellName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class NodeKind(Section):
    """One kind of node, and the directives that ask for nodes of it."""

    cpus: int = Field(default=1, ge=1)
    gpus: int | None = Field(default=0, ge=0)
    """GPUs of a node; nothing = not known, any number is accepted."""
    memory_gb: int | None = Field(default=None, ge=1)
    """Memory that a job may ask for."""
    whole: bool = False
    """Allocated as a whole: a job gets all CPUs and memory, however few GPUs it uses."""
    request: tuple[Line, ...] = ()


class Queue(Section):
    """A queue (a QOS on Slurm): which kinds of node it gives, and its limits."""

    nodes: tuple[Line, ...] = Field(min_length=1)
    max_walltime: Duration | None = None
    min_nodes: int = Field(default=1, ge=1)
    max_nodes: int | None = Field(default=None, ge=1)


class SiteField(Section):
    """Something only this machine asks for, such as its file systems; `pbs.fields` gives the value."""

    required: bool = False
    default: Word | None = None
    example: Line = ""


class SiteSection(Section):
    """A batch system and its rules; one file per machine in `config/site/`, `site: NAME` reads it."""

    shorthands = ({"type": "string"},)

    name: str = Field(default="local", pattern=r"^[A-Za-z0-9._-]+$")
    scheduler: Literal["pbs", "slurm", "local"] = "local"
    account_required: bool = False
    launcher: Literal["fork", "mpiexec", "pbsdsh", "srun"] = "fork"
    """What starts one agent on each node of a job of several; `fork` starts all of them here."""
    launcher_options: tuple[Line, ...] = ()
    directives: tuple[Line, ...] = ()
    """Lines for the scheduler, without `#PBS` or `#SBATCH`. One that holds a value nobody gave is left out."""
    nodes: dict[Line, NodeKind] = Field(default_factory=lambda: {"this": NodeKind(gpus=None)}, min_length=1)
    queues: dict[Word, Queue] = Field(default_factory=dict)
    """Nothing = any queue, without limits."""
    fields: dict[ShellName, SiteField] = Field(default_factory=dict)
    arrays: bool = True
    """Whether the scheduler takes arrays of jobs; else each is submitted alone."""
    submit_from_jobs: bool = True
    """Whether a job may submit another, as `--chain auto` does."""
    stop_before: Duration = Field(default="5min")  # type: ignore[assignment]
    """Training is told to stop and save this long before its walltime; a quarter of a walltime that is short."""
    modules: tuple[Line, ...] = ()
    """Arguments of `module` as bash reads them, one call each: `purge`, `load cuda/12.2`."""
    setup: tuple[Line, ...] = ()
    """Lines of bash that run on every node before the work, after the modules."""
    environment: dict[ShellName, Line] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return sites.read(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> SiteSection:
        for name, queue in self.queues.items():
            for kind in queue.nodes:
                if kind not in self.nodes:
                    known = list(self.nodes)
                    raise UserError(
                        f"expected kinds of node of {self.name} ({', '.join(known)}) in queue {name}, got {kind!r}"
                        f"{did_you_mean(kind, known)}"
                    )
        known = [*PLACEHOLDERS, *self.fields]
        for line in (*self.directives, *(line for kind in self.nodes.values() for line in kind.request)):
            for placeholder in placeholders(line):
                if placeholder not in known:
                    raise UserError(
                        f"expected {{{'}, {'.join(known)}}} in directive {line!r}, got {{{placeholder}}}"
                        f"{did_you_mean(placeholder, known)}"
                    )
        return self


def placeholders(line: str) -> list[str]:
    """The names in braces of a directive.

    Raises UserError for braces that do not pair, and for a format (`{account!r:>9}`), which a directive does not need.
    """
    try:
        parts = list(string.Formatter().parse(line))
    except ValueError as error:
        raise UserError(f"expected braces in pairs in directive {line!r}, got {error}") from None
    if any(form or conversion for _, _, form, conversion in parts):
        raise UserError(f"expected names alone in the braces of directive {line!r}, got a format, remove it")
    return [name for _, name, _, _ in parts if name is not None]


class Request(Section):
    """What one mode asks for, where it differs from the `pbs` section."""

    queue: Word | None = None
    nodes: int | None = Field(default=None, ge=1)
    ngpus: int | None = Field(default=None, ge=0)
    processes: int | None = Field(default=None, ge=1)
    cpus: int | None = Field(default=None, ge=1)
    memory_gb: int | None = Field(default=None, ge=1)
    walltime: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _walltime_in_seconds(cls, value: Any) -> Any:
        """A plain number is seconds; older YAML readers make one of an unquoted 12:00:00."""
        if isinstance(value, dict) and type(value.get("walltime")) is int:
            return {**value, "walltime": f"{value['walltime']}s"}
        return value


class PbsSection(Request):
    """What this experiment asks of its site, PBS or not. What stands here directly is for training."""

    account: Word | None = None
    nodes: int = Field(default=1, ge=1)
    ngpus: int = Field(default=0, ge=0)
    """GPUs per node; 0 = a CPU run."""
    processes: int | None = Field(default=None, ge=1)
    """Processes per node of a CPU run; one per GPU otherwise."""
    walltime: Duration = Field(default="01:00:00")  # type: ignore[assignment]
    fields: dict[ShellName, Word] = Field(default_factory=dict)
    """Values of the site's own fields (`storage: gdata/xy12+scratch/xy12`)."""
    setup: tuple[Line, ...] = ()
    """Lines of bash after the site's own, such as the activation of an environment."""
    environment: dict[ShellName, Line] = Field(default_factory=dict)
    preprocess: Request = Field(default_factory=Request)
    rollout: Request = Field(default_factory=Request)
    """`nodes` is the number of jobs of one node that share the initial times."""
    evaluate: Request = Field(default_factory=Request)
