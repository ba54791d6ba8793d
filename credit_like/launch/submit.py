"""Submit jobs from a login node: check, plan, write the script, submit. After an error nothing is changed."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from credit_like.errors import UserError
from credit_like.launch import scheduler
from credit_like.launch.chain import (
    epochs_done,
    history,
    history_file,
    newest_checkpoint,
    queued_ids,
    record,
    run_status,
    withdraw,
)
from credit_like.launch.local import run_all, run_job
from credit_like.launch.plan import Chain, Plan, plan_jobs
from credit_like.launch.resources import Options, overrides_of, resources, seconds
from credit_like.launch.scheduler import Scheduler
from credit_like.launch.script import render
from credit_like.launch.status import states_of
from credit_like.outputs import check_new
from credit_like.registry import did_you_mean
from credit_like.schema.checks import section_findings, world_of
from credit_like.schema.errors import ExperimentError
from credit_like.schema.experiment import Experiment
from credit_like.schema.launch import MODES, Mode, PbsSection, SiteSection
from credit_like.schema.load import dump_experiment, load_experiment, load_located
from credit_like.schema.phases import phases

log = logging.getLogger(__name__)

_SUBMITTED = "as submitted, includes and overrides merged"
Check = Callable[[Path, Sequence[str], int | None], object]
"""Checks of an experiment file with overrides, for a world size (None unless training)."""


def mode_of(text: str) -> Mode:
    """Return the mode of this name.

    Raises UserError for an unknown name.
    """
    for mode in MODES:
        if mode == text:
            return mode
    raise UserError(f"expected --mode {', '.join(MODES)}, got {text!r}{did_you_mean(text, list(MODES))}")


def chain_of(text: str) -> Chain:
    """Return `auto` or the number of jobs of a chain.

    Raises UserError for anything else.
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise UserError(f"expected --chain auto or a number of jobs from 1, got {text!r}")
    return int(text)


def check_sections(file: Path, overrides: Sequence[str], world: int | None, mode: Mode = "train") -> None:
    """Run the checks that need no data.

    Raises ExperimentError with every problem.
    """
    experiment, locations = load_located(file, overrides)
    findings = section_findings(experiment, world or world_of(experiment, mode))
    if problems := [locations.problem(path, message) for path, message in findings]:
        raise ExperimentError(problems)


def submit(
    file: Path,
    mode: Mode = "train",
    options: Options | None = None,
    *,
    chain: Chain = 1,
    after: Sequence[str] = (),
    overrides: Sequence[str] = (),
    site: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    check: Check | None = None,
    python: str = sys.executable,
) -> Plan:
    """Plan the jobs of a mode and submit them; at site `local`, run them here.

    With `dry_run`, nothing is written or submitted.

    `after` are ids of jobs to wait for. `force` submits even though outputs exist or jobs of the run are still queued.
    Returns the plan with the script's text and the ids of the jobs.
    Raises UserError for anything that the user has to correct; then no file and no job is left behind.
    """
    if site is not None:
        overrides = (*overrides, f"site={json.dumps(site)}")
    overrides = (*overrides, *overrides_of(options or Options(), mode))
    experiment = load_experiment(file, overrides)
    profile = experiment.site or SiteSection()
    asked = resources(experiment.pbs or PbsSection(), profile, mode)
    statistics = experiment.preprocessed_statistics
    # A file that this job or one before it writes need not be there yet.
    is_made = mode == "preprocess" or (after and not os.path.exists(statistics))
    checked = (*overrides, "data.statistics=null") if is_made else overrides
    (check or partial(check_sections, mode=mode))(file, checked, asked.world if mode == "train" else None)
    plan = plan_jobs(experiment, mode, site=profile, chain=chain, after=tuple(after), python=python)
    plan = _numbered(plan)
    dialect = scheduler.of(profile)
    notes = (*plan.notes, *_state_of_run(plan, experiment, force))
    plan = replace(plan, scripts=render(plan, profile), notes=notes)
    for path in (plan.script, plan.experiment):
        check_new("save_loc", path)
    if dry_run:
        return plan
    _check_surroundings(plan, dialect)
    with _Files() as files:
        files.create(plan.experiment, _frozen(experiment, file))
        files.create(plan.script, plan.scripts[plan.script.name])
        files.folder(plan.logs)
        files.withdraw(plan)
        record(
            plan.save_loc,
            "submission",
            mode=mode,
            submission=plan.submission,
            site=plan.site,
            scheduler=profile.scheduler,
            chain=chain,
        )
        if profile.scheduler == "local":
            files.keep()
            return replace(plan, ids=_run_here(plan))
        ids = _queue(plan, dialect, profile, files.keep)
        files.keep()
    return replace(plan, ids=ids)


def active_jobs(save_loc: Path) -> dict[str, str]:
    """Return the jobs of this run that their schedulers still have, with their states."""
    events = history(save_loc)
    states = states_of(events, queued_ids(events)[-50:])
    return {job: state for job, state in states.items() if not state.startswith("ended")}


def _numbered(plan: Plan) -> Plan:
    """Return the plan with a new name and new files, because jobs of earlier submissions still read theirs."""
    taken = {event.get("submission") for event in history(plan.save_loc)}
    plans = (replace(plan, number=number) for number in itertools.count(1))
    return next(
        each
        for each in plans
        if each.submission not in taken and not any(map(os.path.lexists, (each.script, each.experiment)))
    )


def _frozen(experiment: Experiment, file: Path) -> str:
    """Return the submitted experiment as text, from which `load_experiment` makes an equal one in any environment."""
    name = "".join(character if character.isprintable() else " " for character in file.name)
    return f"# {name} {_SUBMITTED}\n{dump_experiment(experiment)}"


def _state_of_run(plan: Plan, experiment: Experiment, force: bool) -> tuple[str, ...]:
    """Return notes on what the run's folder already contains.

    Raises UserError where the submission would do nothing, or repeat queued work.
    """
    status, notes = run_status(plan.save_loc), []
    statistics, forecasts = experiment.preprocessed_statistics, experiment.forecast_folder
    epochs, source = phases(experiment)[-1].end, experiment.start_from
    again = "change save_loc, or add --force"
    if active := active_jobs(plan.save_loc):
        found = ", ".join(f"{job} ({state})" for job, state in active.items())
        if not (force or plan.after):
            raise UserError(
                f"expected no job of this run in the queue, got {found}, wait, end them with credit-like cancel, "
                "or add --force"
            )
        notes.append(f"jobs of this run are in the queue: {found}")
    checkpoint = newest_checkpoint(plan.save_loc)
    if plan.mode == "train":
        done = epochs_done(plan.save_loc)
        if status.get("state") == "finished" and not force and (done is None or done >= epochs):
            raise UserError(
                f"expected training left to do in {epochs} epochs, got {plan.save_loc} finished at step "
                f"{status.get('step')}, add epochs or phases, {again}"
            )
        if checkpoint >= 0:
            notes.append(f"continues at step {checkpoint}")
    elif plan.mode == "rollout" and checkpoint < 0 and not plan.after and (source is None or source.lora is not None):
        raise UserError(
            f"expected a checkpoint in {plan.save_loc}, got none, train first, or say which job to wait for (--after)"
        )
    elif plan.mode == "evaluate" and not plan.after and not _filled(forecasts):
        raise UserError(
            f"expected forecasts in {forecasts}, got none, roll out first, or say which job to wait for (--after)"
        )
    elif plan.mode == "preprocess" and os.path.exists(statistics) and not force:
        raise UserError(f"expected no statistics yet, got {statistics}, name another file, or add --force")
    if plan.mode == "rollout" and checkpoint < 0 and source is not None and not plan.after:
        notes.append(f"forecasts with the weights of {source.path}")
    if plan.mode == "rollout" and _filled(forecasts):
        notes.append(f"forecasts exist in {forecasts}")
    return tuple(notes)


def _filled(folder: Path) -> bool:
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def _check_surroundings(plan: Plan, dialect: Scheduler) -> None:
    """Raise UserError unless this machine has the programs and packages that the jobs need."""
    for program in dialect.programs:
        if shutil.which(program) is None:
            raise UserError(
                f"expected {program} on the PATH to submit to {plan.site}, got none, do this on a login node "
                "or add --dry-run"
            )
    if lost := dialect.unknown(plan.after):
        raise UserError(
            f"--after: expected jobs that the scheduler knows, got {', '.join(lost)}, change or leave it out"
        )
    for package in ("torch", "credit_like"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"expected {package} in the environment of {plan.python}, got none, activate the right one")


def _queue(plan: Plan, dialect: Scheduler, site: SiteSection, keep: Callable[[], None]) -> tuple[str, ...]:
    """Submit the jobs, and record each; if one is refused or the user interrupts, cancel those already submitted.

    Where these cannot be cancelled, `keep` is called, so that they stay jobs of the run.
    """
    ids: list[str] = []
    chain = 1 if plan.chain == "auto" else plan.chain
    indices: Sequence[int | None] = [None] if site.arrays or plan.array == 1 else range(plan.array)
    try:
        for _ in range(chain):
            after = ids[-1:] or plan.after
            for index in indices:
                ids.append(_submit_one(dialect.submit(plan.script, after, index), dialect))
                # Recorded at once, so that the job is known even if this process ends before the next one.
                details = {"mode": plan.mode, "submission": plan.submission, "ids": ids[-1:], "after": list(after)}
                record(plan.save_loc, "submitted", **details)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        if not ids:
            raise
        done = subprocess.run(dialect.cancel(ids), capture_output=True, text=True, check=False)
        if done.returncode:
            keep()
        left = (
            f"{', '.join(ids)} could not be cancelled: {done.stderr.strip()}"
            if done.returncode
            else "the jobs before it are cancelled"
        )
        raise UserError(f"{str(error) or 'interrupted'}; {left}") from None
    return tuple(ids)


def _submit_one(command: list[str], dialect: Scheduler) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        said = " ".join((done.stderr.strip() or done.stdout.strip() or "nothing").split())
        raise UserError(f"expected {command[0]} to take the job, got exit status {done.returncode}: {said}")
    return dialect.job_id(done.stdout)


def _run_here(plan: Plan) -> tuple[str, ...]:
    """Run the jobs of a plan on this machine, one after the other.

    Raises UserError if a job failed; of training jobs, only the last one counts.
    """
    first = sum(event["event"] == "begin" for event in history(plan.save_loc)) + 1
    count = plan.array if plan.mode == "rollout" else None if plan.chain == "auto" else plan.chain
    names: list[str] = []

    def run(i: int) -> int:
        names.append(f"local-{first + i}")
        path = plan.logs / f"{plan.job}-{names[-1]}.log"
        log.info("starting %s%s; log: %s", names[-1], f" of at most {count}" if count else "", path)
        return run_job(plan.script, names[-1], path, seconds(plan.resources.walltime), index=i)

    def is_over() -> bool:
        return plan.mode == "train" and (codes[-1] != 0 or run_status(plan.save_loc).get("state") == "finished")

    codes: list[int] = []
    run_all(count, run, is_over, lambda _, code: codes.append(code))
    failed = [f"{name} (exit status {code})" for name, code in zip(names, codes, strict=True) if code]
    if failed and (plan.mode != "train" or codes[-1]):
        raise UserError(f"expected all jobs to succeed, got failures of {', '.join(failed)}; see {plan.logs}")
    return tuple(names)


class _Files:
    """Files and folders that are written together; unless `keep` is called, everything is removed on exit."""

    def __init__(self) -> None:
        self._written: list[Path] = []
        self._folders: list[Path] = []
        self._plan: Plan | None = None
        self._begins_history = False
        self._kept = False

    def __enter__(self) -> _Files:
        return self

    def folder(self, path: Path) -> None:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another process submits at the same time
                folder.mkdir()
                self._folders.append(folder)

    def withdraw(self, plan: Plan) -> None:
        """Record on exit that the submission is withdrawn, or remove a job history that holds nothing else."""
        self._plan = plan
        self._begins_history = not history_file(plan.save_loc).exists()

    def create(self, path: Path, text: str) -> None:
        """Write a new file. Raises UserError where there is one by now, of somebody who submits at the same time."""
        self.folder(path.parent)
        try:
            with path.open("x", encoding="utf-8") as file:
                self._written.append(path)
                file.write(text)
        except FileExistsError:
            raise UserError(f"expected no other submission at the same time, got {path}, submit again") from None

    def keep(self) -> None:
        self._kept = True

    def __exit__(self, *exception: object) -> None:
        if self._kept:
            return
        for path in self._written:
            path.unlink(missing_ok=True)
        plan = self._plan
        if plan is not None and any(event.get("submission") == plan.submission for event in history(plan.save_loc)):
            withdraw(plan.save_loc, plan.mode, plan.submission, self._begins_history)
        for folder in reversed(self._folders):
            with suppress(OSError):  # it holds the log of a job that has begun
                folder.rmdir()
