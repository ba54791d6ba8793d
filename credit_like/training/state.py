"""The state of a run: what is saved with every checkpoint and restored from it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import credit_like
from credit_like import registry, transforms
from credit_like.checkpoint import transfer
from credit_like.checkpoint.continuation import refuse_other
from credit_like.checkpoint.errors import reading_metadata
from credit_like.checkpoint.files import to_json
from credit_like.checkpoint.format import NAMES, Piece
from credit_like.checkpoint.manager import Checkpoint, CheckpointManager
from credit_like.checkpoint.rng import random_state, seed_everything, set_random_state
from credit_like.checkpoint.shards import beside, named_pieces, refuse_apart
from credit_like.context import Context
from credit_like.errors import UserError
from credit_like.layout import domain_text
from credit_like.naming import counted
from credit_like.nested import differences
from credit_like.nn import spectral_norm
from credit_like.parallel.apply import set_trained, unfrozen
from credit_like.parallel.tensor_copies import copied_over_tensor
from credit_like.parallel.unwrap import canonical_name, get_raw_model, named_parameters
from credit_like.schema.phases import Phase, phases, written_at
from credit_like.training.ema import Ema
from credit_like.training.groups import build_optimizer
from credit_like.training.step import Optimizer
from credit_like.variables import ROLES, Variables

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
    left: int | None = None
    """Epoch at which to resume the phase if it ended early; None otherwise."""
    losses: list[float | None] = field(default_factory=list)
    """Validation losses of the phase so far; None for one that is not finite."""
    seconds: float = 0.0
    """Wall-clock time in training so far, over all restarts."""
    trained: float = 0.0
    """Seconds in optimiser steps so far, over all restarts, on the main process."""
    forecasts: float = 0.0
    """Seconds in short forecasts so far, over all restarts, on the main process."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress that a checkpoint has saved. Raises TypeError or ValueError for values that are no progress."""
        # Checkpoints of earlier versions have the whole time alone, most of which is that of steps.
        # They have a `best` too, the lowest of the losses.
        progress = cls(**{"trained": saved.get("seconds", 0.0), **{k: v for k, v in saved.items() if k != "best"}})
        counts = (progress.step, progress.epoch, progress.position, progress.skipped, progress.left or 0)
        if not all(isinstance(count, int) and 0 <= count < 2**62 for count in counts):
            raise ValueError(f"expected counts of steps and epochs, got {counts}")
        for seconds in (progress.seconds, progress.trained, progress.forecasts):
            float(seconds)
        if not isinstance(progress.losses, list):
            raise ValueError(f"expected a list of validation losses, got {progress.losses}")
        return progress


class TrainingState:
    """Progress, weights, averaged weights, optimiser and random numbers of a run, as this rank holds them.

    Building it builds the optimiser and the average for the model of `context`, both as they are before the first step.
    """

    def __init__(self, context: Context, manager: CheckpointManager) -> None:
        self.context, self.manager = context, manager
        self.progress = Progress()
        self._phases = phases(context.experiment)
        self.model = get_raw_model(context.stepper.model)
        _refuse_unsaved("model.type", self.model.state_dict(keep_vars=True))
        trained = {name: parameter.requires_grad for name, parameter in named_parameters(self.model).items()}
        keys = [written_at(context.experiment, phase, ("trainer", "freeze")) for phase in self._phases]
        self._trained = [
            unfrozen(trained, phase.experiment.trainer.freeze, ".".join(map(str, key)))
            for phase, key in zip(self._phases, keys, strict=True)
        ]
        """The names of the parameters that each phase trains."""
        in_some = set().union(*self._trained)
        self.parameters = {name: p for name, p in named_parameters(self.model).items() if name in in_some}
        """The parameters that some phase trains, by name; `trained` are those of the phase that has begun."""
        self.copied = copied_over_tensor(self.parameters, context.runtime)
        """The parameters of which every tensor rank has a copy."""
        averaged = any(phase.experiment.trainer.use_ema for phase in self._phases)
        self.ema = Ema(self.parameters, 0.0) if averaged else None
        self.origin: dict[str, Any] | None = None
        """Where the weights came from with which the run began, if from another run (`transfer.Source.provenance`)."""
        self._plugins = registry.record(context.experiment.plugins)
        self.begin(self._phases[0])

    optimizer: Optimizer
    trained: dict[str, nn.Parameter]

    def begin(self, phase: Phase) -> None:
        """Begin a phase, with an optimiser state of zero. The average follows the weights in a phase without one.

        The model's wrapper is another one where other parameters are trained than before.
        """
        section = phase.experiment.trainer
        self.phase = phase
        names = self._trained[phase.number]
        if names != [name for name, parameter in self.parameters.items() if parameter.requires_grad]:
            self.context.stepper.model = set_trained(self.context.stepper.model, names)
        self.trained = {name: self.parameters[name] for name in names}
        self.optimizer = build_optimizer(section.optimizer, self.trained)
        for name, state in self.optimizer.state().items():
            _refuse_unsaved("trainer.optimizer.type", {f"{kind} of {name}": value for kind, value in state.items()})
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
        members = (runtime.ensemble_rank,) if runtime.ensemble_size > 1 else ()
        seed_everything(self.context.experiment.seed, step, runtime.dp_rank, runtime.domain_rank, *members)

    def start(self) -> None:
        """Begin a new run: seed the random numbers, and take the weights of `start_from` where there is one.

        Raises UserError where the source's weights or optimiser do not fit.
        """
        section, context = self.context.experiment.start_from, self.context
        self.seed(0)
        if section is None:
            spectral_norm.refresh(self.model)  # as `restore` does, to the bit: frozen layers keep this
            return
        source = transfer.Source.open(section, context.runtime)
        config = context.experiment.model
        channels = transfer.Channels.of(context.variables, context.experiment.data.history_len, config.predict)
        plan = transfer.plan(source, self.model, config, channels, section.missing)
        transfer.check_optimizer(section, source, plan, self.phase.experiment.trainer.optimizer.type)
        changes = transfer.load(source, plan, self.model, context.experiment.seed)
        spectral_norm.refresh(self.model)  # as `restore` does, to the bit: frozen layers keep this
        if section.optimizer:
            self._take_optimizer(source)
        if self.ema is not None:
            self.ema.restart(self.parameters)
        runtime = context.runtime
        self.origin = runtime.broadcast(source.provenance() if runtime.is_main else None)  # it reads a whole export
        log.info("starting from %s (step %s, %s weights)", source.path, source.step, source.weights)
        for note in (*plan.notes, *changes):
            log.info("start_from: %s", note)

    def _take_optimizer(self, source: transfer.Source) -> None:
        """Load the state of the source's optimiser. Raises UserError where it is that of another optimiser."""
        assert source.checkpoint is not None
        pieces = {name: piece for name, piece in self.pieces().items() if name.startswith("optimizer/")}
        # What is frozen here has no state, unlike in the source.
        whole = len(self.trained) == len(named_parameters(self.model))
        source.checkpoint.load(pieces, ("optimizer/",) if whole else ())

    def save(self, score: float | None = None) -> None:
        """Start a checkpoint of this step. Raises SaveFailed."""
        rank = self.context.runtime.rank
        random = {f"random/{rank}/{name}": Piece.whole(value) for name, value in random_state().items()}
        self.manager.save(self.progress.step, self.pieces() | random, self._meta(), score)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of any layout, whose newest step belongs to the phase that has begun.

        Raises UserError where its variables, statistics, model or optimiser are not those of this experiment.
        """
        meta, experiment = checkpoint.meta, self.context.experiment
        refuse_other(checkpoint, experiment, self.context.variables, self.context.statistics, self.context.store)
        refuse_apart(self.model, {n.removeprefix("model/") for n in checkpoint.names("model/")}, checkpoint.folder)
        averages = set(checkpoint.names("ema/"))
        pieces = {n: piece for n, piece in self.pieces().items() if not n.startswith("ema/") or n in averages}
        prefixes = ("model/", "optimizer/", "ema/") if self.ema is not None else ("model/", "optimizer/")
        try:
            checkpoint.load(pieces, prefixes)
        except UserError as error:
            with reading_metadata(checkpoint.folder):
                changed = [key for key, *_ in differences(meta["experiment"], experiment.to_dict())]
            raise UserError(f"{error} in {', '.join(changed) or 'no key of the experiment'}") from error
        added = {name: p for name, p in self.parameters.items() if f"ema/{name}" not in averages}
        if self.ema is not None and added:
            self.ema.restart(added)
            of = f" of {counted(len(added), 'parameter')} that no phase trained before" if averages else ""
            log.info(
                "step %d has no averaged weights%s; the moving average starts from the current weights",
                checkpoint.step,
                of,
            )
        with reading_metadata(checkpoint.folder):
            self.progress = Progress.of(meta["progress"])
            if self.progress.step != checkpoint.step:
                raise ValueError(f"expected the progress of step {checkpoint.step}, got that of {self.progress.step}")
            self.origin = meta.get("origin")
            # The position counts samples: with another batch size it moves to the start of the batch that has the next
            # one.
            samples = self.progress.position * int(meta["global_batch_size"])
            self.progress.position = samples // self.phase.experiment.trainer.global_batch_size
            changed = [key for key, *_ in differences(meta["experiment"], experiment.to_dict())]
            plugins = registry.changed(meta.get("plugins", []), self._plugins)
            layout = meta["layout"]
        if changed and self.context.runtime.is_main:
            log.warning("the experiment changed since step %d: %s", checkpoint.step, ", ".join(changed))
        if plugins and self.context.runtime.is_main:
            log.warning("plug-ins changed since step %d: %s", checkpoint.step, "; ".join(plugins))
        if layout == self._layout():
            mine = f"random/{self.context.runtime.rank}/"
            set_random_state({name.removeprefix(mine): checkpoint.read(name) for name in checkpoint.names(mine)})
        else:
            log.info("step %d was saved by the layout %s", checkpoint.step, layout)
            self.seed(self.progress.step)
        spectral_norm.refresh(self.model)

    def _meta(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint, with what a forecast needs besides the tensors."""
        context = self.context
        experiment, grid = context.experiment.to_dict(), context.store.grid
        return {
            **({"origin": self.origin} if self.origin is not None else {}),
            "progress": asdict(self.progress),
            "global_batch_size": self.phase.experiment.trainer.global_batch_size,
            **({"phase": self.phase.number} if len(self._phases) > 1 else {}),
            "experiment": experiment,
            "experiment_sha256": hashlib.sha256(to_json(experiment)).hexdigest(),
            "layout": self._layout(),
            "version": credit_like.__version__,
            "plugins": self._plugins,
            "normalisation": _describe_channels(context),
            "grid": {"latitude": grid.latitude.tolist(), "longitude": grid.longitude.tolist()},
        }

    def facts(self) -> dict[str, str]:
        """Return name → text of what must be the same on all ranks; paths of files may differ between nodes."""
        meta = self._meta()
        experiment = meta["experiment"]
        for path in ("source", "statistics"):
            experiment["data"].pop(path, None)
        plugins = [(plugin["name"], plugin["sha256"]) for plugin in meta["plugins"]]
        return {
            "version of credit_like": meta["version"],
            "version of torch": torch.__version__,
            "plugins": json.dumps(plugins),
            **{key: json.dumps(value, sort_keys=True) for key, value in experiment.items()},
            "statistics": json.dumps(meta["normalisation"]),
            "grid": json.dumps(meta["grid"]),
        }

    def _layout(self) -> dict[str, int | str]:
        runtime = self.context.runtime
        return {
            "world": runtime.world,
            "data": self.context.experiment.trainer.parallelism.data,
            "dp": runtime.dp_size,
            **({"ensemble": runtime.ensemble_size} if runtime.ensemble_size > 1 else {}),
            "tensor": runtime.tensor_size,
            "domain": runtime.domain_size if runtime.domain_shape[1] == 1 else domain_text(runtime.domain_shape),
        }


def _refuse_unsaved(key: str, state: Mapping[str, Any]) -> None:
    """Raise UserError for what a checkpoint cannot hold: anything but tensors of the types of `format.DTYPES`."""
    cure = ", and register a buffer that can be computed again with persistent=False" if key.startswith("model") else ""
    for name, value in state.items():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if kind not in NAMES:
            types = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES)
            raise UserError(
                f"{key}: expected state that a checkpoint can hold ({types}), got {canonical_name(name)} of type "
                f"{str(kind).removeprefix('torch.')}; hold complex numbers as pairs of real ones (torch.view_as_real){cure}"
            )


def _describe_channels(context: Context) -> dict[str, dict[str, list[Any]]]:
    """Return names, units, mean, std and change_std of every channel, by role, for forecasts without the statistics file.

    Channels of variables with a transform have it as text in `transform`; the numbers are those of the transformed values.
    Units, and those of levels, are empty where the data do not declare them.
    """
    store, result = context.store, {}
    for role in ROLES:
        variables = context.variables.role(role)
        mean, std, change = (part.tolist() for part in context.statistics.select(variables))
        result[role] = {
            "channels": Variables.channel_names(variables),
            "units": [store.attrs(v).get("units", "") for v in variables for _ in v.channels],
            "level_units": [store.level_units(v) if v.levels else "" for v in variables for _ in v.channels],
            "mean": mean,
            "std": std,
            "change_std": [None if x != x else x for x in change],
        }
        if any(functions := transforms.names(variables)):
            result[role]["transform"] = functions
    return result
