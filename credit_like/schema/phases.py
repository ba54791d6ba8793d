"""The phases of a training, each as a separate experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from credit_like.schema.errors import Path
from credit_like.schema.experiment import Experiment


@dataclass(frozen=True)
class Phase:
    """A part of a training, with the values of all keys during it."""

    number: int
    """Position in `trainer.phases`, from 0."""
    first_epoch: int
    experiment: Experiment
    """The experiment with the keys that the phase changes, and without `trainer.phases`."""

    @property
    def end(self) -> int:
        """Epoch at which the next phase begins."""
        return self.first_epoch + self.experiment.trainer.epochs


def phases(experiment: Experiment) -> tuple[Phase, ...]:
    """Return the phases of an experiment in order; without `trainer.phases`, the whole training as one."""
    trainer = experiment.trainer
    if not trainer.phases:
        return (Phase(0, 0, experiment),)
    result: list[Phase] = []
    for number, section in enumerate(trainer.phases):
        changed: dict[str, Any] = {key: getattr(section, key) for key in section.model_fields_set}
        update: dict[str, Any] = {}
        if "loss" in changed:
            update["loss"] = changed.pop("loss")
        if "forecast_len" in changed:
            update["data"] = experiment.data.model_copy(update={"forecast_len": changed.pop("forecast_len")})
        update["trainer"] = trainer.model_copy(update={**changed, "phases": None})
        first = result[-1].end if result else 0
        result.append(Phase(number, first, experiment.model_copy(update=update)))
    return tuple(result)


def always_frozen(experiment: Experiment) -> tuple[str, ...]:
    """Return the patterns of parameters that are in `trainer.freeze` of every phase."""
    first, *others = (phase.experiment.trainer.freeze for phase in phases(experiment))
    return tuple(pattern for pattern in first if all(pattern in freeze for freeze in others))


def hungriest(experiment: Experiment) -> Experiment:
    """Return the experiment of the phase whose forecasts take the most memory; without `trainer.phases`, the experiment itself."""
    return max(_hungry(experiment), key=_hunger)


def hungry(experiment: Experiment) -> list[Experiment]:
    """Return the experiments of the phases of which any may take the most memory, as a simulation would tell.

    Left out are phases beside which another one has the same optimiser and loss, trains as many parameters, and has nothing that
    is smaller.
    """
    kept: list[Experiment] = []
    for each in sorted(_hungry(experiment), key=_hunger, reverse=True):
        if not any(_takes_as_much(other, each) for other in kept):
            kept.append(each)
    return kept


def _hungry(experiment: Experiment) -> list[Experiment]:
    """Return the experiments of all phases, each with the average of the weights if any has one: all of them keep it."""
    found = [phase.experiment for phase in phases(experiment)]
    use_ema = any(each.trainer.use_ema for each in found)
    if all(each.trainer.use_ema == use_ema for each in found):
        return found
    return [each.model_copy(update={"trainer": each.trainer.model_copy(update={"use_ema": use_ema})}) for each in found]


def _size(experiment: Experiment) -> tuple[int, int, int]:
    """Return the forecasts whose activations are kept at once, the samples, and the micro-batches of all ranks."""
    data, trainer = experiment.data, experiment.trainer
    at_once = min(data.forecast_len, trainer.backprop_steps or data.forecast_len)
    micro_batch = trainer.micro_batch_size * trainer.members
    return (
        micro_batch * at_once,
        micro_batch * data.forecast_len,
        trainer.global_batch_size // trainer.micro_batch_size,
    )


def _hunger(experiment: Experiment) -> tuple[tuple[int, int, int], int]:
    """Return `_size`, and after it how few patterns of parameters are frozen."""
    return _size(experiment), -len(experiment.trainer.freeze)


def _takes_as_much(one: Experiment, other: Experiment) -> bool:
    """Return whether a phase takes the memory of another one, or more."""
    alike = one.trainer.optimizer.type == other.trainer.optimizer.type and one.loss == other.loss
    trained = set(one.trainer.freeze) <= set(other.trainer.freeze)
    return alike and trained and all(a >= b for a, b in zip(_size(one), _size(other), strict=True))


def written_at(experiment: Experiment, phase: Phase, path: Path) -> Path:
    """Return where a key of a phase's experiment is written: in the phase, if it sets the key, or outside."""
    if not experiment.trainer.phases:
        return path
    own = experiment.trainer.phases[phase.number].model_fields_set
    inside = path[1:] if path[:1] in (("trainer",), ("data",)) else path
    return ("trainer", "phases", phase.number, *inside) if inside and inside[0] in own else path
