"""What a run consists of, from start to end; run.py says when things happen, step.py what a step does."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

import credit_like
from credit_like import registry
from credit_like.checkpoint.errors import Locked, SaveFailed
from credit_like.checkpoint.files import replace_file, to_json
from credit_like.checkpoint.format import Piece
from credit_like.checkpoint.lock import RunLock
from credit_like.checkpoint.manager import Checkpoint, CheckpointManager
from credit_like.checkpoint.rng import random_state, seed_everything, set_random_state
from credit_like.checkpoint.shards import beside, named_pieces
from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.losses._mean import AreaLoss
from credit_like.nn import spectral_norm
from credit_like.parallel.fsdp2 import fsdp2_dtype
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import dump_experiment
from credit_like.state import Sample
from credit_like.stepper import Stepper
from credit_like.training.ema import Ema
from credit_like.training.forecasts import ShortForecasts
from credit_like.training.monitor import Monitor, write_status
from credit_like.training.run import Outcome, Progress, Run
from credit_like.training.step import TrainStep
from credit_like.training.stop import StopRequest, seconds_left
from credit_like.variables import Variables

log = logging.getLogger(__name__)

_LOCK_PATIENCE = 60.0
"""Seconds to wait for the lock of a predecessor that is being ended, as when a batch system starts a job again."""


class Batches(Protocol):
    """What the trainer asks of a loader."""

    def __len__(self) -> int: ...
    def batches(self, epoch: int, start: int = 0) -> Iterator[Sample]: ...


class Trainer:
    """Trains the stepper's model as the experiment says, from wherever the run in `experiment.save_loc` stands."""

    def __init__(
        self,
        experiment: Experiment,
        stepper: Stepper,
        loss: AreaLoss,
        train_loader: Batches,
        valid_loader: Batches,
        runtime: Runtime,
        variables: Variables,
        store: FieldStore,
        statistics: Statistics,
        rows: slice = slice(None),
    ) -> None:
        section = experiment.trainer
        self.experiment, self.stepper, self.runtime = experiment, stepper, runtime
        self.train_loader, self.valid_loader = train_loader, valid_loader
        self.variables, self.store, self.statistics, self.rows = variables, store, statistics, rows
        self.loss = loss
        self.folder = Path(experiment.save_loc)
        self.accumulation = accumulation(section.global_batch_size, section.micro_batch_size, runtime.dp_size)
        self.steps_per_epoch = len(train_loader) // self.accumulation
        if self.steps_per_epoch == 0:
            raise UserError(
                f"expected at least one global batch of {section.global_batch_size} training samples, got "
                f"{len(train_loader) * section.micro_batch_size * runtime.dp_size}; "
                "change trainer.global_batch_size or data.train"
            )
        self.total_steps = self.steps_per_epoch * section.epochs
        self.model = get_raw_model(stepper.model)
        self.parameters = {canonical_name(n): p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = registry.of("optimizer", section.optimizer).build(section.optimizer, self.parameters)
        self.scheduler = registry.of("scheduler", section.scheduler)
        self.ema = Ema(self.parameters, section.ema_decay) if section.use_ema else None
        # Where FSDP2 has a precision policy, autocast would cast what that keeps in fp32. What was applied counts: a single
        # rank shards nothing, whatever `parallelism.data` says.
        policy = fsdp2_dtype(self.model)
        self.amp = section.amp and policy is None
        self.precision = _precision(policy, self.amp)
        self.forecasts = None
        if section.monitor.every:
            self.forecasts = ShortForecasts(experiment, stepper, runtime, variables, store, statistics, rows, self.amp)
        self.train_step = TrainStep(
            stepper,
            loss,
            self.optimizer,
            self.parameters,
            self.ema,
            runtime,
            amp=self.amp,
            max_norm=section.grad_max_norm,
            shift_seed=experiment.seed if section.shift_longitude else None,
            accumulate=self._communicate,
        )
        self.progress = Progress()
        self.plugins = registry.record(experiment.plugins)
        self.manager = CheckpointManager(
            self.folder / "checkpoints", section.checkpoint.keep, section.checkpoint.async_, runtime
        )
        self.rate(0)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def fit(self) -> Outcome:
        """Train to the end, or until something asks to stop; with a checkpoint in either case.

        Raises Locked where another process trains in the same folder or it cannot be written; any other error leaves
        `failed` in status.json and the checkpoints before it as they are.
        """
        if not self.parameters:
            raise UserError(
                f"model.type: expected a model to train, got {self.experiment.model.type}, which has no weights"
            )
        with ExitStack() as stack:
            self._lock(stack)
            limit = seconds_left() if self.runtime.is_main else None
            stop = stack.enter_context(StopRequest(self.experiment.trainer.stop_after, limit))
            monitor = None
            if self.runtime.is_main:
                monitor = Monitor(self.folder, self.total_steps, self.precision)
                stack.callback(monitor.close)
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

    def _record_failure(self, error: BaseException) -> None:
        """Write status.json, on the rank that failed first: the main process may be waiting for it."""
        step = self.progress.step
        # The first cause is what matters, also where the disk is what failed.
        with suppress(OSError):
            if isinstance(error, KeyboardInterrupt):
                if self.runtime.is_main:
                    write_status(
                        self.folder, "continue", step, "interrupted without a checkpoint of this step", self.precision
                    )
                return
            cause = self.runtime.first_cause(error)
            if cause.rank == self.runtime.rank:
                reason = str(cause) if self.runtime.world > 1 else cause.message
                write_status(self.folder, "failed", step, reason, self.precision)

    def _report(self, outcome: Outcome) -> None:
        stopped = outcome.state == "continue"
        log.log(
            logging.ERROR if outcome.state == "failed" else logging.INFO,
            "%s at step %d of %d%s%s",
            "stopped" if stopped else outcome.state,
            outcome.step,
            self.total_steps,
            f" ({outcome.reason})" if outcome.reason else "",
            "; the same command continues" if stopped else "",
        )

    def _go(self, stop: StopRequest, monitor: Monitor | None) -> Outcome:
        try:
            return Run(self, stop, monitor).go()
        except SaveFailed as error:
            # All ranks have it, so all end alike; the checkpoints before it are whole.
            return Outcome("failed", self.progress.step, str(error))

    def _lock(self, stack: ExitStack) -> None:
        """The main process holds the folder for all; the refusal reaches all."""
        refused = None
        if self.runtime.is_main:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(RunLock(self.folder, _LOCK_PATIENCE))
                replace_file(self.folder / "experiment.yml", dump_experiment(self.experiment).encode())
            except Locked as error:
                refused = str(error)
            except OSError as error:
                refused = (
                    f"save_loc: expected a folder that can be written, got {self.folder}: {error}; change save_loc"
                )
        refused = self.runtime.broadcast(refused)
        if refused:
            raise Locked(refused)

    def rate(self, step: int) -> float:
        section = self.experiment.trainer
        rate: float = self.scheduler.learning_rate(
            section.scheduler, section.optimizer.learning_rate, step, self.total_steps
        )
        return rate

    def _communicate(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients over ranks only with the last of the accumulated micro-batches."""
        wrapped: Any = self.stepper.model
        module: Any
        for module in wrapped.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(last, recurse=False)
        if not last and hasattr(wrapped, "no_sync"):
            context: AbstractContextManager[None] = wrapped.no_sync()
            return context
        return nullcontext()

    # ---- what is saved -----------------------------------------------------------------------------------------------

    def pieces(self) -> dict[str, Piece]:
        """Everything that changes in training: model, EMA, optimiser; live, as this rank holds it."""
        model = named_pieces(self.model)
        result = {f"model/{name}": piece for name, piece in model.items()}
        if self.ema is not None:
            result |= {f"ema/{name}": beside(model[name], average) for name, average in self.ema.average.items()}
        for name, state in self.optimizer.state().items():
            result |= {f"optimizer/{kind}/{name}": beside(model[name], value) for kind, value in state.items()}
        return result

    def _random(self) -> dict[str, Piece]:
        return {f"random/{self.runtime.rank}/{k}": Piece.whole(v) for k, v in random_state().items()}

    def save(self, score: float | None = None) -> None:
        """Start a checkpoint of this step. Raises SaveFailed."""
        experiment = self.experiment.to_dict()
        meta = {
            "progress": asdict(self.progress),
            "global_batch_size": self.experiment.trainer.global_batch_size,
            "experiment": experiment,
            "experiment_sha256": hashlib.sha256(to_json(experiment)).hexdigest(),
            "layout": self._layout(),
            "version": credit_like.__version__,
            "plugins": self.plugins,
            "normalisation": describe_channels(self.variables, self.statistics),
            "grid": {"latitude": self.store.grid.latitude.tolist(), "longitude": self.store.grid.longitude.tolist()},
        }
        self.manager.save(self.progress.step, self.pieces() | self._random(), meta, score)

    def _layout(self) -> dict[str, int | str]:
        runtime = self.runtime
        return {
            "world": runtime.world,
            "data": self.experiment.trainer.parallelism.data,
            "dp": runtime.dp_size,
            "tensor": runtime.tensor_size,
            "domain": runtime.domain_size,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of any layout.

        Raises UserError where its tensors are not those of this experiment's model and optimiser.
        """
        prefixes = ("model/", "optimizer/", "ema/") if self.ema is not None else ("model/", "optimizer/")
        checkpoint.load(self.pieces(), prefixes)
        meta = checkpoint.meta
        self.progress = Progress(**meta["progress"])
        if changed := _differences(meta["experiment"], self.experiment.to_dict()):
            log.warning("the experiment changed since step %d: %s", checkpoint.step, ", ".join(changed))
        if plugins := _changed_plugins(meta.get("plugins", []), self.plugins):
            log.warning("plug-ins changed since step %d: %s", checkpoint.step, "; ".join(plugins))
        # The position counts samples: with another batch size it moves to the start of the batch that has the next one.
        samples = self.progress.position * meta["global_batch_size"]
        self.progress.position = samples // self.experiment.trainer.global_batch_size
        if meta["layout"] == self._layout():
            mine = f"random/{self.runtime.rank}/"
            set_random_state({name.removeprefix(mine): checkpoint.read(name) for name in checkpoint.names(mine)})
        else:
            log.info("step %d was saved by the layout %s", checkpoint.step, meta["layout"])
            self.seed(self.progress.step)
        spectral_norm.refresh(self.model)

    def seed(self, step: int) -> None:
        """Tensor ranks share a sample and what is random about it."""
        seed_everything(self.experiment.seed, step, self.runtime.dp_rank, self.runtime.domain_rank)


def _precision(policy: torch.dtype | None, autocast: bool) -> str:
    """Return what a model computes in, and by what: FSDP2's policy for parameters, autocast or neither."""
    if autocast:
        return "bfloat16 (autocast)"
    return "bfloat16 (FSDP2 policy)" if policy == torch.bfloat16 else "float32"


def accumulation(global_batch: int, micro_batch: int, dp: int) -> int:
    """Micro-batches per replica and optimiser step. Raises UserError where it does not divide."""
    if global_batch % (micro_batch * dp):
        raise UserError(
            f"trainer.global_batch_size: expected a multiple of micro_batch_size × data-parallel replicas = "
            f"{micro_batch} × {dp} = {micro_batch * dp}, got {global_batch}; change one of them"
        )
    return global_batch // (micro_batch * dp)


def describe_channels(variables: Variables, statistics: Statistics) -> dict[str, dict[str, list[Any]]]:
    """Names, mean, std and change_std of every channel, by role: what a forecast without this package needs to know."""
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
    """Folders and packages of plug-ins whose files are not what they were; where they lie does not count."""

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
    """Keys whose values differ between two experiments."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(set(before) | set(after))
        return [d for k in keys for d in _differences(before.get(k), after.get(k), f"{at}.{k}" if at else k)]
    return [] if before == after else [at]
