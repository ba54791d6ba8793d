"""Plan the jobs of an experiment and mode on a machine. Nothing is written or submitted here."""

from __future__ import annotations

import calendar
import datetime as dt
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from credit_like import registry
from credit_like.errors import UserError
from credit_like.launch.resources import Resources, clock, one_node, resources
from credit_like.layout import Layout
from credit_like.naming import counted
from credit_like.schema.base import format_duration
from credit_like.schema.checks import layout
from credit_like.schema.experiment import Experiment
from credit_like.schema.launch import Mode, PbsSection, SiteSection
from credit_like.schema.phases import hungriest

Chain = int | Literal["auto"]
_DAYS_OF_400_YEARS = 146_097
_AWKWARD = {
    "pbs": (re.compile(r"[\s,:'\"\\]"), "blanks, commas, colons, quotes and backslashes"),
    "slurm": (re.compile(r"[\s,%'\"\\]"), "blanks, commas, per cent signs, quotes and backslashes"),
}
"""By scheduler: what paths of logs cannot hold. `host:path` is a place elsewhere on PBS, `%j` the job's id on Slurm."""


@dataclass(frozen=True)
class Plan:
    """The jobs of one submission: identical, and run one after the other (`chain`) or concurrently (`array`)."""

    name: str
    mode: Mode
    site: str
    resources: Resources
    save_loc: Path
    workdir: Path
    """Working directory of the jobs; paths in the experiment are relative to it."""
    python: str
    chain: Chain = 1
    number: int = 1
    """Position among the run's submissions of this mode, from 1."""
    array: int = 1
    shares: int = 1
    """Number of parts of a rollout's initial times, or of their members: one per group of processes, over all jobs."""
    group: int = 1
    """Number of processes per initial time: tensor × domain."""
    layout: Layout | None = None
    samples_per_step: int | None = None
    initial_times: int | None = None
    most_times: int | None = None
    """Number of initial times of the largest share."""
    setup: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    """Ids of the jobs to wait for."""
    notes: tuple[str, ...] = ()
    scripts: dict[str, str] = field(default_factory=dict)
    ids: tuple[str, ...] = ()
    """Ids of the submitted jobs; empty after a dry run."""

    @property
    def job(self) -> str:
        """Job name that the scheduler shows; it starts with a letter, as PBS requires."""
        return f"{self.mode}-{self.name}"

    @property
    def folder(self) -> Path:
        """Folder of scripts, submitted experiments, logs and the job history."""
        return self.save_loc / "jobs"

    @property
    def submission(self) -> str:
        """Name of the submission in the job history and of its files, which queued jobs read: no other has it."""
        return f"{self.mode}-{self.number}"

    @property
    def script(self) -> Path:
        return self.folder / f"{self.submission}.sh"

    @property
    def experiment(self) -> Path:
        """Copy of the experiment with its overrides, so that later edits of the original do not affect queued jobs."""
        return self.folder / f"{self.submission}.yml"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.script, self.experiment, self.folder / "history.jsonl", self.logs)

    @property
    def jobs(self) -> str:
        """Number of jobs, in words."""
        if self.chain == "auto":
            return "as many as it takes, each submits the next (afterany)"
        if self.chain > 1:
            return f"{self.chain} in a chain (afterany)"
        if self.mode != "rollout":
            return "1"
        members = self.initial_times is not None and self.shares > self.initial_times
        shares = counted(self.shares, "share") + " of the initial times" + " and members" * members
        each = f", {counted(self.group, 'process')} each" if self.group > 1 else ""
        return f"{self.array} side by side, {shares}{each}" if self.array > 1 else f"1, {shares}{each}"

    @property
    def each(self) -> str:
        """Processors per node, in words."""
        r = self.resources
        return counted(r.gpus, "GPU") if r.gpus else counted(r.processes, "CPU process")

    def describe(self) -> list[tuple[str, str]]:
        """Return a description of the submission as rows of a table."""
        r = self.resources
        rows = [
            ("experiment", f"{self.name}, {self.mode} on {self.site}"),
            ("jobs", self.jobs),
            ("nodes", f"{r.nodes} {r.kind} × {self.each} = {counted(r.world, 'process')}"),
            ("per node", f"{r.cpus} CPUs" + (f", {r.memory_gb} GB" if r.memory_gb else "")),
            ("queue", ", ".join(part for part in (r.queue or "default", r.account and f"account {r.account}") if part)),
            ("walltime", clock(r.walltime)),
        ]
        if self.mode == "train":
            assert self.layout is not None
            rows[-1] = ("walltime", f"{clock(r.walltime)}, told to stop {format_duration(r.stop_before)} before")
            rows += [
                ("layout", str(self.layout)),
                ("samples per step", f"{self.samples_per_step}, {self.layout.accumulation} micro-batches each"),
            ]
        if self.initial_times is not None:
            rows.append(("initial times", f"{self.initial_times}, at most {self.most_times} a share"))
        if self.after:
            rows.append(("after", ", ".join(self.after)))
        rows.append(("files", "\n".join(map(str, self.files))))
        if self.ids:
            rows.append(("submitted", ", ".join(self.ids)))
        return rows + [("note", note) for note in self.notes]


def plan_jobs(
    experiment: Experiment,
    mode: Mode,
    *,
    site: SiteSection | None = None,
    chain: Chain = 1,
    after: tuple[str, ...] = (),
    python: str = sys.executable,
    workdir: Path | None = None,
) -> Plan:
    """Plan the jobs of a mode.

    Raises UserError where the request does not fit the layout or the site.
    """
    site = site or experiment.site or SiteSection()
    pbs = experiment.pbs or PbsSection()
    request = resources(pbs, site, mode)
    workdir = (workdir or Path.cwd()).absolute()
    save_loc = Path(os.path.normpath(workdir / experiment.save_loc))
    if site.scheduler in _AWKWARD and (awkward := _AWKWARD[site.scheduler])[0].search(str(save_loc)):
        raise UserError(
            f"expected save_loc without {awkward[1]}, which {site.scheduler} cannot take, got {str(save_loc)!r}"
        )
    if mode != "train" and chain != 1:
        raise UserError(
            f"expected --chain with --mode train only, got --mode {mode}; submit it again to compute what is missing"
        )
    if isinstance(chain, int) and chain < 1:
        raise UserError(f"expected a chain of at least 1 job, got {chain}")
    if chain == "auto" and not site.submit_from_jobs:
        raise UserError(f"expected --chain with a number, because jobs at {site.name} may not submit others, got auto")
    details: dict[str, Any] = {}
    if mode == "train":
        trainer = hungriest(experiment).trainer
        details |= {"layout": layout(trainer, request.world), "samples_per_step": trainer.global_batch_size}
    elif mode == "rollout":
        times, group = initial_times(experiment), experiment.trainer.parallelism.model_ranks
        if request.processes % group:
            raise UserError(
                f"expected a multiple of tensor × domain = {group} processes on a node, got {request.processes}, "
                "change pbs.rollout.ngpus or --ngpus"
            )
        units, together = _units(experiment, times)
        shares = min(request.world // group, units)
        jobs = -(-shares // (request.processes // group))
        most = min(times, -(-units // shares) * together)
        details |= {"array": jobs, "shares": shares, "group": group, "initial_times": times, "most_times": most}
        if jobs < request.nodes:
            used = f"takes {counted(jobs, 'node')} of the {request.nodes} that are asked for"
            details["notes"] = (f"{used}: the forecasts are {counted(shares, 'batch')} in all",)
        request = one_node(request)
    elif request.nodes > 1:
        raise UserError(f"expected 1 node for {mode}, got {request.nodes}, change pbs.{mode}.nodes or --nodes")
    return Plan(
        name=experiment.name,
        mode=mode,
        site=site.name,
        resources=request,
        save_loc=save_loc,
        workdir=workdir,
        python=python,
        chain=chain,
        setup=(*site.setup, *pbs.setup),
        environment={**site.environment, **pbs.environment},
        after=after,
        **details,
    )


def _units(experiment: Experiment, times: int) -> tuple[int, int]:
    """Return the number of batches that can be computed apart, as `inference.forecast` divides them, and the times of each.

    Members of one initial time are in batches of their own where the format takes them from several processes.
    """
    section = experiment.inference
    members, batch_size = section.ensemble.members, section.batch_size
    apart = getattr(registry.of("writer", section.output), "by_member", False)
    together = max(1, batch_size // members)
    return -(-times // together) * (-(-members // batch_size) if apart else 1), together


def initial_times(experiment: Experiment) -> int:
    """Return the number of initial times of a rollout; by default, every fourth step of the test period."""
    init = experiment.inference.init
    if init is None:
        step = experiment.data.timestep
        return sum(_between(period.start, period.end, step * 4) for period in experiment.data.test)
    if init.times:
        return len(init.times)
    assert init.start is not None
    assert init.end is not None
    assert init.interval is not None
    return _between(init.start, init.end, init.interval)


def _between(start: str, end: str, step: dt.timedelta) -> int:
    """Return the number of steps from start to end, both included.

    A day that exists only in another calendar (30 February) counts as the last day of its month.
    """
    return max(1, (_time(end) - _time(start)) // step + 1)


def _time(text: str) -> dt.timedelta:
    """Return a time of the years 0 to 9999 as the time since some day."""
    year, month, day = (int(part) for part in text[:10].split("-"))
    # Python has no year 0, and the calendar repeats itself after 400 years.
    cycles, like = year // 400, 400 + year % 400
    date = dt.date(like, month, min(day, calendar.monthrange(like, month)[1]))
    hour, minute, second = (int(part) for part in text[11:].split(":"))
    days = date.toordinal() + cycles * _DAYS_OF_400_YEARS
    return dt.timedelta(days=days, hours=hour, minutes=minute, seconds=second)
