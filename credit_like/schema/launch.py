"""The `site` and `pbs` sections: the batch system of a machine, and the resources an experiment requests."""

from __future__ import annotations

import datetime as dt
import string
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from credit_like.errors import UserError
from credit_like.registry import did_you_mean
from credit_like.schema import sites
from credit_like.schema.base import Duration, DurationText, Line, Section, Word, format_duration, parse_duration

Mode = Literal["preprocess", "train", "rollout", "evaluate"]
MODES: tuple[Mode, ...] = ("preprocess", "train", "rollout", "evaluate")

PLACEHOLDERS = (
    "job", "account", "queue", "walltime", "stop_before", "logs",
    "nodes", "processes", "gpus", "cpus", "memory_gb", "total_gpus", "total_cpus", "total_memory_gb",
)  # fmt: skip
"""Placeholders of a directive, besides the site's own fields. `gpus`, `cpus`, `memory_gb` and `processes` are
per node; `walltime` is HH:MM:SS, `stop_before` seconds, `logs` a folder."""

_MOST = 1_000_000
"""Nodes, processes or GB that no batch system has."""


def _walltime(value: Any) -> dt.timedelta:
    """Parse a walltime; a number is one of seconds, because YAML 1.1 reads an unquoted 12:00:00 as a number."""
    return parse_duration(f"{value}s" if type(value) is int else value)


Walltime = Annotated[
    dt.timedelta,
    BeforeValidator(_walltime, json_schema_input_type=Annotated[int, Field(ge=1)] | DurationText),
    PlainSerializer(format_duration, return_type=str),
]
ShellName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class NodeKind(Section):
    """A kind of node, and the directives that request nodes of it."""

    cpus: int = Field(default=1, ge=1, le=_MOST)
    """CPUs per node."""
    gpus: int | None = Field(default=0, ge=0, le=_MOST)
    """GPUs per node; null = unknown, any number is accepted."""
    memory_gb: int | None = Field(default=None, ge=1, le=_MOST)
    """Memory per node that a job may request, in GB."""
    whole: bool = False
    """Whether nodes are allocated as a whole: a job gets all CPUs and memory, however few GPUs it uses."""
    request: tuple[Line, ...] = ()
    """Directives that request nodes of this kind."""


class Queue(Section):
    """A queue (on Slurm a QOS): the kinds of node it serves, and its limits."""

    nodes: tuple[Line, ...] = Field(min_length=1)
    """Kinds of node that the queue serves, keys of the site's `nodes`."""
    max_walltime: Duration | None = None
    """Longest walltime. Default: no limit."""
    walltime_up_to: dict[Annotated[int, Field(ge=1, le=_MOST)], Duration] = Field(default={})
    """Number of nodes → longest walltime of jobs with at most that many nodes, if it is shorter than `max_walltime`."""
    min_nodes: int = Field(default=1, ge=1, le=_MOST)
    """Fewest nodes of a job."""
    max_nodes: int | None = Field(default=None, ge=1, le=_MOST)
    """Most nodes of a job. Default: no limit."""
    preemptible: bool = False
    """Whether jobs of the queue may be ended in favour of others; such a queue is used only if it is named."""

    def longest(self, nodes: int) -> dt.timedelta | None:
        """Return the longest walltime of a job of so many nodes; None = no limit."""
        bounds = sorted(bound for bound in self.walltime_up_to if nodes <= bound)
        return self.walltime_up_to[bounds[0]] if bounds else self.max_walltime


class SiteField(Section):
    """A site-specific setting of jobs, such as the file systems to mount; `pbs.fields` gives its value."""

    required: bool = False
    """Whether an experiment must give a value."""
    default: Word | None = None
    """Value if the experiment gives none."""
    example: Line = ""
    """Example for the error message if a required value is missing."""


class SiteSection(Section):
    """A batch system and its rules, one file per machine in `config/site/`; `site: NAME` reads that file."""

    shorthands = ({"type": "string"},)

    name: str = Field(default="local", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the machine."""
    scheduler: Literal["pbs", "slurm", "local"] = "local"
    """Batch system; `local` runs jobs on this machine, one after the other."""
    account_required: bool = False
    """Whether jobs must name an account."""
    launcher: Literal["fork", "mpiexec", "pbsdsh", "srun"] = "fork"
    """Program that starts one agent per node of a multi-node job; `fork` starts all of them on the current node."""
    launcher_options: tuple[Line, ...] = ()
    """Further arguments of the launcher."""
    directives: tuple[Line, ...] = ()
    """Directives for the scheduler, without `#PBS` or `#SBATCH`. A directive whose placeholder has no value is left
    out."""
    nodes: dict[Line, NodeKind] = Field(default_factory=lambda: {"this": NodeKind(gpus=None)}, min_length=1)
    """Name → kind of node."""
    queues: dict[Word, Queue] = Field(default_factory=dict)
    """Name → queue. Default: any queue is accepted, without limits."""
    fields: dict[ShellName, SiteField] = Field(default_factory=dict)
    """Name → site-specific setting; the names are placeholders of directives."""
    arrays: bool = True
    """Whether the scheduler supports job arrays; otherwise each job is submitted separately."""
    submit_from_jobs: bool = True
    """Whether a job may submit another, as `--chain auto` does."""
    stop_before: Duration = Field(default="5min")  # type: ignore[assignment]
    """Time before the walltime at which training saves and stops, at most a quarter of the walltime."""
    modules: tuple[Line, ...] = ()
    """Arguments of `module` in bash, one call each: `purge`, `load cuda/12.2`."""
    setup: tuple[Line, ...] = ()
    """Lines of bash that run on every node after the modules are loaded."""
    environment: dict[ShellName, Line] = Field(default_factory=dict)
    """Environment variables to set on every node."""

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
    """Return the names in braces of a directive.

    Raises UserError for unpaired braces and for a format (`{account!r:>9}`), which directives do not need.
    """
    try:
        parts = list(string.Formatter().parse(line))
    except ValueError as error:
        raise UserError(f"expected braces in pairs in directive {line!r}, got {error}") from None
    if any(form or conversion for _, _, form, conversion in parts):
        raise UserError(f"expected names alone in the braces of directive {line!r}, got a format, remove it")
    return [name for _, name, _, _ in parts if name is not None]


class Request(Section):
    """The resources of one mode, where they differ from the `pbs` section."""

    queue: Word | None = None
    """Queue, or QOS on Slurm. Default: the site's first queue with suitable nodes whose limits allow the job."""
    nodes: int | None = Field(default=None, ge=1, le=_MOST)
    """Number of nodes."""
    ngpus: int | None = Field(default=None, ge=0, le=_MOST)
    """GPUs per node; 0 = a CPU job."""
    processes: int | None = Field(default=None, ge=1, le=_MOST)
    """Processes per node of a CPU job; GPU jobs have one per GPU. For `preprocess`, the number of its workers (default 1);
    not allowed for `evaluate`, which runs in one process."""
    cpus: int | None = Field(default=None, ge=1, le=_MOST)
    """CPUs per node. Default: the share that comes with the GPUs."""
    memory_gb: int | None = Field(default=None, ge=1, le=_MOST)
    """Memory per node in GB. Default: the share that comes with the GPUs."""
    walltime: Walltime | None = None
    """Time limit of a job, such as 12:00:00 or 12h."""


class PbsSection(Request):
    """The resources this experiment requests, on any batch system; keys set here directly are those of training."""

    account: Word | None = None
    """Account to charge."""
    nodes: int = Field(default=1, ge=1, le=_MOST)
    """Number of nodes."""
    ngpus: int = Field(default=0, ge=0, le=_MOST)
    """GPUs per node; 0 = a CPU job."""
    processes: int | None = Field(default=None, ge=1, le=_MOST)
    """Processes per node of a CPU job; GPU jobs have one per GPU."""
    walltime: Walltime = Field(default="01:00:00")  # type: ignore[assignment]
    """Time limit of a job, such as 12:00:00 or 12h."""
    fields: dict[ShellName, Word] = Field(default_factory=dict)
    """Values of the site-specific settings (`storage: gdata/xy12+scratch/xy12`)."""
    setup: tuple[Line, ...] = ()
    """Lines of bash that run after those of the site, such as the activation of an environment."""
    environment: dict[ShellName, Line] = Field(default_factory=dict)
    """Environment variables to set on every node."""
    preprocess: Request = Field(default_factory=Request)
    """Resources of `--mode preprocess`, where they differ."""
    rollout: Request = Field(default_factory=Request)
    """Resources of `--mode rollout`, where they differ; `nodes` is the number of one-node jobs that share the initial
    times."""
    evaluate: Request = Field(default_factory=Request)
    """Resources of `--mode evaluate`, where they differ."""
