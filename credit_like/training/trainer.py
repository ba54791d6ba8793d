"""A training from end to end: builds its parts, holds the lock of the run's folder and records a failure."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from credit_like.checkpoint.errors import SaveFailed
from credit_like.checkpoint.files import replace_file
from credit_like.checkpoint.manager import CheckpointManager, steps
from credit_like.context import Context
from credit_like.data.loading.loader import Loader
from credit_like.data.loading.windows import Windows
from credit_like.errors import RunError, UserError, reason
from credit_like.lock import Locked, RunLock
from credit_like.losses._mean import AreaLoss
from credit_like.nn.noise import NoiseKeys
from credit_like.parallel.apply import is_compiled
from credit_like.parallel.blame import Cause
from credit_like.parallel.device import shown
from credit_like.parallel.fsdp2 import fsdp2_dtype
from credit_like.parallel.runtime import Runtime
from credit_like.schema.load import dump_experiment
from credit_like.schema.places import state_of
from credit_like.schema.trainer import PhaseKeys
from credit_like.training.loop import Loop, Outcome
from credit_like.training.memory import memory_explained
from credit_like.training.monitor import Monitor, write_status
from credit_like.training.nonfinite import first_module
from credit_like.training.stage import Batches, Schedule, Stage
from credit_like.training.state import TrainingState
from credit_like.training.step import TrainStep
from credit_like.training.stop import StopRequest, seconds_left
from credit_like.training.tracking import Tracking
from credit_like.training.validation import Validation

log = logging.getLogger(__name__)

_LOCK_PATIENCE = 60.0
"""Seconds to wait for the lock of a predecessor that is being ended, as when a batch system starts a job again."""


class Trainer:
    """Trains the stepper's model according to the experiment, from the newest checkpoint in `experiment.save_loc` if there is one.

    `stages` are the phases of the experiment in order; `stage` is the one of the newest step. Raises UserError for an
    optimiser or short forecasts that do not fit the run.
    """

    def __init__(self, context: Context, stages: Sequence[Stage]) -> None:
        experiment, section = context.experiment, context.experiment.trainer
        self.context, self.runtime, self.stages, self.stage = context, context.runtime, stages, stages[0]
        self.folder = Path(experiment.save_loc)
        self._accepted = False
        """Whether the experiment fits the run in the folder, which has begun to change."""
        self.manager = CheckpointManager(
            self.folder / "checkpoints", section.checkpoint.keep, section.checkpoint.async_, self.runtime
        )
        self.state = TrainingState(context, self.manager)
        if not self.state.parameters:
            raise UserError(
                f"model.type: expected a model to train, got {experiment.model.type}, which has no weights; change it"
            )
        # Where FSDP2 has a precision policy, autocast would cast what that keeps in fp32. What was applied counts: a single
        # rank shards nothing, regardless of `parallelism.data`.
        policy = fsdp2_dtype(self.state.model)
        amp = section.amp and policy is None
        self.precision = _precision(policy, amp)
        self.validation = Validation(context, self.stage, self.state.ema, amp)
        self.train_step = TrainStep(
            context.stepper,
            self.loss,
            self.state.optimizer,
            self.state.trained,
            self.state.copied,
            self.state.ema,
            self.runtime,
            amp=amp,
            members=section.members,
            places=context.places,
            compiled=is_compiled(section, self.runtime.device),
            recomputes=section.activation_checkpoint,
            accumulate=self._communicate,
        )
        self._step = self.train_step  # kept apart: a caller may wrap `train_step`, and phases change this one
        self._enter(self.stage)

    @property
    def loss(self) -> AreaLoss:
        return self.stage.loss

    @property
    def train_loader(self) -> Batches:
        return self.stage.train_loader

    @property
    def schedule(self) -> Schedule:
        return self.stage.schedule

    @property
    def total_steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(stage.schedule.total_steps for stage in self.stages)

    def _enter(self, stage: Stage) -> None:
        """Prepare the steps and validations of a phase, with an optimiser state of zero."""
        section, step = stage.schedule.section, self._step
        self.stage = stage
        self.state.begin(stage.phase)
        self.validation.begin(stage)
        step.loss, step.optimizer, step.max_norm = stage.loss, self.state.optimizer, section.grad_max_norm
        step.parameters = self.state.trained
        step.members, step.backprop_steps = section.members, section.backprop_steps
        step.input_noise, step.input_keys = section.input_noise, self._input_keys(section)
        step.lead_seed = self.context.experiment.seed if section.random_forecast_len else None
        step.shift_seed = self.context.experiment.seed if section.shift_longitude else None

    def _input_keys(self, section: PhaseKeys) -> NoiseKeys | None:
        """Return the keys of the noise on the input; None where there is none."""
        if not section.input_noise:
            return None
        context = self.context
        return NoiseKeys(context.store.seconds, context.experiment.seed, "input").to(self.runtime.device)

    def check_ranks(self) -> None:
        """Raise UserError on all ranks unless they have the same experiment, versions, statistics and samples. Collective."""
        facts = self.state.facts()
        for stage in self.stages:
            for kind, loader in (("training", stage.train_loader), ("validation", stage.valid_loader)):
                if isinstance(loader, Loader):
                    name = (
                        f"{kind} samples" if len(self.stages) == 1 else f"{kind} samples of phase {stage.phase.number}"
                    )
                    facts[name] = _times(loader.windows)
        self.runtime.check_same(facts)

    def fit(self) -> Outcome:
        """Train to the end, or until something asks to stop; with a checkpoint in either case.

        Raises Locked where another process trains in the same folder or it cannot be written, and UserError where the
        experiment does not fit the run; a run with checkpoints is then left as it was. Any other error leaves `failed` in
        status.json and the checkpoints before it as they are.
        """
        experiment = self.context.experiment
        with ExitStack() as stack:
            self._lock(stack)
            limit = seconds_left() if self.runtime.is_main else None
            stop = stack.enter_context(StopRequest(experiment.trainer.stop_after, limit))
            monitor = None
            if self.runtime.is_main:
                monitor = Monitor(self.folder, self.total_steps, self.precision, self._tracker())
                stack.callback(monitor.close)
            # After an error too, a save in progress needs the log, and the lock until it is written.
            stack.callback(self.manager.finish_writing)
            try:
                outcome = self._go(stop, monitor)
            except BaseException as error:
                self._record_failure(error)
                raise
            if monitor is not None:
                with suppress(OSError) if outcome.state == "failed" else nullcontext():
                    monitor.status(outcome.state, outcome.step, outcome.reason)
                self._report(outcome)
            return outcome

    def _tracker(self) -> Callable[[], Tracking] | None:
        """Return a function that opens the tracker of the experiment."""
        experiment = self.context.experiment
        if experiment.tracking is None:
            return None
        return partial(Tracking, experiment.tracking, self.folder, experiment.name, experiment.to_dict())

    def _record_failure(self, error: BaseException) -> None:
        """Write status.json, on the rank that failed first: the main process may be waiting for it."""
        # A run that was refused before its checkpoint was restored is still at the step of that one.
        step = self.state.progress.step or _newest_step(self.folder)
        # The first cause is what matters, also where the disk is what failed.
        with suppress(OSError):
            if isinstance(error, KeyboardInterrupt):
                if self.runtime.is_main:
                    write_status(
                        self.folder,
                        "continue",
                        step,
                        "interrupted without a checkpoint of this step",
                        self.precision,
                        self.state.origin,
                    )
                return
            cause = self.runtime.first_cause(error)
            refused = isinstance(error, UserError) and not self._accepted
            if cause.rank == self.runtime.rank and not (refused and _keeps_status(self.folder)):
                _write_failure(self.folder, self.runtime, cause, step, self.precision, self.state.origin)

    def _report(self, outcome: Outcome) -> None:
        stopped = outcome.state == "continue"
        log.log(
            logging.ERROR if outcome.state == "failed" else logging.INFO,
            "%s at step %d of %d%s%s",
            "stopped" if stopped else outcome.state,
            outcome.step,
            self.total_steps,
            f" ({outcome.reason})" if outcome.reason else "",
            "; run the same command to continue" if stopped else "",
        )

    def _go(self, stop: StopRequest, monitor: Monitor | None) -> Outcome:
        """Train; return how it ended, also where checkpoints cannot be written."""
        log.info("computing in %s%s", self.precision, shown(self.runtime.device))
        loop = Loop(
            self.state, self.stages, self._enter, self.train_step, self.validation, stop, monitor,
            partial(first_module, self._step), self._accept,
        )  # fmt: skip
        grid = self.context.store.grid
        try:
            with memory_explained(self.context.experiment, self.runtime, grid.height, grid.width, self.folder):
                return loop.run()
        except SaveFailed as error:
            # All ranks have it, so all end alike; the checkpoints before it are whole.
            return Outcome("failed", self.state.progress.step, str(error))

    def _lock(self, stack: ExitStack) -> None:
        """Hold the folder, in the main process, until `stack` ends. Raises Locked on every rank where it cannot be held."""
        refused = None
        if self.runtime.is_main:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(RunLock(self.folder, _LOCK_PATIENCE))
            except Locked as error:
                refused = str(error)
            except OSError as error:
                refused = self._not_writable(error)
        refused = self.runtime.broadcast(refused)
        if refused:
            raise Locked(refused)

    def _accept(self) -> None:
        """Store the experiment, which fits the run, in its folder. Raises Locked on every rank where it cannot be written."""
        self.runtime.barrier()  # the main process writes nothing unless all ranks have come so far
        refused = None
        if self.runtime.is_main:
            try:
                replace_file(self.folder / "experiment.yml", dump_experiment(self.context.experiment).encode())
            except OSError as error:
                refused = self._not_writable(error)
        refused = self.runtime.broadcast(refused)
        if refused:
            raise Locked(refused)
        self._accepted = True

    def _not_writable(self, error: OSError) -> str:
        return f"save_loc: expected a folder that can be written, got {self.folder}: {reason(error)}; change save_loc"

    def _communicate(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients over ranks only with the last of the accumulated micro-batches."""
        wrapped: Any = self.context.stepper.model
        module: Any
        for module in wrapped.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(last, recurse=False)
        if not last and hasattr(wrapped, "no_sync"):
            context: AbstractContextManager[None] = wrapped.no_sync()
            return context
        return nullcontext()


def record_failed_start(folder: Path, runtime: Runtime, error: BaseException) -> None:
    """Record that a run failed before it held the lock of its folder, unless another process is training there.

    The step is that of the newest checkpoint. Nothing is written where the user has to correct a run that has no folder
    yet, or one that has checkpoints and does not count as running.
    """
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, UserError) and not folder.is_dir()):
        return
    cause = runtime.first_cause(error)
    if cause.rank != runtime.rank or (isinstance(error, UserError) and _keeps_status(folder)):
        return
    with suppress(OSError, Locked):
        folder.mkdir(parents=True, exist_ok=True)
        with RunLock(folder):
            _write_failure(folder, runtime, cause, _newest_step(folder))


def _newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint of a run; 0 without one, or where that cannot be seen now."""
    with suppress(RunError):
        return max(steps(folder / "checkpoints"), default=0)
    return 0


def _keeps_status(folder: Path) -> bool:
    """Return whether status.json says how a run with checkpoints ended, which remains true where a start of it is refused."""
    return state_of(folder) in ("continue", "finished", "failed") and _newest_step(folder) > 0


def _write_failure(
    folder: Path,
    runtime: Runtime,
    cause: Cause,
    step: int,
    precision: str | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    write_status(folder, "failed", step, str(cause) if runtime.world > 1 else cause.message, precision, origin)


def _precision(policy: torch.dtype | None, autocast: bool) -> str:
    """Return the precision in which a model computes, and its origin: FSDP2's policy, autocast or neither."""
    if autocast:
        return "bfloat16 (autocast)"
    return "bfloat16 (FSDP2 policy)" if policy == torch.bfloat16 else "float32"


def _times(windows: Windows) -> str:
    """Return the number of windows, and a digest of their times."""
    seconds = windows.store.time_seconds(windows.starts)
    return f"{len(windows)} windows, digest {hashlib.sha256(seconds.tobytes()).hexdigest()[:12]}"
