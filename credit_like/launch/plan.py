"""Plan the jobs of an experiment and mode on a machine. Nothing is written or submitted here."""

from __future__ import annotations

import datetime as dt
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from credit_like.errors import UserError
from credit_like.launch.resources import Options, Resources, clock, one_node, resources, seconds
from credit_like.layout import Layout
from credit_like.schema.base import format_duration
from credit_like.schema.checks import layout
from credit_like.schema.experiment import Experiment
from credit_like.schema.launch import Mode, PbsSection, SiteSection
from credit_like.schema.phases import hungriest

Chain = int | Literal["auto"]
_AWKWARD = re.compile(r"[\s,'\"\\]")


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
    """Number of parts of a rollout's initial times: one per group of processes, over all jobs."""
    group: int = 1
    """Number of processes per initial time: tensor × domain."""
    layout: Layout | None = None
    samples_per_step: int | None = None
    initial_times: int | None = None
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
        shares = count(self.shares, "share") + " of the initial times"
        each = f", {count(self.group, 'process')} each" if self.group > 1 else ""
        return f"{self.array} side by side, {shares}{each}" if self.array > 1 else f"1, {shares}{each}"

    @property
    def each(self) -> str:
        """Processors per node, in words."""
        r = self.resources
        return count(r.gpus, "GPU") if r.gpus else count(r.processes, "CPU process")

    def describe(self) -> list[tuple[str, str]]:
        """Return a description of the submission as rows of a table."""
        r = self.resources
        rows = [
            ("experiment", f"{self.name}, {self.mode} on {self.site}"),
            ("jobs", self.jobs),
            ("nodes", f"{r.nodes} {r.kind} × {self.each} = {count(r.world, 'process')}"),
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
            rows.append(
                ("initial times", f"{self.initial_times}, at most {-(-self.initial_times // self.shares)} a share")
            )
        if self.after:
            rows.append(("after", ", ".join(self.after)))
        rows.append(("files", "\n".join(map(str, self.files))))
        if self.ids:
            rows.append(("submitted", ", ".join(self.ids)))
        return rows + [("note", note) for note in self.notes]


def count(number: int, thing: str) -> str:
    """Return a number with its noun, such as `1 node` or `2 nodes`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def plan_jobs(
    experiment: Experiment,
    mode: Mode,
    options: Options | None = None,
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
    request = resources(pbs, site, mode, options)
    workdir = (workdir or Path.cwd()).absolute()
    save_loc = Path(os.path.normpath(workdir / experiment.save_loc))
    if site.scheduler != "local" and _AWKWARD.search(str(save_loc)):
        raise UserError(
            "expected save_loc without blanks, commas, quotes and backslashes, which schedulers cannot take, "
            f"got {str(save_loc)!r}"
        )
    if mode != "train" and chain != 1:
        raise UserError(
            f"expected --chain with --mode train only, got --mode {mode}; submitted again it does what is missing"
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
        shares = min(request.world // group, times)
        jobs = -(-shares // (request.processes // group))
        details |= {"array": jobs, "shares": shares, "group": group, "initial_times": times}
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
    return max(1, seconds(_time(end) - _time(start)) // seconds(step) + 1)


def _time(text: str) -> dt.datetime:
    year, month, day = (int(part) for part in text[:10].split("-"))
    clock_time = dt.time.fromisoformat(text[11:])
    while True:
        try:
            return dt.datetime.combine(dt.date(year, month, day), clock_time)
        except ValueError:
            day -= 1
