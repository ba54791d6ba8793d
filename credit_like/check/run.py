"""Checks of everything that training, forecasts, scores and jobs would refuse, by the functions that refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from credit_like import registry
from credit_like.check.store import Store, refusal
from credit_like.errors import UserError
from credit_like.layout import Finding
from credit_like.outputs import folder_problem
from credit_like.schema.checks import epoch_samples
from credit_like.schema.experiment import Experiment
from credit_like.schema.inference import InferenceSection
from credit_like.schema.phases import Phase, phases, written_at
from credit_like.schema.places import has_checkpoints, state_of, write_findings
from credit_like.variables import Variables

if TYPE_CHECKING:
    from credit_like.data.store import FieldStore
    from credit_like.schema.launch import Mode


def variable_findings(experiment: Experiment, variables: Variables) -> Iterator[Finding]:
    """Yield problems of physics and of the output of forecasts, which need the names of the variables alone."""
    from credit_like.inference.layout import choose

    for i, config in enumerate(experiment.physics):
        find = getattr(registry.of("physics", config), "find", None)
        for path, message in refusal(("physics",), find, config, variables) if find else ():
            yield ("physics", i, *path[1:]), message
    output = experiment.inference.output
    yield from refusal(("inference", "output"), choose, variables.outputs, output.variables, output.levels)


def trained_findings(experiment: Experiment, fresh: bool) -> Iterator[Finding]:
    """Yield problems for a model that has nothing to train, and for files of the run that a training cannot write."""
    if folder_problem(experiment.save_loc) is None:  # which has been reported
        yield from write_findings(experiment, fresh)
    if not getattr(experiment.model, "trains", True):
        name = experiment.model.type
        yield ("model", "type"), f"expected a model to train, got {name}, which has no weights; change it"


def training_findings(store: Store) -> Iterator[Finding]:
    """Yield problems of batch sizes, warm-up, short forecasts and device."""
    experiment, trainer = store.experiment, store.experiment.trainer
    for phase in phases(experiment):
        for path, message in _steps_findings(store, phase):
            yield written_at(experiment, phase, path), message
    lead = trainer.monitor.lead
    steps = lead if isinstance(lead, int) else lead // experiment.data.timestep
    if trainer.monitor.every and not store.samples("valid", steps):
        yield (
            ("trainer", "monitor", "lead"),
            f"expected a lead that fits into a validation period, got {steps} steps, change it or data.valid",
        )
    if trainer.device == "cuda" and experiment.pbs is None and experiment.site is None:
        from credit_like.parallel.device import pick_device

        yield from refusal(("trainer", "device"), pick_device, trainer.device)


def parameter_findings(store: Store, fresh: bool) -> Iterator[Finding]:
    """Yield problems of parameter patterns, and the reasons why the weights of `start_from` cannot be loaded.

    The weights are not checked once the run has a checkpoint, unless it is to begin anew.
    """
    experiment, variables, grid = store.experiment, store.variables, store.fields.grid
    section = experiment.start_from
    trainers = [(phase, phase.experiment.trainer) for phase in phases(experiment)]
    if section is None and not any(each.freeze or getattr(each.optimizer, "groups", ()) for _, each in trainers):
        return
    import torch

    from credit_like.checkpoint import transfer
    from credit_like.models import build_model
    from credit_like.parallel.apply import freeze_parameters, unfrozen
    from credit_like.training.groups import members

    built = []

    def build() -> None:
        with torch.device("meta"):
            built.append(build_model(experiment, variables, grid.height, grid.width))

    yield from refusal(("model",), build)
    if not built:
        return
    [model] = built
    if section is not None:
        yield from refusal(("start_from", "freeze"), freeze_parameters, model, section.freeze)
    parameters = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for phase, trainer in trainers:
        try:
            trained = unfrozen(parameters, trainer.freeze, "freeze")
        except UserError as error:
            yield written_at(experiment, phase, ("trainer", "freeze")), str(error).removeprefix("freeze: ")
            continue
        for _, message in refusal((), members, getattr(trainer.optimizer, "groups", ()), trained):
            yield (*written_at(experiment, phase, ("trainer", "optimizer")), "groups"), message
    if section is None or (has_checkpoints(experiment.save_loc) and not fresh):
        return
    channels = transfer.Channels.of(variables, experiment.data.history_len, experiment.model.predict)

    def planned() -> None:
        source = transfer.Source.open(section)
        transfer.refuse_other_units(source, store.fields)
        plan = transfer.plan(source, model, experiment.model, channels, section.missing)
        kind = phases(experiment)[0].experiment.trainer.optimizer.type
        transfer.check_optimizer(section, source, plan, kind)

    yield from refusal(("start_from", "path"), planned)


def checkpoint_findings(store: Store) -> Iterator[Finding]:
    """Yield how the experiment of the run's newest checkpoint differs from this one, and a requested step without weights."""
    experiment, folder = store.experiment, FilePath(store.experiment.save_loc)
    if not has_checkpoints(folder):
        return
    from credit_like.checkpoint.continuation import refuse_other
    from credit_like.checkpoint.export import find_unread
    from credit_like.checkpoint.manager import steps
    from credit_like.data.statistics import Statistics

    path = experiment.statistics_file

    def refuse() -> None:
        checkpoint = find_unread(folder)
        statistics = Statistics.load(path, store.fields) if path.exists() else None
        refuse_other(checkpoint, experiment, store.variables, statistics, store.fields)

    yield from refusal(("save_loc",), refuse)
    wanted, there = experiment.inference.checkpoint, steps(folder / "checkpoints")
    # A training that is continued may still save a later step.
    if (
        isinstance(wanted, int)
        and wanted not in there
        and (wanted < max(there, default=0) or state_of(folder) == "finished")
    ):
        yield (
            ("inference", "checkpoint"),
            f"expected a step with a checkpoint in {folder / 'checkpoints'} ({', '.join(map(str, there))}), got {wanted}, "
            "change it",
        )


def _steps_findings(store: Store, phase: Phase) -> Iterator[Finding]:
    """Yield problems of the batch size and the learning rate of a phase."""
    trainer, samples = phase.experiment.trainer, store.samples("train", phase.experiment.data.forecast_len)
    found = list(refusal(("trainer", "global_batch_size"), epoch_samples, samples, trainer.global_batch_size))
    yield from found
    if not found:
        rate = registry.of("scheduler", trainer.scheduler).learning_rate
        arguments = trainer.optimizer.learning_rate, 0, steps_per_epoch(store, phase) * trainer.epochs
        yield from refusal(("trainer", "scheduler"), rate, trainer.scheduler, *arguments)


def steps_per_epoch(store: Store, phase: Phase) -> int:
    """Return the optimiser steps of an epoch of a phase."""
    trainer, samples = phase.experiment.trainer, store.samples("train", phase.experiment.data.forecast_len)
    return epoch_samples(samples, trainer.global_batch_size, trainer.batches_per_epoch) // trainer.global_batch_size


def requested_findings(store: Store, scoring: bool, forecasting: bool) -> Iterator[Finding]:
    """Check the forecasts if the experiment or the command asks for any."""
    experiment = store.experiment
    given = experiment.inference != InferenceSection() or (scoring and "inference" in experiment.model_fields_set)
    if forecasting or given:
        yield from _forecast_findings(store)


def _forecast_findings(store: Store) -> Iterator[Finding]:
    """Yield problems of leads, initial times and output."""
    from credit_like.derive.fields import written_derivation
    from credit_like.inference.plan import check_files
    from credit_like.inference.random_field import deviations
    from credit_like.inference.times import initial_times, kept_leads

    inference, data = store.experiment.inference, store.experiment.data
    found = list(refusal(("inference", "lead"), kept_leads, inference, data.timestep))
    if not found:
        found += refusal(("inference", "init"), initial_times, inference, store.fields, data)
    underivable = list(refusal(("inference", "derive"), written_derivation, store.experiment, store.variables))
    if not underivable and (derivation := written_derivation(store.experiment, store.variables)) is not None:
        underivable += refusal(("inference", "derive"), derivation.check_units, store.fields)
    yield from found
    yield from underivable
    ensemble = inference.ensemble
    if ensemble.members > 1 and ensemble.kind != "lagged" and any(ensemble.amplitude.values()):
        key = ("inference", "ensemble", "length_scale_km")
        yield from refusal(key, deviations, store.fields.grid, ensemble.length_scale_km)
    if not found and not underivable and folder_problem(store.experiment.save_loc) is None:  # which has been reported
        yield from refusal(("inference", "output"), check_files, store.experiment, store.fields, store.variables)


def evaluation_findings(store: Store, scoring: bool) -> Iterator[Finding]:
    """Yield problems of metrics, regions, and the files that forecasts are compared with."""
    from credit_like.derive.fields import scored_derivation
    from credit_like.evaluation.climatology import climatology_times
    from credit_like.evaluation.fields import Regions
    from credit_like.evaluation.needs import check_metrics, check_truth, open_truth, possible_metrics
    from credit_like.evaluation.precipitation import is_precipitation

    experiment, section = store.experiment, store.experiment.evaluation
    written = experiment.inference.output.variables
    outputs = [variable for variable in store.variables.outputs if not written or variable.name in written]
    rainy = [variable.name for variable in outputs if is_precipitation(variable, store.fields)]
    metrics = {}
    for name in section.metrics:
        # An unknown or broken metric has been reported already.
        with suppress(UserError), registry.searching(experiment.plugins):
            metrics[name] = registry.module("metric", name)
    derivable = list(refusal(("evaluation", "derive"), scored_derivation, experiment, store.variables))
    derivation = None if derivable else scored_derivation(experiment, store.variables)
    if derivation is not None:
        derivable += refusal(("evaluation", "derive"), derivation.check_units, store.fields)
    scored = [variable.name for variable in (*outputs, *(derivation.outputs if derivation else ()))]
    members = experiment.inference.ensemble.members
    yield from refusal(("evaluation",), possible_metrics, metrics, store.fields.grid)
    yield from refusal(("evaluation",), check_metrics, metrics, members, rainy, section.thresholds, scored)
    for name, box in section.regions.items():
        yield from refusal(("evaluation", "regions", name), Regions, store.fields.grid, {name: box})
    yield from derivable
    if not scoring or derivable:
        return
    from credit_like.evaluation.derived import scored_variables
    from credit_like.evaluation.evaluate import check_results, open_baselines

    if folder_problem(experiment.save_loc) is None:  # which has been reported
        yield from refusal(("save_loc",), check_results, experiment)
    yield from refusal(("evaluation", "climatology_period"), climatology_times, store.fields, experiment)
    opened: list[FieldStore] = []
    yield from refusal(("evaluation", "truth"), lambda: opened.append(open_truth(experiment, store.fields)))
    if not opened:
        return
    (truth,) = opened
    yield from refusal(("evaluation", "truth"), check_truth, truth, store.fields)
    of_truth = scored_variables(store.variables, truth).outputs
    if {variable.name for variable in of_truth} != set(scored):
        of_rain = [variable.name for variable in of_truth if is_precipitation(variable, store.fields)]
        names = [variable.name for variable in of_truth]
        yield from refusal(("evaluation",), check_metrics, metrics, members, of_rain, section.thresholds, names)
    for name, file in section.baselines.items():
        yield from refusal(("evaluation", "baselines", name), open_baselines, {name: file}, truth)


def launch_findings(experiment: Experiment, whole: bool, only: Mode | None) -> Iterator[Finding]:
    """Yield conflicts between the requested resources, of all modes or of `only` one, and the machine's limits.

    For a `whole` experiment, the script is checked too.
    """
    from credit_like.launch.plan import plan_jobs
    from credit_like.launch.resources import resources
    from credit_like.launch.script import render
    from credit_like.schema.launch import MODES, Request, SiteSection

    pbs = experiment.pbs
    if pbs is None:
        return
    for mode in MODES:
        if only not in (None, mode) or (mode != "train" and getattr(pbs, mode) == Request()):
            continue
        site, place = experiment.site or SiteSection(), ("pbs",) if mode == "train" else ("pbs", mode)
        found = list(refusal(place, resources, pbs, site, mode))
        if whole and not found:
            found += refusal(place, lambda mode=mode, site=site: render(plan_jobs(experiment, mode, site=site), site))
        yield from found
