"""Checks before a run starts: the experiment's sections, its stores, and whether they fit together.

The checks call the functions that refuse the same things in training, forecasts and evaluation. Nothing is written, and
torch is imported only where the experiment requests a GPU of this machine.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from credit_like import bands, registry
from credit_like.errors import UserError
from credit_like.layout import Finding, domain_shape, domain_text
from credit_like.naming import counted
from credit_like.outputs import folder_problem
from credit_like.schema import losses
from credit_like.schema.base import HiddenKey, format_duration
from credit_like.schema.checks import (
    SPLITS,
    epoch_samples,
    layout,
    section_findings,
    specs,
    world_of,
)
from credit_like.schema.data import Period
from credit_like.schema.errors import ExperimentError, Path, in_order
from credit_like.schema.experiment import Experiment
from credit_like.schema.inference import InferenceSection
from credit_like.schema.load import load_partly
from credit_like.schema.partial import visible
from credit_like.schema.phases import Phase, phases, written_at
from credit_like.schema.places import has_checkpoints, state_of, write_findings
from credit_like.variables import ROLES, Variable, Variables

if TYPE_CHECKING:
    from credit_like.data.store import FieldStore
    from credit_like.schema.launch import Mode

# What the libraries behind a store raise for files that are not there, not whole or not what they should be.
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, TypeError, IndexError, OverflowError)
_KEY = re.compile(r"(\w+(?:\.[\w-]+)*): ")
_SAMPLED = 20
"""Times that are read before a point is taken for one that never has data; the first is the only one if nothing lacks there."""


@dataclass
class Store:
    """An open store, with the queries that the checks make of its time axis."""

    fields: FieldStore
    variables: Variables
    experiment: Experiment

    @property
    def seconds(self) -> NDArray[np.int64]:
        """Times of the store (T,), in seconds since 1970 in their own calendar."""
        return self.fields.seconds

    @property
    def calendar(self) -> str:
        """Calendar of the store's times."""
        return self.fields.calendar

    @property
    def timestep(self) -> int:
        """Time step in seconds."""
        return self.fields.step_seconds

    def parse(self, text: str) -> int:
        """Return an ISO time in seconds since 1970.

        Raises UserError for a day that the calendar does not have.
        """
        from credit_like.data.times import parse

        return parse(text, self.calendar)

    def text(self, seconds: int) -> str:
        """Return a time in seconds since 1970 as ISO text."""
        from credit_like.data.times import from_seconds, to_text

        return to_text(from_seconds(np.array([seconds]), self.calendar)[0])

    def inside(self, period: Period) -> NDArray[np.int64]:
        """Return the store's times in a period, in seconds since 1970."""
        start, end = self.parse(period.start), self.parse(period.end)
        return self.seconds[(self.seconds >= start) & (self.seconds <= end)]

    def samples(self, split: str, forecast_len: int | None = None) -> int:
        """Return the number of windows (history and forecast) in a split, including those with missing fields.

        A window lies within one period.
        """
        data = self.experiment.data
        length = data.history_len + (forecast_len or data.forecast_len)
        if length > len(self.seconds):
            return 0
        steps = (np.arange(length) * self.timestep)[:, None]
        inside = [self.inside(period) for period in getattr(data, split)]
        return sum(int(np.isin(at[None] + steps, at).all(0).sum()) for at in inside if len(at))


def checked_experiment(
    file: str | FilePath,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    scoring: bool = False,
    forecasting: bool = False,
    training: bool = False,
    launching: bool = False,
    continuing: bool = False,
    mode: Mode | None = None,
    fresh: bool = False,
) -> tuple[Experiment, Store, int]:
    """Load and check the experiment of a file; return it with its store and the world size it was checked for.

    `scoring`: the files that forecasts are compared with must be there too; a training does not wait for them.
    `forecasting`: the default forecasts must fit the data too; otherwise only those that the experiment requests.
    `training`: the model must be one that can be trained.
    `launching`: all ranks begin at once, so statistics that take long to fit must be there.
    `continuing`: checkpoints of the run, if there are any, must be of the same model, variables and statistics, and the
    statistics of the same data.
    `mode`: the jobs of this mode alone must be within the limits of the machine, because those of others are not at hand.
    `fresh`: the run begins anew, whatever checkpoints it has.
    Raises ExperimentError with every problem of the file, its sections and stores that no other one hides.
    """
    experiment, locations, problems = load_partly(file, overrides)
    store = None
    if experiment is not None:
        findings, store = _inspect(
            experiment, world_size, scoring, forecasting, whole=not problems, mode=mode, fresh=fresh
        )
        findings = [*(visible(_trained_findings, experiment, fresh) if training else ()), *findings]
        if launching and store is not None and not findings and not problems:
            findings += _fit_findings(store, world_size or world_of(experiment, mode))
        if continuing and store is not None and not findings and not problems:
            findings += _checkpoint_findings(store)
        # A job that others precede may have its statistics from them.
        if (launching or (continuing and mode is None)) and store is not None and not findings and not problems:
            findings += _made_statistics_findings(store)
        problems = [*problems, *(locations.problem(*finding) for finding in findings)]
    if problems or experiment is None or store is None:
        raise ExperimentError(in_order(problems, str(file)))
    return experiment, store, world_size or world_of(experiment, mode)


def _inspect(
    experiment: Experiment,
    world_size: int | None,
    scoring: bool,
    forecasting: bool,
    whole: bool,
    mode: Mode | None,
    fresh: bool,
) -> tuple[list[Finding], Store | None]:
    """Return what the checks find, and the store if the data can be opened.

    `whole`: whether no key of the experiment is hidden. A check that reads a hidden key ends there.
    """
    world = world_size
    with suppress(HiddenKey):
        world = world_size or world_of(experiment, mode)
    findings = list(section_findings(experiment, world))
    try:
        variables = Variables(experiment.data)
    except HiddenKey:
        return findings, None
    except ValueError as error:
        # Names and levels that do not make channels have already been reported one by one.
        return findings or [(("data",), str(error))], None
    # Imported here, because a file that cannot be read is reported without the slow libraries of the stores.
    from credit_like.data.store import StoreError, open_store

    try:
        store = Store(open_store(experiment.data, variables), variables, experiment)
    except StoreError as error:
        findings += ((place, _one_line(message)) for place, message in error.problems)
        if error.partial is not None:
            partial = Store(error.partial, variables, experiment)
            for check in (*_ON_THE_AXES, _statistics_file_findings):
                findings += visible(check, partial)
        return list(dict.fromkeys([*findings, *visible(_variable_findings, experiment, variables)])), None
    except HiddenKey:
        return list(dict.fromkeys([*findings, *visible(_variable_findings, experiment, variables)])), None
    except _UNREADABLE as error:
        return [*findings, (("data", "source"), _one_line(error))], None
    for check in (*_ON_THE_AXES, _content_findings, _statistics_findings, _stored_findings):
        findings += visible(check, store)
    findings += visible(_variable_findings, experiment, variables)
    if not any(path[:1] == ("data",) for path, _ in findings):
        findings += visible(_gap_findings, store)
    findings += visible(_launch_findings, experiment, world_size is None and whole and not findings, mode)
    # What follows calls functions that take the data and the times for granted.
    if not any(path[:1] in (("data",), ("inference",)) for path, _ in findings):
        findings += visible(_training_findings, store)
        findings += _parameter_findings(store, fresh) if whole and not findings else ()
        findings += visible(_requested_findings, store, scoring, forecasting)
        findings += visible(_evaluation_findings, store, scoring)
    return list(dict.fromkeys(findings)), store


def _refusal(place: Path, function: Callable[..., object], *arguments: Any) -> Iterator[Finding]:
    """Yield what a function refuses, at the key that its message begins with, or at `place`."""
    try:
        function(*arguments)
    except _UNREADABLE as error:
        for message in str(error).splitlines() if isinstance(error, UserError) else [_one_line(error)]:
            match = _KEY.match(message)
            if match and match[1].split(".")[0] in Experiment.model_fields:
                yield tuple(match[1].split(".")), message[match.end() :]
            else:
                yield place, message


def _variable_findings(experiment: Experiment, variables: Variables) -> Iterator[Finding]:
    """Yield problems of physics and of the output of forecasts, which need the names of the variables alone."""
    from credit_like.inference.layout import choose

    for i, config in enumerate(experiment.physics):
        find = getattr(registry.of("physics", config), "find", None)
        for path, message in _refusal(("physics",), find, config, variables) if find else ():
            yield ("physics", i, *path[1:]), message
    output = experiment.inference.output
    yield from _refusal(("inference", "output"), choose, variables.outputs, output.variables, output.levels)


def _trained_findings(experiment: Experiment, fresh: bool) -> Iterator[Finding]:
    """Yield problems for a model that has nothing to train, and for files of the run that a training cannot write."""
    if folder_problem(experiment.save_loc) is None:  # which has been reported
        yield from write_findings(experiment, fresh)
    if not getattr(experiment.model, "trains", True):
        name = experiment.model.type
        yield ("model", "type"), f"expected a model to train, got {name}, which has no weights; change it"


def _training_findings(store: Store) -> Iterator[Finding]:
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

        yield from _refusal(("trainer", "device"), pick_device, trainer.device)


def _parameter_findings(store: Store, fresh: bool) -> Iterator[Finding]:
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

    yield from _refusal(("model",), build)
    if not built:
        return
    [model] = built
    if section is not None:
        yield from _refusal(("start_from", "freeze"), freeze_parameters, model, section.freeze)
    parameters = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for phase, trainer in trainers:
        try:
            trained = unfrozen(parameters, trainer.freeze, "freeze")
        except UserError as error:
            yield written_at(experiment, phase, ("trainer", "freeze")), str(error).removeprefix("freeze: ")
            continue
        for _, message in _refusal((), members, getattr(trainer.optimizer, "groups", ()), trained):
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

    yield from _refusal(("start_from", "path"), planned)


def _checkpoint_findings(store: Store) -> Iterator[Finding]:
    """Yield in what the weights of the run's newest checkpoint are those of another experiment, and a step without weights."""
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

    yield from _refusal(("save_loc",), refuse)
    wanted, there = experiment.inference.checkpoint, steps(folder / "checkpoints")
    # A training that goes on may still save a later step.
    if isinstance(wanted, int) and wanted not in there and (wanted < max(there) or state_of(folder) == "finished"):
        yield (
            ("inference", "checkpoint"),
            f"expected a step with a checkpoint in {folder / 'checkpoints'} ({', '.join(map(str, there))}), got {wanted}, "
            "change it",
        )


def _steps_findings(store: Store, phase: Phase) -> Iterator[Finding]:
    """Yield problems of the batch size and the learning rate of a phase."""
    trainer, samples = phase.experiment.trainer, store.samples("train", phase.experiment.data.forecast_len)
    found = list(_refusal(("trainer", "global_batch_size"), epoch_samples, samples, trainer.global_batch_size))
    yield from found
    if not found:
        rate = registry.of("scheduler", trainer.scheduler).learning_rate
        arguments = trainer.optimizer.learning_rate, 0, _steps_per_epoch(store, phase) * trainer.epochs
        yield from _refusal(("trainer", "scheduler"), rate, trainer.scheduler, *arguments)


def _steps_per_epoch(store: Store, phase: Phase) -> int:
    trainer, samples = phase.experiment.trainer, store.samples("train", phase.experiment.data.forecast_len)
    return epoch_samples(samples, trainer.global_batch_size, trainer.batches_per_epoch) // trainer.global_batch_size


def _requested_findings(store: Store, scoring: bool, forecasting: bool) -> Iterator[Finding]:
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
    found = list(_refusal(("inference", "lead"), kept_leads, inference, data.timestep))
    if not found:
        found += _refusal(("inference", "init"), initial_times, inference, store.fields, data)
    underivable = list(_refusal(("inference", "derive"), written_derivation, store.experiment, store.variables))
    if not underivable and (derivation := written_derivation(store.experiment, store.variables)) is not None:
        underivable += _refusal(("inference", "derive"), derivation.check_units, store.fields)
    yield from found
    yield from underivable
    ensemble = inference.ensemble
    if ensemble.members > 1 and ensemble.kind != "lagged" and any(ensemble.amplitude.values()):
        key = ("inference", "ensemble", "length_scale_km")
        yield from _refusal(key, deviations, store.fields.grid, ensemble.length_scale_km)
    if not found and not underivable and folder_problem(store.experiment.save_loc) is None:  # which has been reported
        yield from _refusal(("inference", "output"), check_files, store.experiment, store.fields, store.variables)


def _evaluation_findings(store: Store, scoring: bool) -> Iterator[Finding]:
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
    derivable = list(_refusal(("evaluation", "derive"), scored_derivation, experiment, store.variables))
    derivation = None if derivable else scored_derivation(experiment, store.variables)
    if derivation is not None:
        derivable += _refusal(("evaluation", "derive"), derivation.check_units, store.fields)
    scored = [variable.name for variable in (*outputs, *(derivation.outputs if derivation else ()))]
    members = experiment.inference.ensemble.members
    yield from _refusal(("evaluation",), possible_metrics, metrics, store.fields.grid)
    yield from _refusal(("evaluation",), check_metrics, metrics, members, rainy, section.thresholds, scored)
    for name, box in section.regions.items():
        yield from _refusal(("evaluation", "regions", name), Regions, store.fields.grid, {name: box})
    yield from derivable
    if not scoring or derivable:
        return
    from credit_like.evaluation.derived import scored_variables
    from credit_like.evaluation.evaluate import check_results, open_baselines

    if folder_problem(experiment.save_loc) is None:  # which has been reported
        yield from _refusal(("save_loc",), check_results, experiment)
    yield from _refusal(("evaluation", "climatology_period"), climatology_times, store.fields, experiment)
    opened: list[FieldStore] = []
    yield from _refusal(("evaluation", "truth"), lambda: opened.append(open_truth(experiment, store.fields)))
    if not opened:
        return
    (truth,) = opened
    yield from _refusal(("evaluation", "truth"), check_truth, truth, store.fields)
    of_truth = scored_variables(store.variables, truth).outputs
    if {variable.name for variable in of_truth} != set(scored):
        of_rain = [variable.name for variable in of_truth if is_precipitation(variable, store.fields)]
        names = [variable.name for variable in of_truth]
        yield from _refusal(("evaluation",), check_metrics, metrics, members, of_rain, section.thresholds, names)
    if section.baselines:
        for name, file in section.baselines.items():
            yield from _refusal(("evaluation", "baselines", name), open_baselines, {name: file}, truth)


def _circle_findings(store: Store) -> Iterator[Finding]:
    """Check what needs a grid that covers the full circle of longitude."""
    grid = store.fields.grid
    if grid.is_periodic:
        return
    got = f"got {grid.width} from {grid.longitude[0]:g} to {grid.longitude[-1]:g}"
    for phase in phases(store.experiment):
        if phase.experiment.trainer.shift_longitude:
            yield (
                written_at(store.experiment, phase, ("trainer", "shift_longitude")),
                f"expected a grid whose longitudes go all the way round, {got}, remove this key",
            )
        zonal = [
            loss.type for loss in losses.summands(phase.experiment.loss) if loss.type in ("spectral", "spectral-crps")
        ]
        if zonal:
            yield (
                written_at(store.experiment, phase, ("loss",)),
                f"expected a grid whose longitudes go all the way round with the loss {zonal[0]}, {got}, change the loss",
            )


def _grid_findings(store: Store) -> Iterator[Finding]:
    """Check the model's windows, padding, heads and bands of latitude against the grid."""
    model, grid = store.experiment.model, store.fields.grid
    messages: list[str] = []
    if check := getattr(model, "check", None):
        channels = {"in_channels": store.variables.in_channels, "out_channels": store.variables.out_channels}
        messages += check(grid.height, grid.width, **channels)
    for message in messages:
        yield _model_key(message, type(model).model_fields)
    if not messages and (check := getattr(model, "check_parallel", None)):
        degrees = store.experiment.trainer.parallelism.degrees
        rows, columns = degrees.shape
        shared = {"columns": columns} if columns > 1 else {}
        for degree, message in check(grid.height, grid.width, tensor=degrees.tensor, domain=rows, **shared):
            yield ("trainer", "parallelism", degree), message


def _model_key(message: str, fields: Any) -> Finding:
    """Return the key and the text of a model's message: `dim[1]: expected …` concerns the key `model.dim.1`."""
    match = re.match(r"(\w+)((?:\.\w+)*)(?:\[(\d+)\])?: ", message)
    if not match or match[1] not in fields:
        return ("model",), message
    index = (int(match[3]),) if match[3] else ()
    return ("model", match[1], *filter(None, match[2].split(".")), *index), message[match.end() :]


def _periods(store: Store) -> Iterator[tuple[Path, Period]]:
    for split in SPLITS:
        for i, period in enumerate(getattr(store.experiment.data, split)):
            yield ("data", split, i), period


def _time_findings(store: Store) -> Iterator[Finding]:
    """Check the store's times against the periods."""
    for place, period in _periods(store):
        yield from ((place, message) for message in _period_messages(store, period))


def _window_findings(store: Store) -> Iterator[Finding]:
    """Check that the windows of samples fit into the periods."""
    for place, period in _periods(store):
        if any(_period_messages(store, period)):
            continue
        for phase in phases(store.experiment):
            where = written_at(store.experiment, phase, ("data", "forecast_len"))
            for message in _window_messages(store, period, phase.experiment.data.forecast_len):
                yield (where if where[0] == "trainer" else place), message


def _period_messages(store: Store, period: Period) -> Iterator[str]:
    data, step = store.experiment.data, store.timestep
    has = f"{store.text(store.seconds[0])} to {store.text(store.seconds[-1])}"
    try:
        start, end = store.parse(period.start), store.parse(period.end)
    except ValueError as error:
        yield f"expected days of the {store.calendar} calendar, got {_shown(period)} ({_one_line(error)}), change them"
        return
    inside = store.inside(period)
    if not len(inside):
        yield f"expected a period with times of the store ({has}), got none in {_shown(period)}, change it"
        return
    if start <= store.seconds[0] - step or end >= store.seconds[-1] + step:
        yield f"expected a period inside the store ({has}), got {_shown(period)}, change it"
        return
    expected = np.arange(inside[0], end + 1, step)
    missing = expected[~np.isin(expected, inside)]
    if len(missing):
        yield (
            f"expected a time every {format_duration(data.timestep)}, got {len(missing)} of {len(expected)} missing "
            f"from the store, the first {store.text(missing[0])}, change the period or split it in two"
        )


def _window_messages(store: Store, period: Period, forecast_len: int) -> Iterator[str]:
    history_len, times = store.experiment.data.history_len, len(store.inside(period))
    window = history_len + forecast_len
    if times < window:
        yield (
            f"expected at least history_len + forecast_len = {history_len} + {forecast_len} = {window} "
            f"times, got {times}, change the period"
        )


def _shown(period: Period) -> str:
    return f"[{period.start}, {period.end}]"


def initial_times(store: Store) -> Sequence[int]:
    """Return the initial times in seconds since 1970; none if the experiment specifies none."""
    init = store.experiment.inference.init
    if init is None:
        return []
    if init.times:
        return [store.parse(time) for time in init.times]
    assert init.start
    assert init.end
    assert init.interval
    interval = max(1, round(init.interval.total_seconds()))
    return range(store.parse(init.start), store.parse(init.end) + 1, interval)


def _init_findings(store: Store) -> Iterator[Finding]:
    """Check that the store has the initial times, their history and the forcing of the forecasts."""
    data, inference = store.experiment.data, store.experiment.inference
    where: Path = ("inference", "init")
    try:
        times = initial_times(store)
    except ValueError as error:
        yield where, f"expected days of the {store.calendar} calendar, got {_one_line(error)}, change them"
        return
    if len(times) > len(store.seconds):
        yield where, f"expected at most the {len(store.seconds)} times of the store, got {len(times)}, change them"
        return
    if not len(times):
        return
    init = np.array(times, np.int64)
    has = f"{store.text(store.seconds[0])} to {store.text(store.seconds[-1])}"
    needed = init[:, None] - np.arange(data.history_len) * store.timestep
    absent = init[~np.isin(needed, store.seconds).all(1)]
    # Those inside a range are left out.
    if len(absent) and (isinstance(times, list) or {times[0], times[-1]} & set(absent.tolist())):
        history = f" with {data.history_len - 1} before them" if data.history_len > 1 else ""
        yield (
            where,
            f"expected times of the store ({has}){history}, got {len(absent)} that are not, the first "
            f"{store.text(absent[0])}, change them",
        )
        return
    read = [
        spec.name for _, role, _, spec in specs(data) if role == "dynamic_forcing" and not (spec.compute or spec.fill)
    ]
    lead = inference.lead if isinstance(inference.lead, int) else round(inference.lead / data.timestep)
    last = int(init.max()) + (lead - 1) * store.timestep
    if read and last > store.seconds[-1]:
        yield (
            ("inference", "lead"),
            f"expected forcing ({', '.join(read)}) until {store.text(last)}, got a store until "
            f"{store.text(store.seconds[-1])}, change the lead, the initial times or `fill` of the forcing",
        )


def _content_findings(store: Store) -> Iterator[Finding]:
    """Yield fields that cannot be read or have no values: a truncated copy opens, and fails in the middle of a run."""
    for path, role, _, spec in specs(store.experiment.data):
        variable = store.variables[spec.name]
        try:
            if role == "static" or spec.compute:
                continue
            wrong = _odd_channels(store, variable)
        except _UNREADABLE as error:
            yield path, f"expected data that can be read, got: {_one_line(error)}; copy or make the store anew"
            return
        if wrong:
            yield path, f"{wrong}; copy or make the store anew"
    try:
        static = store.fields.static()
    except _UNREADABLE as error:
        yield (
            ("data", "static"),
            f"expected data that can be read, got: {_one_line(error)}; copy or make the store anew",
        )
        return
    names = store.variables.channel_names(store.variables.role("static"))
    for name, field in zip(names, static, strict=True):
        if not np.isfinite(field).any():
            yield ("data", "static"), f"expected a field with values, got {name!r} with none, change it"


def _odd_channels(store: Store, variable: Variable) -> str | None:
    """Return a problem if the first, middle or last field of the periods has infinite values, or if none has values."""
    from credit_like.data.statistics import MOST

    has_data = np.zeros(len(variable), bool)
    for position in _sampled(store, 3):
        fields = store.fields.read([variable], [position])[0]
        infinite = np.isinf(fields).any((1, 2))
        if infinite.any():
            channel = variable.channels[int(np.argmax(infinite))]
            return f"expected finite values, got infinite ones of {channel} at {store.text(store.seconds[position])}"
        filled = (np.abs(fields) > MOST).any((1, 2))
        if filled.any():
            channel = variable.channels[int(np.argmax(filled))]
            return (
                f"expected values below {MOST:g}, got {np.nanmax(np.abs(fields)):g} of {channel} at "
                f"{store.text(store.seconds[position])}; if this marks points without data, declare it as _FillValue in the files"
            )
        has_data |= np.isfinite(fields).any((1, 2))
    if has_data.all():
        return None
    channel = variable.channels[int(np.argmin(has_data))]
    return f"expected values, got none of {channel} in the first, the middle and the last field of the periods"


def _sampled(store: Store, count: int) -> list[int]:
    """Return at most so many positions of the periods on the time axis: the first, the last and some between."""
    data, used = store.experiment.data, np.array([], np.int64)
    with suppress(ValueError):  # a day that the calendar does not have is reported with the periods
        used = store.fields.period((*data.train, *data.valid, *data.test))
    used = used if len(used) else np.arange(len(store.seconds))
    return sorted({int(used[i]) for i in np.linspace(0, len(used) - 1, count).astype(int)})


def _gap_findings(store: Store) -> Iterator[Finding]:
    """Check that there are data where the corrections need them.

    What the data are is known from the statistics, or from a sample as long as there are none.
    """
    corrections = [
        (i, config, check)
        for i, config in enumerate(store.experiment.physics)
        if (check := getattr(registry.of("physics", config), "check_mask", None))
    ]
    found: list[Finding] = []
    for mask in _masks(store) if corrections else ():
        found = [
            (("physics", i, *path[1:]), message)
            for i, config, check in corrections
            for path, message in _refusal(("physics",), check, config, store.variables, mask)
        ]
        if not found:
            return
    yield from found


def _masks(store: Store) -> Iterator[NDArray[np.bool_]]:
    """Yield (C, H, W) of what the model predicts, True at points that have data: of more and more of the sample."""
    from credit_like.data.statistics import Statistics

    experiment, outputs = store.experiment, store.variables.outputs
    path = experiment.statistics_file
    if os.path.isfile(path):  # also for a name that no path can have
        with suppress(*_UNREADABLE):  # statistics that do not fit are reported by themselves
            yield Statistics.load(path, store.fields).mask(outputs)
            return
    mask = np.zeros((sum(map(len, outputs)), store.fields.grid.height, store.fields.grid.width), bool)
    for position in _sampled(store, _SAMPLED):
        mask |= np.isfinite(store.fields.read(outputs, [position])[0])
        yield mask


def _correction_findings(store: Store) -> Iterator[Finding]:
    """Check that grid and times suit the corrections."""
    for i, config in enumerate(store.experiment.physics):
        check = getattr(registry.of("physics", config), "check_data", None)
        for path, message in _refusal(("physics",), check, config, store.fields) if check else ():
            yield ("physics", i, *path[1:]), message


_ON_THE_AXES = (
    _circle_findings,
    _grid_findings,
    _time_findings,
    _window_findings,
    _init_findings,
    _correction_findings,
)
"""The checks that need the grid and the times of the data, not their values."""


def _statistics_file_findings(store: Store) -> Iterator[Finding]:
    """Check that the statistics file is there, if the experiment names one."""
    name = store.experiment.data.statistics
    if name is not None and not os.path.isfile(name):  # also for a name that no path can have
        yield (
            ("data", "statistics"),
            f"expected a netCDF file, got {name!r}, which is not one, change it or run `credit-like preprocess`",
        )


def _statistics_findings(store: Store) -> Iterator[Finding]:
    """Check that the statistics file, if the experiment names one, has every variable with valid values."""
    from credit_like.data.statistics import Statistics

    name = store.experiment.data.statistics
    where: Path = ("data", "statistics")
    absent = list(_statistics_file_findings(store))
    yield from absent
    if name is None or absent:
        return
    try:
        statistics = Statistics.load(FilePath(name), store.fields)
        moments = {role: statistics.select(wanted) for role in ROLES if (wanted := store.variables.role(role))}
        statistics.refuse_other_data(store.fields, store.variables, store.experiment.data, name, is_used=False)
    except UserError as error:
        yield where, _one_line(error)
        return
    except _UNREADABLE as error:
        yield where, f"expected statistics of every variable, got {_one_line(error)}, change it or make them anew"
        return
    for role, (mean, std, change_std) in moments.items():
        columns = {"mean": mean, "std": std} | ({"change_std": change_std} if role == "prognostic" else {})
        for what, values in columns.items():
            wrong = ~np.isfinite(values) if what == "mean" else ~(np.isfinite(values) & (values > 0))
            if wrong.any():
                channels = np.array(store.variables.channel_names(store.variables.role(role)))[wrong]
                good = "finite" if what == "mean" else "finite and positive"
                yield where, f"expected {good} {what}, got {values[wrong][0]} for {', '.join(channels)}, make them anew"


def _made_statistics_findings(store: Store) -> Iterator[Finding]:
    """Check that the statistics which the run has in its folder, where it has some, are those of its data."""
    from credit_like.data.statistics import Statistics

    experiment, path = store.experiment, store.experiment.statistics_file
    if experiment.data.statistics is not None or experiment.start_from is not None or not path.exists():
        return
    is_used = has_checkpoints(experiment.save_loc)

    def refuse() -> None:
        found = Statistics.load(path, store.fields)
        found.refuse_other_data(store.fields, store.variables, experiment.data, path, is_used)

    yield from _refusal(("save_loc",), refuse)


def _stored_findings(store: Store) -> Iterator[Finding]:
    """Check that a source whose statistics are to be used has those of every variable that is read."""
    from credit_like.data.stored_statistics import read_stored

    experiment = store.experiment
    if experiment.data.statistics is None and not os.path.exists(experiment.statistics_file):
        yield from _refusal(("data", "source"), read_stored, store.fields, store.variables, experiment.data)


def _fit_findings(store: Store, world: int) -> Iterator[Finding]:
    """Check that statistics which take long to fit have been fitted before several ranks wait for them."""
    from credit_like.data.statistics import refuse_long_fit
    from credit_like.data.stored_statistics import read_stored

    experiment = store.experiment
    path = experiment.statistics_file
    if world == 1 or experiment.data.statistics is not None or os.path.exists(path):
        return
    if read_stored(store.fields, store.variables, experiment.data) is None:
        yield from _refusal(
            ("data", "statistics"), refuse_long_fit, store.fields, store.variables, experiment.data, path
        )


def _launch_findings(experiment: Experiment, whole: bool, only: Mode | None) -> Iterator[Finding]:
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
        found = list(_refusal(place, resources, pbs, site, mode))
        if whole and not found:
            found += _refusal(place, lambda mode=mode, site=site: render(plan_jobs(experiment, mode, site=site), site))
        yield from found


def _one_line(error: BaseException | str) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def describe(experiment: Experiment, store: Store, world: int) -> dict[str, Any]:
    """Return a description of the run as plain data."""
    grid, at = store.fields.grid, layout(experiment.trainer, world)
    trainer = experiment.trainer
    parts = [(phase, _steps_per_epoch(store, phase)) for phase in phases(experiment)]
    return {
        "name": experiment.name,
        "save_loc": experiment.save_loc,
        "model": experiment.model.type,
        "variables": {
            role: [{"name": v.name, "levels": list(v.levels)} for v in store.variables.role(role)] for role in ROLES
        },
        "channels": {
            "in": store.variables.in_channels * experiment.data.history_len,
            "out": store.variables.out_channels,
        },
        "grid": {
            "height": grid.height,
            "width": grid.width,
            "latitude": [float(grid.latitude[0]), float(grid.latitude[-1])],
            "longitude": [float(grid.longitude[0]), float(grid.longitude[-1])],
            "global": grid.is_global,
        },
        "times": {
            "first": store.text(int(store.seconds[0])),
            "last": store.text(int(store.seconds[-1])),
            "count": len(store.seconds),
            "timestep": format_duration(experiment.data.timestep),
        },
        **({"sums": sums} if (sums := store.fields.told_other_sums()) else {}),
        "samples": {split: store.samples(split) for split in SPLITS},
        "forecasts": _describe_forecasts(store),
        "layout": {
            "world": at.world,
            "data": at.data,
            "ensemble": at.ensemble,
            "tensor": at.tensor,
            "domain": at.domain if at.columns == 1 else list(at.shape),
            "global_batch_size": trainer.global_batch_size,
            "micro_batch_size": trainer.micro_batch_size,
            "accumulation": at.accumulation,
            "steps_per_epoch": parts[0][1],
            "steps": sum(steps * phase.experiment.trainer.epochs for phase, steps in parts),
        },
        **({"phases": [_describe_phase(*part) for part in parts]} if trainer.phases else {}),
        **({"shards": shards} if (shards := _shards(experiment, grid.height, grid.width)) else {}),
    }


def _shards(experiment: Experiment, height: int, width: int) -> dict[str, dict[int, list[int]]]:
    """Return for rows and for columns, if ranks share them, size of an image in the model → what each rank has of it."""
    levels = getattr(experiment.model, "levels", None)
    shape = experiment.trainer.parallelism.degrees.shape
    return {
        name: {
            size: [stop - start for start, stop in bands.bands(size, level.unit, ranks)]
            for size, level in bands.merge(levels(height, width, axis)).items()
        }
        for axis, (name, ranks) in enumerate(zip(("rows", "columns"), shape, strict=True))
        if ranks > 1 and levels is not None
    }


def _sum_of(parts: list[int]) -> str:
    """Return parts as `181 + 3 × 180`."""
    counts = [(size, len(list(group))) for size, group in itertools.groupby(parts)]
    return " + ".join(f"{count} × {size}" if count > 1 else str(size) for size, count in counts)


def _describe_phase(phase: Phase, steps_per_epoch: int) -> dict[str, Any]:
    data, trainer = phase.experiment.data, phase.experiment.trainer
    return {
        "phase": phase.number,
        "epochs": trainer.epochs,
        "forecast_len": data.forecast_len,
        "global_batch_size": trainer.global_batch_size,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps_per_epoch * trainer.epochs,
    }


def _describe_forecasts(store: Store) -> dict[str, Any]:
    """Return the number of initial times and the lead in steps, or why `rollout` would refuse the default forecasts."""
    from credit_like.inference.times import initial_times, lead_steps

    inference, data = store.experiment.inference, store.experiment.data
    try:
        steps = lead_steps(inference.lead, data.timestep)
        made = {"initial_times": len(initial_times(inference, store.fields, data)), "steps": steps}
    except UserError as error:
        return {"refused": str(error)}
    unread = "in GRIB, which `evaluate` and `plot` do not read: for scores set inference.output.type to zarr or netcdf"
    return {**made, "note": unread} if inference.output.type == "grib" else made


def print_table(description: dict[str, Any]) -> None:
    """Print the description as a table."""
    from rich.text import Text

    from credit_like.terminal import folding_table, plain_console

    def names(variables: list[dict[str, Any]]) -> str:
        shown = [f"{v['name']} × {len(v['levels'])}" if v["levels"] else v["name"] for v in variables]
        return ", ".join(shown) or "none"

    grid, times, at = description["grid"], description["times"], description["layout"]
    made = description["forecasts"]
    processes = "1 process" if at["world"] == 1 else f"{at['world']} processes"
    members = f" × ensemble {at['ensemble']}" if at["ensemble"] > 1 else ""
    shape = domain_shape(at["domain"])
    domain = f"({domain_text(shape)})" if shape[1] > 1 else domain_text(shape)
    north, west = grid["latitude"], grid["longitude"]
    rows = {
        "model": description["model"],
        **{role.replace("_", " "): names(v) for role, v in description["variables"].items()},
        "channels": f"{description['channels']['in']} in, {description['channels']['out']} out",
        "grid": f"{grid['height']} × {grid['width']}{' global' if grid['global'] else ' regional'}, "
        f"latitude {north[0]:g} to {north[1]:g}, longitude {west[0]:g} to {west[1]:g}",
        "times": f"{times['count']} from {times['first']} to {times['last']}, stepped by {times['timestep']}",
        **({"sums": description["sums"]} if "sums" in description else {}),
        "samples": ", ".join(f"{split} {n}" for split, n in description["samples"].items())
        + " (before windows with missing fields are left out)",
        "forecasts": f"none: {made['refused']}"
        if "refused" in made
        else f"from {counted(made['initial_times'], 'time')}, {counted(made['steps'], 'step')} each"
        + (f"; {made['note']}" if "note" in made else ""),
        "layout": f"{processes} = data {at['data']}{members} × tensor {at['tensor']} × domain {domain}",
        **{
            f"{name} of each rank": ", ".join(f"{size} = {_sum_of(parts)}" for size, parts in of_sizes.items())
            for name, of_sizes in description.get("shards", {}).items()
        },
        "batch": f"{at['global_batch_size']} = micro {at['micro_batch_size']} × data {at['data']} × accumulation "
        f"{at['accumulation']}",
        "steps": f"{at['steps']} in all"
        if "phases" in description
        else f"{at['steps_per_epoch']} per epoch, {at['steps']} in all",
        **{
            f"phase {p['phase']}": f"{p['epochs']} × {p['steps_per_epoch']} steps, batch {p['global_batch_size']}, "
            f"forecast_len {p['forecast_len']}"
            for p in description.get("phases", ())
        },
        "save_loc": description["save_loc"],
    }
    table = folding_table("", "", show_header=False, box=None, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    console = plain_console()
    console.print(Text.assemble((description["name"], "bold"), ": no problems found"))
    console.print(table)
