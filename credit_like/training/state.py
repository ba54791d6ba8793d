"""The state of a run: what is saved with every checkpoint and restored from it."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, dataclass, field
from typing import Any

import credit_like
from credit_like import registry
from credit_like.checkpoint.files import to_json
from credit_like.checkpoint.format import Piece
from credit_like.checkpoint.manager import Checkpoint, CheckpointManager
from credit_like.checkpoint.rng import random_state, seed_everything, set_random_state
from credit_like.checkpoint.shards import beside, named_pieces
from credit_like.context import Context
from credit_like.data.statistics import Statistics
from credit_like.nn import spectral_norm
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.phases import Phase, phases
from credit_like.training.ema import Ema
from credit_like.training.step import Optimizer
from credit_like.variables import Variables

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where a run is. With the tensors of a checkpoint, this is all that a run needs to continue bit by bit."""

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
    """Lowest validation loss of the phase."""
    losses: list[float | None] = field(default_factory=list)
    """Validation losses of the phase so far; None for one that is not finite."""
    seconds: float = 0.0
    """Wall-clock time in training so far, over all restarts."""


class TrainingState:
    """Progress, weights, averaged weights, optimiser and random numbers of a run, as this rank holds them.

    Building it builds the optimiser and the average for the model of `context`, both as they are before the first step.
    """

    def __init__(self, context: Context, manager: CheckpointManager) -> None:
        self.context, self.manager = context, manager
        self.progress = Progress()
        self._phases = phases(context.experiment)
        self.model = get_raw_model(context.stepper.model)
        self.parameters = {canonical_name(n): p for n, p in self.model.named_parameters() if p.requires_grad}
        averaged = any(phase.experiment.trainer.use_ema for phase in self._phases)
        self.ema = Ema(self.parameters, 0.0) if averaged else None
        self._plugins = registry.record(context.experiment.plugins)
        self.begin(self._phases[0])

    optimizer: Optimizer

    def begin(self, phase: Phase) -> None:
        """Begin a phase, with an optimiser state of zero. The average follows the weights in a phase without one."""
        section = phase.experiment.trainer
        self.phase = phase
        self.optimizer = registry.of("optimizer", section.optimizer).build(section.optimizer, self.parameters)
        if self.ema is not None:
            self.ema.decay = section.ema_decay if section.use_ema else 0.0

    def pieces(self) -> dict[str, Piece]:
        """Return every tensor that training changes, by name: the live tensors, as this rank holds them."""
        model = named_pieces(self.model)
        result = {f"model/{name}": piece for name, piece in model.items()}
        if self.ema is not None:
            result |= {f"ema/{name}": beside(model[name], average) for name, average in self.ema.average.items()}
        for name, state in self.optimizer.state().items():
            result |= {f"optimizer/{kind}/{name}": beside(model[name], value) for kind, value in state.items()}
        return result

    def seed(self, step: int) -> None:
        """Seed all random numbers for `step`; tensor ranks share a sample and everything random about it."""
        runtime = self.context.runtime
        seed_everything(self.context.experiment.seed, step, runtime.dp_rank, runtime.domain_rank)

    def save(self, score: float | None = None) -> None:
        """Start a checkpoint of this step. Raises SaveFailed."""
        rank = self.context.runtime.rank
        random = {f"random/{rank}/{name}": Piece.whole(value) for name, value in random_state().items()}
        self.manager.save(self.progress.step, self.pieces() | random, self._meta(), score)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of any layout, whose newest step belongs to the phase that has begun.

        Raises UserError where its tensors are not those of this experiment's model and optimiser.
        """
        prefixes = ("model/", "optimizer/", "ema/") if self.ema is not None else ("model/", "optimizer/")
        checkpoint.load(self.pieces(), prefixes)
        meta, experiment = checkpoint.meta, self.context.experiment
        self.progress = Progress(**meta["progress"])
        if changed := _differences(meta["experiment"], experiment.to_dict()):
            log.warning("the experiment changed since step %d: %s", checkpoint.step, ", ".join(changed))
        if plugins := _changed_plugins(meta.get("plugins", []), self._plugins):
            log.warning("plug-ins changed since step %d: %s", checkpoint.step, "; ".join(plugins))
        # The position counts samples: with another batch size it moves to the start of the batch that has the next one.
        samples = self.progress.position * meta["global_batch_size"]
        self.progress.position = samples // self.phase.experiment.trainer.global_batch_size
        if meta["layout"] == self._layout():
            mine = f"random/{self.context.runtime.rank}/"
            set_random_state({name.removeprefix(mine): checkpoint.read(name) for name in checkpoint.names(mine)})
        else:
            log.info("step %d was saved by the layout %s", checkpoint.step, meta["layout"])
            self.seed(self.progress.step)
        spectral_norm.refresh(self.model)

    def _meta(self) -> dict[str, Any]:
        """Return what a checkpoint says of itself, and what a forecast from it needs besides the tensors."""
        context = self.context
        experiment, grid = context.experiment.to_dict(), context.store.grid
        return {
            "progress": asdict(self.progress),
            "global_batch_size": self.phase.experiment.trainer.global_batch_size,
            **({"phase": self.phase.number} if len(self._phases) > 1 else {}),
            "experiment": experiment,
            "experiment_sha256": hashlib.sha256(to_json(experiment)).hexdigest(),
            "layout": self._layout(),
            "version": credit_like.__version__,
            "plugins": self._plugins,
            "normalisation": _describe_channels(context.variables, context.statistics),
            "grid": {"latitude": grid.latitude.tolist(), "longitude": grid.longitude.tolist()},
        }

    def _layout(self) -> dict[str, int | str]:
        runtime = self.context.runtime
        return {
            "world": runtime.world,
            "data": self.context.experiment.trainer.parallelism.data,
            "dp": runtime.dp_size,
            "tensor": runtime.tensor_size,
            "domain": runtime.domain_size,
        }


def _describe_channels(variables: Variables, statistics: Statistics) -> dict[str, dict[str, list[Any]]]:
    """Return names, mean, std and change_std of every channel, by role, for forecasts without the statistics file."""
    result = {}
    for role in ("prognostic", "diagnostic", "dynamic_forcing", "static"):
        mean, std, change = (part.tolist() for part in statistics.select(variables.role(role)))
        result[role] = {
            "channels": Variables.channel_names(variables.role(role)),
            "mean": mean,
            "std": std,
            "change_std": [None if x != x else x for x in change],
        }
    return result


def _changed_plugins(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """List folders and packages of plug-ins whose files have changed, wherever they lie."""

    def shown(record: dict[str, Any] | None) -> str:
        if record is None:
            return "none"
        return f"{record['version'] or 'no version'}, sha256 {record['sha256'][:12]}"

    was, now = ({record["name"]: record for record in records} for records in (before, after))
    return [
        f"{name} ({shown(was.get(name))} → {shown(now.get(name))})"
        for name in sorted(was.keys() | now.keys())
        if (was.get(name) or {}).get("sha256") != (now.get(name) or {}).get("sha256")
    ]


def _differences(before: Any, after: Any, at: str = "") -> list[str]:
    """List the keys whose values differ between two experiments."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(set(before) | set(after))
        return [d for k in keys for d in _differences(before.get(k), after.get(k), f"{at}.{k}" if at else k)]
    return [] if before == after else [at]
