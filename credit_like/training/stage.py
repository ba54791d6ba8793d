"""A phase of training with its keys, schedule, loss and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from credit_like import registry
from credit_like.checkpoint.errors import reading_metadata
from credit_like.checkpoint.manager import Checkpoint
from credit_like.errors import UserError
from credit_like.layout import accumulation
from credit_like.losses._mean import AreaLoss
from credit_like.schema.phases import Phase
from credit_like.schema.trainer import TrainerSection
from credit_like.state import Sample


class Batches(Protocol):
    """Interface of a loader, as far as training and validation use it."""

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches in an epoch."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Sample]:
        """Yield the micro-batches of an epoch from position `start` on."""

    def again(self, epoch: int, start: int, count: int) -> list[Sample]:
        """Return `count` micro-batches of an epoch from position `start` on once more, while `batches` continues."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a phase: their number, the micro-batches of each, and the learning rate of each."""

    section: TrainerSection
    accumulation: int
    """Micro-batches of this rank in an optimiser step."""
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.section.epochs

    def rate(self, step: int, losses: Sequence[float | None] = ()) -> float:
        """Return the learning rate of optimiser step `step` = 0, 1, … of the phase, after validations with these losses."""
        config, base = self.section.scheduler, self.section.optimizer.learning_rate
        scheduler = registry.of("scheduler", config)
        if hasattr(scheduler, "learning_rate_after"):
            rate: float = scheduler.learning_rate_after(config, base, step, self.total_steps, losses)
        else:
            rate = scheduler.learning_rate(config, base, step, self.total_steps)
        return rate


@dataclass(frozen=True)
class Stage:
    """A phase with its schedule, its loss on the device, and its training and validation samples."""

    phase: Phase
    schedule: Schedule
    loss: AreaLoss
    train_loader: Batches
    valid_loader: Batches

    @classmethod
    def of(cls, phase: Phase, loss: AreaLoss, train_loader: Batches, valid_loader: Batches, replicas: int) -> Stage:
        """Return a phase with its schedule.

        Raises UserError where the training samples are less than one global batch, or the schedule does not fit.
        """
        section = phase.experiment.trainer
        per_step = accumulation(section.global_batch_size, section.micro_batch_size, replicas)
        schedule = Schedule(section, per_step, len(train_loader) // per_step)
        if schedule.steps_per_epoch == 0:
            raise UserError(
                f"expected at least one global batch of {section.global_batch_size} training samples, got "
                f"{len(train_loader) * section.micro_batch_size * replicas}; change trainer.global_batch_size or data.train"
            )
        schedule.rate(0)
        return cls(phase, schedule, loss, train_loader, valid_loader)

    def step_of(self, epoch: int, position: int) -> int:
        """Return the optimiser steps of the phase before step `position` of an epoch."""
        return (epoch - self.phase.first_epoch) * self.schedule.steps_per_epoch + position


def stage_at(stages: Sequence[Stage], epoch: int) -> Stage:
    """Return the stage to which an epoch belongs, or the last one for an epoch after the end."""
    return next((stage for stage in stages if epoch < stage.phase.end), stages[-1])


def stage_of_last_step(stages: Sequence[Stage], epoch: int, position: int, number: int) -> Stage:
    """Return the stage of the newest of the steps taken before step `position` of an epoch, saved in phase `number`.

    A checkpoint at the end of a phase still has the optimiser state of that phase, and its validation is due. One that was
    saved in the phase that begins with this epoch had steps of it, which a larger batch has made part of a step to come.
    """
    if not position and number < len(stages) and stages[number].phase.first_epoch == epoch:
        return stages[number]
    return stage_at(stages, epoch if position or not epoch else epoch - 1)


def refuse_other_phases(checkpoint: Checkpoint, stages: Sequence[Stage], stage: Stage) -> None:
    """Raise UserError where phases have changed so that the newest step of a checkpoint is elsewhere in them, in `stage`.

    Its optimiser state and validation losses would be those of one phase, its schedule and samples those of another.
    """
    with reading_metadata(checkpoint.folder):
        number, trainer = checkpoint.phase, checkpoint.meta["experiment"]["trainer"]
        then = [int(phase.get("epochs", trainer["epochs"])) for phase in trainer.get("phases") or [trainer]]
    now = [each.schedule.section.epochs for each in stages]
    if (number, sum(then[:number])) != (stage.phase.number, stage.phase.first_epoch):
        raise UserError(
            f"trainer.phases: expected step {checkpoint.step} to stay in phase {number}, after {sum(then[:number])} epochs of "
            f"earlier phases (epochs were {_list(then)}), got epochs {_list(now)}, with which it is in phase {stage.phase.number}, "
            f"after {stage.phase.first_epoch}; undo this, or set another save_loc and start_from"
        )


def _list(epochs: Sequence[int]) -> str:
    return ", ".join(map(str, epochs))
