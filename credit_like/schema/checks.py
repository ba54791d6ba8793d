"""Checks of the sections of an experiment against each other, which need no data.

Each check yields findings: a location in the experiment and a message `expected …, got …, change …`.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from types import ModuleType

from credit_like import registry
from credit_like.errors import UserError
from credit_like.layout import (
    Finding,
    Layout,
    accumulation,
    batch_findings,
    degree_findings,
    divide,
    member_findings,
    refuse,
)
from credit_like.outputs import folder_problem
from credit_like.registry import did_you_mean
from credit_like.schema import losses
from credit_like.schema.base import format_duration
from credit_like.schema.data import DataSection, VariableSpec
from credit_like.schema.errors import Path
from credit_like.schema.experiment import Experiment
from credit_like.schema.inference import Ensemble
from credit_like.schema.launch import Mode
from credit_like.schema.partial import visible
from credit_like.schema.phases import phases, written_at
from credit_like.schema.places import place_findings
from credit_like.schema.trainer import TrainerSection

OUTPUT_ROLES = ("prognostic", "diagnostic")
ROLES = (*OUTPUT_ROLES, "dynamic_forcing", "static")
SPLITS = ("train", "valid", "test")
COORDINATES = (
    "time", "prediction_timedelta", "forecast_reference_time", "forecast_period", "number", "level", "latitude", "longitude",
)  # fmt: skip
"""Names that no variable can have beside its coordinates in forecasts and scores."""


def layout(trainer: TrainerSection, world: int) -> Layout:
    """Return the layout of a run of `world` processes.

    Raises UserError with the arithmetic where the degrees or the batch sizes do not divide.
    """
    refuse(layout_findings(trainer, world))
    at = divide(trainer.parallelism.degrees, world)
    return replace(at, accumulation=accumulation(trainer.global_batch_size, trainer.micro_batch_size, at.data))


def layout_findings(trainer: TrainerSection, world: int) -> Iterator[Finding]:
    """Check that a world size fits the degrees, and the batch sizes fit both."""
    degrees = trainer.parallelism.degrees
    yield from degree_findings(degrees, world)
    yield from member_findings(degrees, trainer.members)
    if world % degrees.sample_ranks == 0:
        replicas = world // degrees.sample_ranks
        yield from batch_findings(trainer.global_batch_size, trainer.micro_batch_size, replicas)


def epoch_samples(samples: int, global_batch_size: int, batches_per_epoch: int = 0) -> int:
    """Return how many of these training samples an epoch takes: whole global batches.

    Raises UserError where there is not one.
    """
    if samples < global_batch_size:
        raise UserError(
            f"trainer.global_batch_size: expected at most the {samples} training samples, got {global_batch_size}, "
            "change it or data.train"
        )
    whole = samples - samples % global_batch_size
    return min(whole, batches_per_epoch * global_batch_size) if batches_per_epoch else whole


def has_noise(experiment: Experiment) -> bool:
    """Return whether the experiment's model has noise."""
    return getattr(experiment.model, "noise", None) is not None


def has_dropout(experiment: Experiment) -> bool:
    """Return whether the experiment's model drops values in training."""
    return bool(getattr(experiment.model, "drops", False))


def ensemble_findings(ensemble: Ensemble, prognostic: Sequence[str], noisy: bool = False) -> Iterator[Finding]:
    """Yield amplitudes of variables that are not prognostic, and members that would all be the same.

    `noisy`: whether the model has noise.
    """
    where: Path = ("inference", "ensemble", "amplitude")
    for name in ensemble.amplitude:
        if name not in prognostic:
            message = f"expected prognostic variables ({', '.join(prognostic)}), got {name!r}, change it"
            yield (*where, name), message + did_you_mean(name, prognostic)
    noise, perturbed = ensemble.sources(noisy)
    if ensemble.members > 1 and noise and not noisy:
        yield (
            ("inference", "ensemble", "from"),
            f"expected a model with noise for members from {ensemble.from_}, got none, add model.noise or change it to "
            "perturbations",
        )
    if not perturbed and any(ensemble.amplitude.values()):
        yield where, "expected no amplitude with `from: model`, got one, remove it or change `from` to both"
    if not perturbed and ensemble.perturbations is not None:
        yield (
            ("inference", "ensemble", "perturbations"),
            "expected no perturbations with `from: model`, got some, remove them or change `from` to both",
        )
    lagged = ensemble.kind == "lagged"
    if perturbed and lagged and ensemble.amplitude:
        yield where, "expected no amplitude of lagged members, got one, remove it or change perturbations.type"
    if ensemble.members > 1 and perturbed and not lagged and not any(ensemble.amplitude.values()):
        yield (
            where,
            f"expected an amplitude above 0 of some prognostic variable for {ensemble.members} members, got none: all "
            "would be the same, add one",
        )


def world_of(experiment: Experiment, mode: Mode | None = None) -> int:
    """Return the world size of a training that the `pbs` section requests; without one, the smallest that the degrees allow.

    The latter holds for jobs of another mode than training too: they may be requested without nodes for a training.
    """
    p, pbs = experiment.trainer.parallelism, experiment.pbs
    if pbs and mode in (None, "train"):
        return pbs.nodes * (pbs.ngpus or pbs.processes or 1)
    return p.degrees.sample_ranks * p.replicate


NO_OFFLOAD = (
    "expected false on CUDA, where it has not been tested yet, got true; set it to false and shard over more ranks, or set "
    "trainer.activation_checkpoint: true"
)


def _offload_findings(experiment: Experiment) -> Iterator[Finding]:
    """Yield offloading to the host where the experiment requests GPUs."""
    trainer, pbs = experiment.trainer, experiment.pbs
    on_gpus = trainer.device == "cuda" or (trainer.device == "auto" and pbs is not None and bool(pbs.ngpus))
    if trainer.fsdp2_cpu_offload and on_gpus:
        yield ("trainer", "fsdp2_cpu_offload"), NO_OFFLOAD


def section_findings(experiment: Experiment, world: int | None) -> Iterator[Finding]:
    """Run every check that needs no data; those of the layout only if the number of processes is known."""
    yield from visible(_phase_findings, experiment, world)
    for check in (
        _period_findings,
        _variable_findings,
        _ensemble_findings,
        _metric_findings,
        _time_findings,
        _folder_findings,
        _offload_findings,
        column_findings,
        place_findings,
    ):
        yield from visible(check, experiment)


def _phase_findings(experiment: Experiment, world: int | None) -> Iterator[Finding]:
    for phase in phases(experiment):
        found = [*visible(_weight_findings, phase.experiment), *visible(_member_findings, phase.experiment)]
        if world is not None:
            found += visible(layout_findings, phase.experiment.trainer, world)
        for path, message in found:
            yield written_at(experiment, phase, path), message


def specs(data: DataSection) -> Iterator[tuple[Path, str, bool, VariableSpec]]:
    """Yield the location and role of every variable, whether it is on levels, and its spec."""
    for role in ROLES:
        for kind in ("level", "surface"):
            for i, spec in enumerate(getattr(getattr(data, role), kind)):
                yield ("data", role, kind, i), role, kind == "level", spec


def _period_findings(experiment: Experiment) -> Iterator[Finding]:
    """Check that no two periods overlap: testing on training times would be meaningless."""
    periods = [(split, i, period) for split in SPLITS for i, period in enumerate(getattr(experiment.data, split))]
    for (split, _, first), (other, i, second) in combinations(periods, 2):
        if first.start <= second.end and second.start <= first.end:
            both = [max(first.start, second.start), min(first.end, second.end)]
            yield (
                ("data", other, i),
                f"expected times that no other period has, got {second}, which overlaps {split} "
                f"{first} from {both[0]} to {both[1]}, change one of them",
            )


def _variable_findings(experiment: Experiment) -> Iterator[Finding]:
    data = experiment.data
    seen: dict[str, Path] = {}
    for path, role, on_levels, spec in specs(data):
        where = ".".join(map(str, path))
        if spec.name in seen:
            first = ".".join(map(str, seen[spec.name][:-1]))
            yield path, f"expected each variable once, got {spec.name!r} in {first} too, remove one of the two"
        seen.setdefault(spec.name, path)
        if spec.name in COORDINATES:
            message = f"expected another name than {spec.name!r}, which is a coordinate of forecasts, change it"
            yield path, f"{message}; `var` is the name in the files"
        if "@" in spec.name:
            yield path, f"expected a name without '@' (it stands before a level), got {spec.name!r}, change it"
        if on_levels and not (spec.levels or data.levels):
            yield path, f"expected data.levels (or levels of {spec.name!r} alone), got none, add them"
        if not on_levels and len(spec.levels or ()) > 1:
            yield path, f"expected at most one level of a field at the surface, got several, move it to {role}.level"
        if on_levels and spec.compute:
            yield path, f"expected {spec.compute} at the surface, got it on levels, move {where} to {role}.surface"
        if spec.compute and role in OUTPUT_ROLES:
            yield path, f"expected a forcing to compute, got {role} {spec.name!r}, move it to dynamic_forcing"
        for key in ("path", "var", "fill") if spec.compute else ():
            if getattr(spec, key) is not None:
                message = f"expected no {key} of a variable that is computed, got {spec.name!r} with it, remove {key} or compute"
                yield (*path, key), message
        if spec.irradiance and not spec.compute:
            yield (
                (*path, "irradiance"),
                f"expected `compute: solar` with a table of irradiance, got {spec.name!r} without, add it or remove the table",
            )
        if spec.transform and role not in OUTPUT_ROLES:
            yield (
                (*path, "transform"),
                f"expected a predicted variable to transform, got {role} {spec.name!r}, remove it",
            )
        if spec.fill and role != "dynamic_forcing":
            yield path, f"expected `fill` of a dynamic_forcing, got it of {role} {spec.name!r}, remove it"
        yield from _level_findings((*path, "levels"), spec.levels or ())
    yield from _level_findings(("data", "levels"), data.levels)
    if not (data.prognostic.level or data.prognostic.surface):
        yield ("data", "prognostic"), "expected at least one prognostic variable, got none, add one"


def _level_findings(path: Path, levels: tuple[float, ...]) -> Iterator[Finding]:
    twice = [level for level, count in Counter(levels).items() if count > 1]
    if twice:
        yield (
            path,
            f"expected each level once, got {', '.join(f'{level:g}' for level in twice)} more than once, remove one",
        )


def _weight_findings(experiment: Experiment) -> Iterator[Finding]:
    """Check that the loss's weights are of predicted variables and of all leads, not negative and not all zero."""
    outputs = [spec.name for _, role, _, spec in specs(experiment.data) if role in OUTPUT_ROLES]
    weights: dict[str, float | tuple[float, ...]] = getattr(experiment.loss, "variable_weights", {})
    for name, weight in weights.items():
        path: Path = ("loss", "variable_weights", name)
        if name not in outputs:
            yield path, f"expected a predicted variable, got {name!r}, change it{did_you_mean(name, outputs)}"
        if (least := min(_each(weight), default=0.0)) < 0:
            yield path, f"expected a weight of at least 0, got {least:g}, change it"
    for _, role, on_levels, spec in specs(experiment.data):
        listed = weights.get(spec.name)
        if role not in OUTPUT_ROLES or not isinstance(listed, tuple):
            continue
        count = len(spec.levels or experiment.data.levels) if on_levels else 1
        if len(listed) != count:
            yield (
                ("loss", "variable_weights", spec.name),
                f"expected one number, or as many as it has levels ({count}), got {len(listed)}, change their number",
            )
    if outputs and not any(any(_each(weights.get(name, 1.0))) for name in outputs):
        yield (
            ("loss", "variable_weights"),
            "expected a weight above 0 for some predicted variable, got none, change one",
        )

    predicted = [spec for _, role, on_levels, spec in specs(experiment.data) if on_levels and role in OUTPUT_ROLES]
    levels = {level for spec in predicted for level in spec.levels or experiment.data.levels}
    for level in getattr(experiment.loss, "level_weights", {}):
        if level not in levels:
            known = ", ".join(f"{each:g}" for each in sorted(levels)) or "none"
            yield ("loss", "level_weights"), f"expected predicted levels ({known}), got {level:g}, change it"

    leads, forecast_len = getattr(experiment.loss, "lead_weights", None), experiment.data.forecast_len
    if leads is None:
        return
    path, shown_leads = ("loss", "lead_weights"), ", ".join(f"{weight:g}" for weight in leads)
    if len(leads) != forecast_len:
        yield (
            path,
            f"expected as many weights as forecast_len = {forecast_len}, got {len(leads)}, change one of the two",
        )
    elif min(leads) < 0 or not any(leads):
        yield path, f"expected weights of at least 0, and some above, got {shown_leads}, change them"
    elif experiment.trainer.random_forecast_len and not leads[0]:
        yield path, f"expected a first weight above 0 with random_forecast_len, got {shown_leads}, change it"


def _each(weight: float | tuple[float, ...]) -> tuple[float, ...]:
    return weight if isinstance(weight, tuple) else (weight,)


def _ensemble_findings(experiment: Experiment) -> Iterator[Finding]:
    prognostic = [spec.name for _, role, _, spec in specs(experiment.data) if role == "prognostic"]
    yield from ensemble_findings(experiment.inference.ensemble, prognostic, has_noise(experiment))


def _member_findings(experiment: Experiment) -> Iterator[Finding]:
    """Check that members are trained by a model with noise on a loss of ensembles, and that such a loss has members."""
    members, loss = experiment.trainer.members, experiment.loss
    ranks = experiment.trainer.parallelism.ensemble
    with registry.searching(experiment.plugins):
        judged = losses.scores_members(loss)
    of_members = all(judged)
    if any(judged) and not of_members:
        yield (
            ("loss", "terms"),
            f"expected terms that all are losses of ensembles or none, got {sum(judged)} of {len(judged)}, change them",
        )
        return
    if members > 1 and not has_noise(experiment):
        yield (
            ("trainer", "members"),
            f"expected a model with noise for {members} members, got none: all would be the same, add model.noise",
        )
    if members > 1 and not of_members:
        yield (
            ("loss", "type"),
            f"expected a loss of ensembles for {members} members, got {loss.type}, change it to crps or trainer.members to 1",
        )
    if ranks > 1 and of_members and not shares_members(experiment):
        yield (
            ("trainer", "parallelism", "ensemble"),
            f"expected 1 with the loss {loss.type}, whose of_members has no argument `others`, got {ranks}, change it",
        )
    if members == ranks == 1 and of_members:
        yield ("trainer", "members"), f"expected at least 2 members for the loss {loss.type}, got 1, change it"


def shares_members(experiment: Experiment) -> bool:
    """Return whether the loss is one that several ranks can compute, each of some of the members."""
    with registry.searching(experiment.plugins):
        return losses.shares_members(experiment.loss)


def shares_columns(plugin: ModuleType) -> bool:
    """Return whether a correction declares that it works on a part of the columns (see `credit_like.physics`)."""
    return getattr(plugin, "shares_columns", False) is True


def column_findings(experiment: Experiment) -> Iterator[Finding]:
    """Check that all corrections can share columns where `trainer.parallelism.domain` is [rows, columns]."""
    degrees = experiment.trainer.parallelism.degrees
    if degrees.columns == 1:
        return
    with registry.searching(experiment.plugins):
        for i, config in enumerate(experiment.physics):
            if not shares_columns(registry.of("physics", config)):
                yield (
                    ("physics", i, "type"),
                    f"expected a correction that can share columns with trainer.parallelism.domain: "
                    f"{list(degrees.shape)}, got {config.type}, change the domain to bands of rows, such as "
                    f"{degrees.domain}, or remove the correction",
                )


def _metric_findings(experiment: Experiment) -> list[Finding]:
    """Return the metrics that do not exist or cannot be imported."""
    findings: list[Finding] = []
    with registry.searching(experiment.plugins):
        for i, name in enumerate(experiment.evaluation.metrics):
            try:
                registry.module("metric", name)
            except registry.BrokenPluginError as error:
                findings.append((("evaluation", "metrics", i), str(error)))
            except UserError as error:
                findings.append((("evaluation", "metrics", i), f"{error}, change it"))
    return findings


def _time_findings(experiment: Experiment) -> Iterator[Finding]:
    """Check that durations are whole numbers of time steps."""
    step, inference = experiment.data.timestep, experiment.inference
    leads = ((("inference", "lead"), inference.lead), (("trainer", "monitor", "lead"), experiment.trainer.monitor.lead))
    for where, lead in leads:
        if isinstance(lead, dt.timedelta) and lead % step:
            yield (
                where,
                f"expected a whole number of steps of data.timestep {format_duration(step)}, got "
                f"{format_duration(lead)}, change it to {format_duration((lead // step + 1) * step)}",
            )
    if inference.init and inference.init.interval and inference.init.interval % step:
        yield (
            ("inference", "init"),
            f"expected an interval of whole steps of data.timestep {format_duration(step)}, got "
            f"{format_duration(inference.init.interval)}, change it",
        )
    if inference.init and inference.init.start and inference.init.end and inference.init.end < inference.init.start:
        yield (
            ("inference", "init"),
            f"expected [first, last, interval], got last {inference.init.end} before first, change it",
        )


def _folder_findings(experiment: Experiment) -> Iterator[Finding]:
    """Check that `save_loc`, and the folder of forecasts if there is one, are or can become writable folders."""
    places: list[tuple[Path, str]] = [(("save_loc",), experiment.save_loc)]
    if output := experiment.inference.output.path:
        places.append((("inference", "output", "path"), output))
    for key, path in places:
        if problem := folder_problem(path):
            yield key, f"{problem}, change it"
