"""The order of events in a run: steps, validations, saves and the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from credit_like.checkpoint.errors import SaveFailed, reading_metadata
from credit_like.naming import counted
from credit_like.parallel.tensor_copies import check_copies
from credit_like.state import Sample
from credit_like.training.garbage import automatic, collected_between_steps
from credit_like.training.monitor import Monitor, memory_mib
from credit_like.training.nonfinite import first_of_ranks
from credit_like.training.patience import stalls
from credit_like.training.stage import Stage, refuse_other_phases, stage_at, stage_of_last_step
from credit_like.training.state import Progress, TrainingState
from credit_like.training.step import StepReport
from credit_like.training.stop import StopRequest
from credit_like.training.validation import Validation
from credit_like.variables import Variables

log = logging.getLogger(__name__)

_SAVE_TRIES = 3
_GO_ON, _SAVE, _STOP, _INTERRUPT = range(4)

Ending = Literal["finished", "continue", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended. After `continue` the same command goes on from there; after `finished` nothing is left to do."""

    state: Ending
    step: int
    reason: str = ""
    interrupted: bool = False
    """Whether it stopped because one of the processes received SIGINT."""

    @property
    def exit_status(self) -> int:
        return 1 if self.state == "failed" else 130 if self.interrupted else 0


TakeStep = Callable[[Iterable[Sample], int, float, int], StepReport]
FirstModule = Callable[[Sequence[Sample], int], str | None]
"""Computes a step once more and returns the first module with a number that is not finite."""


class Loop:
    """One stretch of training, from the start or a checkpoint to the end or a stop.

    `stages` are the phases in order. `enter` prepares the optimiser, `train_step` and `validation` for one of them.
    `accepted` is called once the experiment is known to fit the run, before anything of it changes.
    """

    def __init__(
        self,
        state: TrainingState,
        stages: Sequence[Stage],
        enter: Callable[[Stage], None],
        train_step: TakeStep,
        validation: Validation,
        stop: StopRequest,
        monitor: Monitor | None,
        first_module: FirstModule,
        accepted: Callable[[], None] = lambda: None,
    ) -> None:
        self.first_module, self.accepted = first_module, accepted
        self.not_finite: str | None = None
        """The first variable and the first module that were not finite in the newest skipped steps, if they are known."""
        self.state, self.stages, self.enter, self.train_step = state, stages, enter, train_step
        self.validation, self.stop, self.monitor = validation, stop, monitor
        self.context, self.manager = state.context, state.manager
        self.stage = stages[0]
        """The phase of the newest step, whose optimiser state is in `state`; before the first step, the first phase."""
        self.epochs = stages[-1].phase.end
        self.pending: tuple[StepReport, dict[str, Any], int] | None = None
        """The numbers of the newest step, its row of the log, and its position in the epoch."""
        self.saved: tuple[int, bool] | None = None
        """Step of the newest save, and whether a validation due there came before it."""
        self.score: tuple[int, float | None] | None = None
        """Step and loss of the newest validation of this stretch, or of the checkpoint from which it goes on."""
        self.interrupted = False
        self.failures = 0
        """Saves that failed since the newest one that is known to be on disk; the same on all ranks."""
        self.collect: Callable[[int], None] = lambda _: None
        self.longest = 0.0
        """Seconds of the longest step, in this stretch."""
        self.aside = 0.0
        """Seconds since the newest step ended that are no part of the next one: in validations and saves."""
        self.begun = self.last_save = time.monotonic()
        self.before = 0.0

    def run(self) -> Outcome:
        """Train from the newest checkpoint, if there is one, to the end or a stop, and save.

        Raises SaveFailed where checkpoints cannot be written.
        """
        self._begin()
        with collected_between_steps() as self.collect:
            return self._train()

    def _train(self) -> Outcome:
        """Take all steps, from those that are done."""
        progress = self.state.progress
        while progress.epoch < self.epochs or not progress.validated:
            reason = self._boundary()
            if reason is None and progress.epoch < self.epochs:  # else only a validation was missing
                reason = self._epoch()
            if reason is not None:
                log.info("stopping (%s): saving step %d", reason, progress.step)
                self._save(must=True)
                failed = reason.startswith("skipped")
                return Outcome("failed" if failed else "continue", progress.step, reason, self.interrupted)
        try:
            self._wait()
        except SaveFailed as error:
            self._failed(error)
        if self.saved != (progress.step, True):
            self._save(must=True)
        return Outcome("finished", progress.step)

    def _begin(self) -> None:
        """Restore the newest checkpoint, or begin a new run, and continue its log.

        Raises UserError where the experiment does not fit the run or all its checkpoints are damaged, before anything of the
        run has changed but for the remains of an interrupted save.
        """
        state = self.state
        self.manager.recover()
        checkpoint = self.manager.latest()
        if checkpoint is None:
            self.accepted()  # there is nothing to protect, and the folder is known as one of a run if the start fails
            state.start()
        else:
            with reading_metadata(checkpoint.folder):
                saved = Progress.of(checkpoint.meta["progress"])
                stage = stage_of_last_step(self.stages, saved.epoch, saved.position, checkpoint.phase)
            refuse_other_phases(checkpoint, self.stages, stage)
            if stage is not self.stage:
                self._begin_phase(stage)
            state.restore(checkpoint)
            self.saved = (state.progress.step, state.progress.validated)
            if checkpoint.score is not None:
                self.score = (checkpoint.step, checkpoint.score)  # it stays with the step if that is saved again
            log.info("continuing from %s%s", checkpoint.folder, self._named())
            self._take_up()
            self.accepted()
            self.manager.set_aside(checkpoint.step)
        self.before = state.progress.seconds
        self.validation.allowance.spent = state.progress.forecasts
        if self.monitor is not None:
            self.manager.before_commit = self.monitor.rows.sync
            self.monitor.origin = state.origin
            self.monitor.open(state.progress.step, state.progress.validated)
            self.monitor.status("running", state.progress.step)

    def _take_up(self) -> None:
        """Resume a phase that ended early and has since been given more epochs, at the epoch after its last one."""
        progress = self.state.progress
        if progress.left is not None and progress.epoch < self.stage.phase.end:
            progress.epoch, progress.position, progress.left = progress.left, 0, None
            log.info("step %d%s ended early and is resumed with epoch %d", progress.step, self._named(), progress.epoch)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _begin_phase(self, stage: Stage) -> None:
        """Prepare the steps of a phase, with an optimiser state of zero."""
        self._drain()
        for loader in (self.stage.train_loader, self.stage.valid_loader):
            if (close := getattr(loader, "close", None)) is not None:
                close()  # its workers read no more
        self.stage = stage
        self.enter(stage)

    def _named(self) -> str:
        """Return the phase as text for a log line; empty for a training in one phase."""
        return f"  phase {self.stage.phase.number}" if len(self.stages) > 1 else ""

    def _epoch(self) -> str | None:
        """Take the steps to the end of the epoch; return the reason if it is left before."""
        progress = self.state.progress
        if (stage := stage_at(self.stages, progress.epoch)) is not self.stage:
            self._begin_phase(stage)
            progress.left, progress.losses = None, []  # another phase's losses are not comparable
            log.info("step %d%s begins", progress.step, self._named())
        schedule = self.stage.schedule
        if progress.position >= schedule.steps_per_epoch:  # of an epoch that was longer before
            validated = self.score is not None and self.score[0] == progress.step
            progress.epoch, progress.position, progress.validated = progress.epoch + 1, 0, validated
            self.saved = None
            return None
        epoch = progress.epoch
        self.context.stepper.set_epoch(epoch)
        batches = self.stage.train_loader.batches(epoch, progress.position * schedule.accumulation)
        began, self.aside = time.perf_counter(), 0.0
        while progress.position < schedule.steps_per_epoch:
            began = self._step(batches, began)
            if reason := self._boundary():
                return reason
            if progress.epoch != epoch:
                return None
        return None

    def _step(self, batches: Iterator[Sample], began: float) -> float:
        """Take one optimiser step, timed since `began`; return when it ended."""
        progress, stage, waited = self.state.progress, self.stage, 0.0
        schedule, section = stage.schedule, stage.schedule.section

        def micro_batches() -> Iterator[Sample]:
            nonlocal waited
            for _ in range(schedule.accumulation):
                before = time.perf_counter()
                sample = next(batches)
                waited += time.perf_counter() - before
                yield sample

        rate = schedule.rate(stage.step_of(progress.epoch, progress.position), progress.losses)
        epoch, position = progress.epoch, progress.position
        report = self.train_step(micro_batches(), schedule.accumulation, rate, progress.step + 1)
        self._drain()
        progress.step += 1
        progress.position += 1
        if progress.position == schedule.steps_per_epoch:
            progress.epoch, progress.position, progress.validated = epoch + 1, 0, False
        elif section.valid_every > 0 and progress.step % section.valid_every == 0:
            progress.validated = False
        now = time.perf_counter()
        took, self.aside = now - began - self.aside, 0.0
        self.longest = max(self.longest, took)
        progress.trained += took
        row = {
            "step": progress.step,
            **self._phase(),
            "epoch": epoch,
            "learning_rate": rate,
            "samples_per_second": section.global_batch_size / took,
            "data_wait": waited / took,
            "memory_mib": memory_mib(self.context.runtime.device),
        }
        self.pending = (report, row, position)
        self.collect(progress.step)
        return now

    def _phase(self) -> dict[str, int]:
        """Return the entry of the phase in a record of the log; empty for a training in one phase."""
        return {"phase": self.stage.phase.number} if len(self.stages) > 1 else {}

    def _boundary(self) -> str | None:
        """Validate and save what is due between two steps, or return the reason to stop: the same on all ranks."""
        progress = self.state.progress
        if progress.skipped >= self.stage.schedule.section.max_skipped:
            skipped, progress.skipped = progress.skipped, 0  # the next start tries again
            why = f": {self.not_finite}" if self.not_finite else ""
            return f"skipped {skipped} steps in a row for a loss or gradient that is not finite{why}"
        self._poll()
        wish = self._agree(self._wish())
        if wish >= _STOP:
            return self._reason()
        if progress.validated and wish != _SAVE:
            return None
        self._drain()  # waits for the newest step, which is part of its time
        with self._apart():
            if not progress.validated:
                if not self._validate():
                    return self._reason()
                self._end_early()
            self._save()
        return None

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave what happens inside out of the time of the next step."""
        began, inside = time.perf_counter(), self.aside
        try:
            yield
        finally:
            self.aside = inside + time.perf_counter() - began

    # ---- stops ---------------------------------------------------------------------------------------------------

    def _reason(self) -> str:
        return self.stop.reason(self._reserve()) or "requested by another process"

    def _reserve(self) -> float:
        """Return the seconds that a step and a save may take, generously."""
        return 3.0 * self.longest + 60.0

    def _agree(self, wish: int) -> int:
        """Return the most urgent wish of any rank."""
        agreed = self.context.runtime.agree(wish)
        self.interrupted |= agreed == _INTERRUPT
        return agreed

    def _stop_wish(self) -> int:
        if self.stop.interrupted:
            return _INTERRUPT
        return _STOP if self.stop.reason(self._reserve()) else _GO_ON

    def _wish(self) -> int:
        """Return what this rank votes for at this boundary: stop, save or go on."""
        if stop := self._stop_wish():
            return stop
        every = self.stage.schedule.section.checkpoint.every
        if self.failures and not self.manager.in_flight:  # else the next try is on its way
            return _SAVE
        if isinstance(every, int):
            step = self.state.progress.step
            due = step % every == 0 and step > 0 and self.saved != (step, self.state.progress.validated)
        else:
            due = time.monotonic() - self.last_save >= every.total_seconds()
        return _SAVE if due else _GO_ON

    def _must_stop(self) -> bool:
        """Return whether a rank wants to stop; called during a validation."""
        return self._agree(self._stop_wish()) > _GO_ON

    # ---- log -----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Log the last step whose numbers have not been read yet.

        This is called after the next step has been queued on the device: the host then waits for a step that is
        finished or nearly so, while the device already works on the next one.
        """
        if self.pending is None:
            return
        report, row, position = self.pending
        self.pending = None
        loss, norm, skip, *others = report.ready()
        channels = others[len(report.corrections) :]
        row = {**row, "loss": loss, "grad_norm": norm, **dict(zip(report.corrections, others, strict=False))}
        progress = self.state.progress
        progress.skipped = progress.skipped + 1 if skip else 0
        if skip:
            row["skipped"] = True
            with self._apart():
                self._blame(row, position, report, channels)
        if self.monitor is not None:
            self.monitor.step(row)

    def _blame(self, row: Mapping[str, Any], position: int, report: StepReport, channels: list[float]) -> None:
        """Log which variable, module and times made a step impossible, on every rank that saw it."""
        context, step = self.context, row["step"]
        variables = context.variables
        outputs = Variables.channel_names(variables.outputs)
        names = [
            *(f"input {name}" for name in Variables.channel_names(variables.role("prognostic"))),
            *(f"forcing {name}" for name in Variables.channel_names(variables.role("dynamic_forcing"))),
            *(f"target {name}" for name in outputs),
            *(f"prediction of {name}" for name in outputs),
        ]
        bad = next((name for name, x in zip(names, channels, strict=True) if not math.isfinite(x)), None)
        offending = bad or "the gradient"
        if self.state.progress.skipped == 1 or self.not_finite is None:
            variable = first_of_ranks(bad, context.runtime) or offending
            count = self.stage.schedule.accumulation
            samples = self.stage.train_loader.again(row["epoch"], position * count, count)
            module = self.first_module(samples, step) or "none when the step was computed once more"
            offending = self.not_finite = f"{variable}; first module: {module}"
        if bad is None and not context.runtime.is_main:
            return
        times = context.store.times
        when = sorted({str(times[int(i)]) for index in report.index for i in index})
        log.warning(
            "step %d skipped: loss or gradient not finite; first offending: %s; samples at %s",
            step,
            offending,
            ", ".join(when),
        )

    # ---- validation ----------------------------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Validate, and log the scores; return False where a stop came in between."""
        progress, began = self.state.progress, time.perf_counter()
        ended = None if progress.position else progress.epoch
        self.context.stepper.set_epoch(progress.epoch - (ended is not None))
        with automatic():
            row = self.validation(self._must_stop, ended, progress.trained, progress.step)
        if row is None:
            return False
        progress.validated = True
        progress.forecasts = self.validation.allowance.spent
        if not row:
            if self.context.runtime.is_main:
                log.warning("no validation sample: data.valid has no complete global batch")
            return True
        loss: float = row["valid_loss"]
        score = loss if math.isfinite(loss) else None
        self.score = progress.step, score
        progress.losses.append(score)
        if self.monitor is not None:
            seconds = time.perf_counter() - began
            record = {"step": progress.step, **self._phase(), "epoch": progress.epoch, **row, "seconds": seconds}
            self.monitor.validation(record)
        return True

    def _end_early(self) -> None:
        """End the phase where its validation loss has ceased to fall; the next one, if any, begins.

        A run may go on after that, with more epochs. It ends again only where later validations are no better either.
        """
        progress, section = self.state.progress, self.stage.schedule.section.early_stopping
        if section is None:
            return
        before, now = (
            stalls(losses, section.patience, section.min_change) for losses in (progress.losses[:-1], progress.losses)
        )
        if now > before:
            progress.left = progress.epoch + (progress.position > 0)
            progress.epoch, progress.position = self.stage.phase.end, 0
            least = f" by min_change ({section.min_change:g} of it)" if section.min_change else ""
            why = f"no validation loss lower than the best{least} in {counted(section.patience, 'validation')}"
            log.info("step %d%s ends early: %s", progress.step, self._named(), why)

    # ---- saves ---------------------------------------------------------------------------------------------------

    def _save(self, must: bool = False) -> None:
        """Save this step; with `must`, return when it is on disk.

        Raises SaveFailed after three failures in a row, and UserError where tensor ranks disagree on a parameter.
        """
        progress = self.state.progress
        self._drain()
        check_copies(self.state.copied, self.context.runtime)
        progress.seconds = self.before + time.monotonic() - self.begun
        # A validation of an earlier step says nothing of these weights, also where the save of that step has failed.
        step, loss = self.score or (None, None)
        score = loss if step == progress.step and progress.validated else None
        try:
            self._wait()
        except SaveFailed as error:
            self._failed(error)  # this save is the next try
        while True:
            try:
                self.last_save = time.monotonic()
                self.state.save(score)
                if must:
                    self.manager.wait()
                if not self.manager.in_flight:
                    self.failures = 0
                self.saved = (progress.step, progress.validated)
                return
            except SaveFailed as error:
                self._failed(error)
                if not must:
                    return
                time.sleep(1.0)

    def _wait(self) -> None:
        """Wait for a save in flight, if there is one; where it ends well, there has been no failure. Raises SaveFailed."""
        if self.manager.in_flight:
            self.manager.wait()
            self.failures = 0

    def _poll(self) -> None:
        """Move a save in flight on; one that failed is tried again at this boundary."""
        was = self.manager.in_flight
        try:
            self.manager.poll()
        except SaveFailed as error:
            self._failed(error)
            return
        if was and not self.manager.in_flight:
            self.failures = 0

    def _failed(self, error: SaveFailed) -> None:
        """Count a failed save; raise its error where it is the last of several in a row."""
        self.failures += 1
        self.saved = None
        if self.failures >= _SAVE_TRIES:
            raise error
        log.warning("%s; trying again (%d of %d)", error, self.failures + 1, _SAVE_TRIES)
