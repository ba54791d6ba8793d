"""When things happen in a run: steps, validation, saves, the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from credit_like.checkpoint.errors import SaveFailed
from credit_like.nn import spectral_norm
from credit_like.state import Sample
from credit_like.training.forecasts import Allowance
from credit_like.training.monitor import Monitor, memory_mib
from credit_like.training.step import StepReport
from credit_like.training.stop import StopRequest
from credit_like.training.validation import Validator, time_mean
from credit_like.variables import Variables

if TYPE_CHECKING:
    from credit_like.training.trainer import Trainer

log = logging.getLogger(__name__)

_SAVE_TRIES = 3
_GO_ON, _SAVE, _STOP, _INTERRUPT = range(4)

Ending = Literal["finished", "continue", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended. After `continue` the same command goes on from there; after `finished` it has nothing to do."""

    state: Ending
    step: int
    reason: str = ""
    interrupted: bool = False
    """Whether it stopped because one of the processes received SIGINT."""

    @property
    def exit_status(self) -> int:
        return 1 if self.state == "failed" else 130 if self.interrupted else 0


@dataclass
class Progress:
    """Where a run is. Saved with every checkpoint, and everything that is needed to go on as if never interrupted."""

    step: int = 0
    """Optimiser steps taken, skipped ones included."""
    epoch: int = 0
    position: int = 0
    """Optimiser steps taken in this epoch."""
    skipped: int = 0
    """Steps in a row that ended without an update."""
    validated: bool = True
    """Whether a validation that is due at this step has been done."""
    best: float | None = None
    seconds: float = 0.0
    """Wall-clock time in training so far, over all restarts."""


class Run:
    """One stretch of training, from the start or a checkpoint to the end or a stop."""

    def __init__(self, trainer: Trainer, stop: StopRequest, monitor: Monitor | None) -> None:
        self.t, self.stop, self.monitor = trainer, stop, monitor
        self.pending: tuple[StepReport, dict[str, Any]] | None = None
        self.validator: Validator | None = None
        self.saved: tuple[int, bool] | None = None
        self.interrupted = False
        self.failures = 0
        self.longest = 0.0
        self.allowance = Allowance(trainer.experiment.trainer.monitor.share)
        self.trained = 0.0
        """Seconds in steps, in this stretch, and how many they were."""
        self.steps = 0
        self.begun = self.last_save = time.monotonic()
        self.before = 0.0

    def go(self) -> Outcome:
        t = self.t
        t.manager.recover()
        checkpoint = t.manager.latest(set_aside=True)
        if checkpoint is None:
            t.seed(0)
        else:
            t.restore(checkpoint)
            self.saved = (t.progress.step, t.progress.validated)
            log.info("continuing from %s", checkpoint.folder)
        self.before = t.progress.seconds
        log.info("computing in %s", t.precision)
        if self.monitor is not None:
            t.manager.before_commit = self.monitor.rows.sync
            self.monitor.open(t.progress.step, t.progress.validated)
            self.monitor.status("running", t.progress.step)
        while t.progress.epoch < t.experiment.trainer.epochs or not t.progress.validated:
            reason = self._boundary()
            if reason is None and t.progress.epoch < t.experiment.trainer.epochs:  # else only a validation was missing
                reason = self._epoch()
            if reason is not None:
                log.info("stopping (%s): saving step %d", reason, t.progress.step)
                self._save(must=True)
                failed = reason.startswith("skipped")
                return Outcome("failed" if failed else "continue", t.progress.step, reason, self.interrupted)
        if self.saved != (t.progress.step, True):
            self._save(must=True)
        t.manager.wait()
        return Outcome("finished", t.progress.step)

    def _epoch(self) -> str | None:
        """Steps to the end of the epoch; the reason if it was left before."""
        t = self.t
        if t.progress.position >= t.steps_per_epoch:
            t.progress.epoch, t.progress.position = t.progress.epoch + 1, 0
            return None
        batches = t.train_loader.batches(t.progress.epoch, t.progress.position * t.accumulation)
        began = time.perf_counter()
        while t.progress.position < t.steps_per_epoch:
            waited = 0.0

            def micro() -> Iterator[Sample]:
                nonlocal waited
                for _ in range(t.accumulation):
                    before = time.perf_counter()
                    sample = next(batches)
                    waited += time.perf_counter() - before
                    yield sample

            progress = t.progress
            rate = t.rate(progress.step)
            report = t.train_step(micro(), t.accumulation, rate, progress.step + 1)
            self._drain()
            epoch = progress.epoch
            progress.step += 1
            progress.position += 1
            if progress.position == t.steps_per_epoch:
                progress.epoch, progress.position, progress.validated = epoch + 1, 0, False
            elif _due(t.experiment.trainer.valid_every, progress.step):
                progress.validated = False
            now = time.perf_counter()
            took, began = now - began, now
            self.longest = max(self.longest, took)
            self.trained, self.steps = self.trained + took, self.steps + 1
            row = {
                "step": progress.step,
                "epoch": epoch,
                "learning_rate": rate,
                "samples_per_second": t.experiment.trainer.global_batch_size / took,
                "data_wait": waited / took,
                "memory_mib": memory_mib(t.runtime.device),
            }
            self.pending = (report, row)
            if reason := self._boundary():
                return reason
            if progress.epoch != epoch:
                return None
        return None

    def _boundary(self) -> str | None:
        """Between two steps: validate, save, or give the reason to stop; the same on all ranks."""
        t, progress = self.t, self.t.progress
        if progress.skipped >= t.experiment.trainer.max_skipped:
            skipped, progress.skipped = progress.skipped, 0  # the next start tries again
            return f"skipped {skipped} steps in a row for a loss or gradient that is not finite"
        self._poll()
        wish = self._agree(self._wish())
        if wish >= _STOP:
            return self._reason()
        validated = False
        if not progress.validated:
            self._drain()
            if not self._validate():
                return self._reason()
            validated = True
        if wish == _SAVE or validated:
            self._save()
        return None

    def _reason(self) -> str:
        return self.stop.reason(self._reserve()) or "asked for by another process"

    def _reserve(self) -> float:
        """Seconds that a step and a save may take, generously."""
        return 3.0 * self.longest + 60.0

    def _agree(self, wish: int) -> int:
        agreed = self.t.runtime.agree(wish)
        self.interrupted |= agreed == _INTERRUPT
        return agreed

    def _stop_wish(self) -> int:
        if self.stop.interrupted:
            return _INTERRUPT
        return _STOP if self.stop.reason(self._reserve()) else _GO_ON

    def _wish(self) -> int:
        if stop := self._stop_wish():
            return stop
        every = self.t.experiment.trainer.checkpoint.every
        if self.failures:
            return _SAVE
        if isinstance(every, int):
            step = self.t.progress.step
            due = step % every == 0 and step > 0 and self.saved != (step, self.t.progress.validated)
        else:
            due = time.monotonic() - self.last_save >= every.total_seconds()
        return _SAVE if due else _GO_ON

    # ---- log -----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Log the last step whose numbers have not been read yet.

        Called after the next step has been handed to the device, so that the host waits for a step that is over or
        nearly so, while the device has the next one to do.
        """
        if self.pending is None:
            return
        report, row = self.pending
        self.pending = None
        loss, norm, skip, *channels = report.ready()
        row = {**row, "loss": loss, "grad_norm": norm}
        progress = self.t.progress
        progress.skipped = progress.skipped + 1 if skip else 0
        if skip:
            row["skipped"] = True
            self._blame(row["step"], report, channels)
        if self.monitor is not None:
            self.monitor.step(row)

    def _blame(self, step: int, report: StepReport, channels: list[float]) -> None:
        """Say which variable and which times made a step impossible, on every rank that saw it."""
        variables = self.t.variables
        outputs = Variables.channel_names(variables.outputs)
        names = [
            *(f"input {name}" for name in Variables.channel_names(variables.role("prognostic"))),
            *(f"forcing {name}" for name in Variables.channel_names(variables.role("dynamic_forcing"))),
            *(f"target {name}" for name in outputs),
            *(f"prediction of {name}" for name in outputs),
        ]
        bad = [name for name, x in zip(names, channels, strict=True) if not math.isfinite(x)]
        if not bad and not self.t.runtime.is_main:
            return
        times = self.t.store.times
        when = sorted({str(times[int(i)]) for index in report.index for i in index})
        log.warning(
            "step %d skipped: loss or gradient not finite; first offending: %s; samples at %s",
            step,
            bad[0] if bad else "the gradient",
            ", ".join(when),
        )

    # ---- validation ----------------------------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Validate with the EMA weights where there are any; False where a stop came in between."""
        t = self.t
        if self.validator is None and len(t.valid_loader):
            times = t.store.period(t.experiment.data.train)
            climatology = time_mean(t.store, t.variables, times, t.rows, t.runtime)
            names = Variables.channel_names(t.variables.outputs)
            self.validator = Validator(t.stepper, t.loss, t.runtime, names, climatology, t.amp)
        began = time.perf_counter()
        row: dict[str, Any] | None = {}
        if self.validator is not None:
            validator = self.validator
            t.stepper.eval()
            with t.ema.swapped_in() if t.ema is not None else nullcontext():
                spectral_norm.refresh(t.model)
                row = validator(t.valid_loader.batches(0), self._give_up)
                if row and self._forecasts_due():
                    row = self._forecast(row, validator.climatology)
            spectral_norm.refresh(t.model)
            t.stepper.train()
        if row is None:
            return False
        t.progress.validated = True
        if not row:
            log.warning("no validation sample: data.valid has no complete global batch")
            return True
        self.score = row["valid_loss"]
        if t.progress.best is None or self.score < t.progress.best:
            t.progress.best = self.score
        if self.monitor is not None:
            seconds = time.perf_counter() - began
            self.monitor.validation({"step": t.progress.step, "epoch": t.progress.epoch, **row, "seconds": seconds})
        return True

    def _give_up(self) -> bool:
        return self._agree(self._stop_wish()) > _GO_ON

    def _forecasts_due(self) -> bool:
        """Whether short forecasts go with this validation: at the end of an epoch, if the time for them is there."""
        t = self.t
        if t.forecasts is None or t.progress.position or not _due(t.experiment.trainer.monitor.every, t.progress.epoch):
            return False
        # A step of training costs about three of the model per sample; afterwards what they took is known.
        per_sample = self.trained / max(1, self.steps) / (t.accumulation * t.experiment.trainer.micro_batch_size)
        estimate = t.forecasts.steps * per_sample / (3 * t.experiment.data.forecast_len)
        due = t.runtime.broadcast(self.allowance.affords(self.trained, estimate))
        if not due:
            seconds, most = self.allowance.cost or estimate, 100 * self.allowance.share
            log.info(
                "short forecasts left out after epoch %d: another %.3g s is more than %g %% of the run so far",
                t.progress.epoch, seconds, most,
            )  # fmt: skip
        return bool(due)

    def _forecast(self, row: dict[str, Any], climatology: Tensor) -> dict[str, Any] | None:
        """`row` with the scores of short forecasts; None where a stop came in between."""
        assert self.t.forecasts is not None
        began = time.perf_counter()
        scores = self.t.forecasts(climatology, self._give_up)
        if scores is None:
            return None
        seconds = time.perf_counter() - began
        self.allowance.pay(seconds)
        return {**row, "forecast": {**scores, "seconds": seconds}}

    # ---- saves ---------------------------------------------------------------------------------------------------

    score: float | None = None

    def _save(self, must: bool = False) -> None:
        """Save this step; with `must`, return when it is on disk. Raises SaveFailed after three failures in a row."""
        t = self.t
        self._drain()
        score = self.score if t.progress.validated else None
        t.progress.seconds = self.before + time.monotonic() - self.begun
        while True:
            try:
                self.last_save = time.monotonic()
                t.save(score)
                if must:
                    t.manager.wait()
                self.saved = (t.progress.step, t.progress.validated)
                self.score = None
                if must:
                    self.failures = 0
                return
            except SaveFailed as error:
                self._failed(error)
                if not must:
                    return
                time.sleep(1.0)

    def _poll(self) -> None:
        """Move a save in flight on; one that failed is tried again at this boundary."""
        was = self.t.manager.in_flight
        try:
            self.t.manager.poll()
        except SaveFailed as error:
            self._failed(error)
            return
        if was and not self.t.manager.in_flight:
            self.failures = 0

    def _failed(self, error: SaveFailed) -> None:
        self.failures += 1
        self.saved = None
        if self.failures >= _SAVE_TRIES:
            raise error
        log.warning("%s; trying again (%d of %d)", error, self.failures + 1, _SAVE_TRIES)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
