"""Assembly of data, model, training, forecasts and scores for each command; they are connected nowhere else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from credit_like import registry
from credit_like.check.corrections import refuse_unshareable as refuse_unshareable_corrections
from credit_like.checkpoint import transfer
from credit_like.checkpoint.clear import clear_run
from credit_like.checkpoint.continuation import refuse_other
from credit_like.checkpoint.errors import DamagedCheckpoint, reading_metadata
from credit_like.checkpoint.manager import Checkpoint, CheckpointManager, is_removed
from credit_like.checkpoint.shards import named_pieces, refuse_apart
from credit_like.context import Context
from credit_like.data.loading.loader import Loader
from credit_like.data.loading.windows import Windows
from credit_like.data.statistics import Statistics, fit_statistics, refuse_long_fit
from credit_like.data.store import FieldStore, open_store
from credit_like.data.stored_statistics import stored_statistics
from credit_like.errors import RunError, UserError
from credit_like.evaluation.derived import scored_variables, training_store
from credit_like.evaluation.evaluate import check_results
from credit_like.evaluation.evaluate import evaluate as score
from credit_like.evaluation.frames import save_scores
from credit_like.evaluation.needs import open_truth
from credit_like.evaluation.results import evaluation_folder, save_results
from credit_like.evaluation.scorecard import print_scorecard
from credit_like.inference.forecast import write_forecasts
from credit_like.inference.paths import forecast_path
from credit_like.launch.chain import best_checkpoint
from credit_like.losses import LossConfig
from credit_like.losses._mean import AreaLoss
from credit_like.losses._trial import Shared, refuse_unshareable
from credit_like.models import build_model
from credit_like.naming import counted
from credit_like.nn import spectral_norm
from credit_like.parallel import blame, foreign, hang
from credit_like.parallel.apply import freeze_parameters, is_compiled, materialise, own_part, parallelise
from credit_like.parallel.device import pick_device, set_deterministic, set_precision, unused_gpu
from credit_like.parallel.environment import read_environment, restarts
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.threads import set_threads
from credit_like.schema.checks import NO_OFFLOAD
from credit_like.schema.data import Periods
from credit_like.schema.experiment import Experiment
from credit_like.schema.phases import Phase, always_frozen, phases
from credit_like.schema.places import has_checkpoints
from credit_like.schema.trainer import Parallelism
from credit_like.training.stage import Batches, Stage
from credit_like.training.trainer import Trainer, record_failed_start
from credit_like.variables import Variables

log = logging.getLogger(__name__)


def build_context(experiment: Experiment, runtime: Runtime, train: bool = True) -> Context:
    """Build variables, store, model (on meta, then parallel), statistics, weights and stepper, in this order."""
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    model = parallel_model(experiment, variables, store, runtime, train)
    statistics = load_statistics(experiment, store, variables, runtime)
    context = attach_weights(model, experiment, runtime, variables, store, statistics)
    refuse_unshareable_corrections(context)
    return context


def parallel_model(
    experiment: Experiment, variables: Variables, store: FieldStore, runtime: Runtime, train: bool = True
) -> nn.Module:
    """Return this rank's part of the model, parallelised but without values.

    Raises UserError where a degree of the layout does not fit the model.
    """
    with torch.device("meta"):
        model = build_model(experiment, variables, store.grid.height, store.grid.width)
    if train and runtime.is_main:
        if experiment.start_from is None and not has_checkpoints(experiment.save_loc):
            foreign.warn_of_initial_values(model)
        if experiment.trainer.global_batch_size > experiment.trainer.micro_batch_size:
            foreign.warn_of_samples(model)
    if experiment.start_from is not None:
        freeze_parameters(model, experiment.start_from.freeze)
    # `TrainingState` freezes what only some phases freeze, in these.
    freeze_parameters(model, always_frozen(experiment), "trainer.freeze")
    return parallelise(model, experiment.trainer, runtime, train)


def attach_weights(
    model: nn.Module,
    experiment: Experiment,
    runtime: Runtime,
    variables: Variables,
    store: FieldStore,
    statistics: Statistics,
    materialise: Callable[[nn.Module, Runtime, int], nn.Module] = materialise,
) -> Context:
    """Add weights, physics and normalisation to a model without values.

    A simulation passes its own `materialise`.
    """
    model = materialise(model, runtime, experiment.seed)
    part = own_part(model, store.grid.height)
    context = Context.of(model, experiment, runtime, variables, store, statistics, *part)
    if is_compiled(experiment.trainer, runtime.device):
        context.stepper.compile_arithmetic()
    return context


def load_statistics(experiment: Experiment, store: FieldStore, variables: Variables, runtime: Runtime) -> Statistics:
    """Return the statistics, read from the experiment's file or from `save_loc/statistics.nc`.

    Where the experiment names no file and none has been written yet, the main process fits them first, or takes those that
    the source holds. A run that starts from another one has a file of its own in either case: the channels of both keep the
    normalisation of the source, also if `preprocess` has written the file.
    Raises UserError where the experiment names a file that does not exist, where the file or the source's weights are of other
    data (`Statistics.refuse_other_data`), and where several ranks would wait for the main process to fit them (`refuse_long_fit`).
    """
    path, begun = experiment.statistics_file, has_checkpoints(experiment.save_loc)
    if runtime.is_main:
        source = None
        if experiment.start_from is not None and not (begun and path.exists()):
            source = transfer.Source.open(experiment.start_from)
            if not begun:
                transfer.refuse_other_units(source, store)
        own = Statistics.load(path, store) if source is not None and path.exists() else None
        if not path.exists() or (own and source and not _is_adopted(own, source)):
            if own is None or "adopted_from" in own.dataset.attrs:
                own = _new_statistics(experiment, store, variables, runtime, path)
            _adopted(own, source, experiment).save(path)
    runtime.barrier()
    statistics = Statistics.load(path, store)
    statistics.refuse_other_data(store, variables, experiment.data, path, begun)
    return statistics


def _is_adopted(statistics: Statistics, source: transfer.Source) -> bool:
    """Return whether the statistics are those of a source; all checkpoints of a run have the same."""
    adopted = statistics.dataset.attrs.get("adopted_from")
    return adopted is not None and (
        Path(adopted) == source.path or (Path(adopted).parent == source.path.parent and source.path.is_dir())
    )


def _adopted(statistics: Statistics, source: transfer.Source | None, experiment: Experiment) -> Statistics:
    """Return statistics with those of the source, if there is one, for the channels that it has."""
    if source is None:
        return statistics
    adopted, notes = transfer.adopt(statistics, source)
    if experiment.data.statistics and not adopted.dataset.equals(statistics.dataset):
        log.warning(
            "start_from: variables that the source has keep its statistics; those of data.statistics are for the others"
        )
    for note in notes:
        log.warning("start_from: %s", note)
    return adopted


def _new_statistics(
    experiment: Experiment, store: FieldStore, variables: Variables, runtime: Runtime, path: Path
) -> Statistics:
    """Return the statistics of the experiment's file, else those that the source holds, else fitted ones."""
    given = experiment.data.statistics
    if given:
        if not os.path.exists(given):
            raise UserError(
                f"data.statistics: expected a file, got nothing at {given}; run `credit-like preprocess` first"
            )
        return Statistics.load(given, store)
    stored = stored_statistics(store, variables, experiment.data)
    if stored is not None:
        return stored
    if runtime.world > 1:
        refuse_long_fit(store, variables, experiment.data, path)
    return fit_statistics(store, variables, experiment.data)


def build_loader(
    context: Context, periods: Periods, shuffle: bool, batches: int = 0, experiment: Experiment | None = None
) -> Loader:
    """Return this rank's loader of micro-batches, over the windows of `periods` that have all their data.

    `experiment` is that of a phase, by default the whole one.
    """
    experiment, runtime = experiment or context.experiment, context.runtime
    data, trainer = experiment.data, experiment.trainer
    windows = Windows(
        context.store,
        context.variables,
        periods,
        history_len=data.history_len,
        forecast_len=data.forecast_len,
        missing_times=context.statistics.missing_times,
        rows=context.rows,
        columns=context.columns,
        mask=context.statistics.mask(context.variables.outputs),
    )
    return Loader(
        windows,
        seed=context.experiment.seed,
        micro_batch_size=trainer.micro_batch_size,
        global_batch_size=trainer.global_batch_size,
        dp_rank=runtime.dp_rank,
        dp_size=runtime.dp_size,
        num_workers=trainer.loader.num_workers,
        prefetch_factor=trainer.loader.prefetch_factor,
        shuffle=shuffle,
        batches_per_epoch=batches,
        pin_memory=runtime.device.type == "cuda",
    )


def build_trainer(context: Context, loaders: tuple[Batches, Batches] | None = None) -> Trainer:
    """Build the loss, the training and validation loaders of every phase, and the trainer."""
    losses: list[AreaLoss] = []
    return Trainer(context, [_stage(context, phase, loaders, losses) for phase in phases(context.experiment)])


def _stage(context: Context, phase: Phase, loaders: tuple[Batches, Batches] | None, losses: list[AreaLoss]) -> Stage:
    experiment, trainer = phase.experiment, phase.experiment.trainer
    train_loader, valid_loader = loaders or (
        build_loader(context, experiment.data.train, True, trainer.batches_per_epoch, experiment),
        build_loader(context, experiment.data.valid, False, trainer.valid_batches, experiment),
    )
    if loaders is None:
        domain = context.runtime.domain_shape
        shared = Shared(trainer.global_batch_size > trainer.micro_batch_size, rows=domain[0] > 1, columns=domain[1] > 1)
        grid, channels = context.store.grid, sum(map(len, context.variables.outputs))
        refuse_unshareable(
            experiment.loss, channels, (grid.height, grid.width), trainer.members, shared, context.runtime.device
        )
    loss = _loss(context, experiment.loss, losses)
    return Stage.of(phase, loss, train_loader, valid_loader, context.runtime.dp_size)


def _loss(context: Context, config: LossConfig, made: list[AreaLoss]) -> AreaLoss:
    """Return the loss of a phase, on the device: the one of an earlier phase that is the same, else a new one, added to `made`."""
    for loss in made:
        if loss.config == config:
            return loss
    runtime = context.runtime
    others = runtime.from_other_members if runtime.ensemble_size > 1 else None
    loss = AreaLoss(
        config,
        context.variables,
        context.statistics,
        context.store.grid,
        context.rows,
        others,
        context.columns,
        context.whole_rows,
    ).to(runtime.device)
    made.append(loss)
    return loss


def chosen_checkpoint(experiment: Experiment, runtime: Runtime) -> Checkpoint:
    """Return the checkpoint that `inference.checkpoint` names. Raises UserError where the run does not have it."""
    checkpoint = _chosen(experiment, runtime)
    if checkpoint is None:
        folder = Path(experiment.save_loc) / "checkpoints"
        raise UserError(f"expected a checkpoint in {folder}, got none; run `credit-like train` first")
    return checkpoint


def _chosen(experiment: Experiment, runtime: Runtime) -> Checkpoint | None:
    """Return the checkpoint that `inference.checkpoint` selects; None where the newest is asked for and there is none.

    Raises UserError where the run does not have the checkpoint, or has only damaged ones.
    """
    manager = CheckpointManager(Path(experiment.save_loc) / "checkpoints", runtime=runtime)
    which = experiment.inference.checkpoint
    if which == "newest":
        return manager.latest()
    step = _best(experiment, runtime) if which == "best" else int(which)
    while True:
        try:
            return manager.at(step)
        except UserError as error:
            if which != "best" or not manager.is_removed(step):
                raise UserError(f"inference.checkpoint: {error}; change it") from error
            step = _best(experiment, runtime)  # a training has saved a better one


def _best(experiment: Experiment, runtime: Runtime) -> int:
    """Return the step of the best checkpoint, as the main rank finds it. Raises UserError where none has a validation loss."""
    best = runtime.broadcast(best_checkpoint(Path(experiment.save_loc)))
    if best is None:
        raise UserError(
            f"inference.checkpoint: expected a checkpoint with a validation loss in {experiment.save_loc}/checkpoints, got none; "
            + ("set it to newest" if has_checkpoints(experiment.save_loc) else "run `credit-like train` first")
        )
    return int(best[0])


def load_weights(context: Context, checkpoint: Checkpoint | None = None) -> Checkpoint:
    """Load the weights of a checkpoint (by default that of `inference.checkpoint`) into the model and return the checkpoint.

    Averaged weights are used where the experiment requests them and the checkpoint has them. Where a training has removed the
    checkpoint meanwhile, that of `inference.checkpoint` is chosen anew. Collective.

    Raises UserError where the run has no checkpoint, or one of another model, other variables or other statistics.
    """
    runtime = context.runtime
    checkpoint = checkpoint or chosen_checkpoint(context.experiment, runtime)
    while trouble := runtime.first(_loaded(context, checkpoint)):
        if not runtime.broadcast(is_removed(checkpoint.folder)):
            raise DamagedCheckpoint(trouble)
        log.info("%s was removed by a training before its weights were read", checkpoint.folder)
        checkpoint = chosen_checkpoint(context.experiment, runtime)
    spectral_norm.refresh(context.stepper.model)
    return checkpoint


def _loaded(context: Context, checkpoint: Checkpoint) -> str | None:
    """Load the weights of a checkpoint; return the problem if its files are damaged or have been removed."""
    refuse_other(checkpoint, context.experiment, context.variables, context.statistics, context.store)
    with reading_metadata(checkpoint.folder):
        plugins = registry.changed(checkpoint.meta.get("plugins", []), registry.record(context.experiment.plugins))
    if plugins and context.runtime.is_main:
        log.warning("plug-ins changed since %s: %s", checkpoint.name, "; ".join(plugins))
    average = set(checkpoint.names("ema/")) if context.experiment.inference.weights == "ema" else set()
    pieces = named_pieces(context.stepper.model)
    refuse_apart(
        context.stepper.model, {n.removeprefix("model/") for n in checkpoint.names("model/")}, checkpoint.folder
    )
    try:
        checkpoint.load({f"ema/{n}" if f"ema/{n}" in average else f"model/{n}": piece for n, piece in pieces.items()})
    except DamagedCheckpoint as error:
        return str(error)
    return None


def load_source(context: Context) -> str:
    """Load the weights of `start_from` into the model, without training, and return their name.

    Raises UserError where the source does not have all weights of the model.
    """
    experiment, section, runtime = context.experiment, context.experiment.start_from, context.runtime
    assert section is not None
    source = transfer.Source.open(section, runtime)
    channels = transfer.Channels.of(context.variables, experiment.data.history_len, experiment.model.predict)
    plan = transfer.plan(source, context.stepper.model, experiment.model, channels, "error")
    for note in (*plan.notes, *transfer.load(source, plan, context.stepper.model, experiment.seed)):
        log.warning("start_from: %s", note)
    spectral_norm.refresh(context.stepper.model)
    origin = runtime.broadcast(source.provenance() if runtime.is_main else None)
    return f"start_from {origin['sha256'][:12]}"


# ---- entry points of the commands; each returns the exit status ------------------------------------------------------


def train(experiment: Experiment, fresh: bool = False, force: bool = False) -> int:
    """Train to the end, or continue an earlier run; return the exit status.

    `fresh` begins anew. It does not count in a process that torchrun or Slurm has restarted by itself, with the same
    command: that continues the run.
    The status is 0 if the run is finished or can be continued, 1 if it failed and 130 if it was interrupted.
    """
    save_loc = Path(experiment.save_loc)
    try:
        joined = start(experiment)
    except RunError as error:
        place = read_environment()
        record_failed_start(save_loc, Runtime(rank=place.rank, world=place.world), error)
        raise
    with joined as runtime:
        blame.stacks_folder = save_loc / hang.FOLDER
        if fresh and (again := restarts()):
            log.warning("ignoring --fresh: this is restart %d of the same command, so the run is continued", again)
        elif fresh:
            _start_anew(save_loc, force, experiment.data.statistics is None, runtime)
        try:
            trainer = build_trainer(build_context(experiment, runtime))
            trainer.check_ranks()
            # The main process takes the lock of `save_loc` once no rank can fail before that, so that one that fails can
            # take it to record why.
            runtime.barrier()
        except BaseException as error:
            record_failed_start(save_loc, runtime, error)
            raise
        return trainer.fit().exit_status


def rollout(experiment: Experiment, share: tuple[int, int] = (0, 1)) -> int:
    """Write the forecasts that are missing, from every initial time, and return the exit status.

    `share` = (index, number) selects part `index` = 0, …, number - 1 of them.
    A run without a checkpoint forecasts with the weights of `start_from`, unless it is to train low-rank changes of them.
    """
    with start(experiment, training=False) as runtime:
        found, source = _chosen(experiment, runtime), experiment.start_from
        if found is None and (source is None or source.lora is not None):
            found = chosen_checkpoint(experiment, runtime)  # which says that there is none
        context = build_context(experiment, runtime, train=False)
        if found is None:
            weights = load_source(context)
        else:
            found = load_weights(context, found)
            weights = found.name
        part = (share[0] * runtime.dp_size + runtime.dp_rank, share[1] * runtime.dp_size)
        trained_on = () if found is None else _trained_on(found)
        outcome = write_forecasts(context, weights, part=part, trained_on=trained_on)
        log.info("%s computed; %s", counted(outcome.computed, "forecast"), outcome.path)
        return 0


def _trained_on(checkpoint: Checkpoint) -> Periods:
    """Return the periods on which the weights of a checkpoint were last trained, which may differ from the experiment's."""
    with reading_metadata(checkpoint.folder):
        return TypeAdapter(Periods).validate_python(checkpoint.meta["experiment"]["data"]["train"])


def preprocess(experiment: Experiment) -> int:
    """Fit the statistics, log which times are missing, and return the exit status."""
    with start(experiment, training=False) as runtime:
        variables = Variables(experiment.data)
        load_statistics(experiment, open_store(experiment.data, variables), variables, runtime)
        return 0


def evaluate(experiment: Experiment) -> int:
    """Score the forecasts against persistence, climatology and other baselines, and return the exit status.

    Writes the scores and an HTML report, and prints a table.
    """
    check_results(experiment)
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    forecasts, truth = forecast_path(experiment), open_truth(experiment, store)
    variables, training = scored_variables(variables, truth), training_store(store, truth)
    results = score(experiment, forecasts, truth, training, variables)
    folder = evaluation_folder(experiment)
    save_results(results, folder)
    save_scores(results, folder)
    from credit_like.evaluation.report import write_report  # matplotlib, for which training does not wait

    report = write_report(folder / "report.html", results, forecasts, truth, variables)
    print_scorecard(results)
    log.info("%s", report)
    return 0


def start(experiment: Experiment, training: bool = True) -> Runtime:
    """Start the runtime of this process, and log to the terminal from rank 0.

    The configured layout applies to training; a process that forecasts alone uses a layout of one rank.
    """
    trainer = experiment.trainer
    device = pick_device(trainer.device)
    alone = not training and read_environment().world == 1
    if device.type == "cuda":
        if trainer.fsdp2_cpu_offload:
            raise UserError(f"trainer.fsdp2_cpu_offload: {NO_OFFLOAD}")
        set_precision(trainer.matmul_precision)
        set_deterministic(trainer.deterministic)
    # Ranks of the ensemble share the members of a training step; forecasts are shared by initial time.
    layout = trainer.parallelism if training else trainer.parallelism.model_copy(update={"ensemble": 1})
    runtime = Runtime.start(Parallelism() if alone else layout, device, trainer.timeout)
    logging.basicConfig(
        level=logging.INFO if runtime.is_main else logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    if trainer.device == "auto" and runtime.is_main and (reason := unused_gpu(device)) is not None:
        log.warning("trainer.device: auto computes on the CPU though this machine has a GPU: %s", reason)
    set_threads(trainer.threads, runtime)
    return runtime


def _start_anew(save_loc: Path, force: bool, fitted: bool, runtime: Runtime) -> None:
    """Remove an earlier run from `save_loc`, with its statistics where it `fitted` them.

    Raises UserError, on all ranks, for a folder that is not empty, unless it is a run's and `force` is given.
    """
    refused = None
    if runtime.is_main:
        try:
            clear_run(save_loc, force, fitted)
        except UserError as error:
            refused = str(error)
    if refused := runtime.broadcast(refused):
        raise UserError(refused)
