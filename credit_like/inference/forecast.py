"""Forecasts written to files, and forecasts as xarray datasets for a notebook."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from credit_like import registry
from credit_like.context import Context
from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.derive.fields import Derivation, written_derivation
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.host import HostCopy, to_host
from credit_like.inference.breed import ForMembers, initial_states
from credit_like.inference.layout import ForecastLayout
from credit_like.inference.paths import forecast_path
from credit_like.inference.plan import ForecastPlan, output_attributes, plan
from credit_like.inference.times import times_at
from credit_like.inference.writers._base import Background, ForecastKey, Writer, claim
from credit_like.lock import FileLock, Locked
from credit_like.naming import hours_text
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.domain.spatial import ChunkShare
from credit_like.rollout import rollout
from credit_like.schema.checks import has_dropout, has_noise
from credit_like.schema.data import Periods
from credit_like.schema.experiment import Experiment
from credit_like.schema.inference import InferenceSection
from credit_like.schema.places import RECORD
from credit_like.state import State
from credit_like.stepper import Stepper
from credit_like.variables import Variables

_LOG = logging.getLogger(__name__)
_WAITING = 4  # batches of fields that may wait for the disk
_LOCK_PATIENCE = 60.0  # seconds that a predecessor which is being ended has to release its forecasts

Unit = list[list[ForecastKey]]
"""Batches of (initial time, member) that one process computes, and of which all or none are complete."""


@dataclass(frozen=True)
class RolloutOutcome:
    """Result of a rollout: the files, the number of forecasts computed (each member is one), and whether all are complete."""

    path: Path
    computed: int
    finished: bool


def _warn_of_training_times(forecast_plan: ForecastPlan, store: FieldStore, trained_on: Periods) -> None:
    """Warn of forecasts that include times on which the weights were trained."""
    valid = np.add.outer(np.array(forecast_plan.init), np.arange(1, forecast_plan.leads + 1))
    known = np.isin(valid, store.period(trained_on)).any(1).sum()
    if known:
        _LOG.warning(
            "%d of %d forecasts include times on which the weights were trained; their errors are too small for a fair comparison",
            *(known, len(valid)),
        )


def write_forecasts(
    context: Context,
    checkpoint: str,
    *,
    part: tuple[int, int] = (0, 1),
    trained_on: Periods = (),
) -> RolloutOutcome:
    """Compute the experiment's forecasts that are not complete yet, and write them.

    `part` = (index, number): batches of initial times and members are distributed over data-parallel ranks or jobs of an
    array, which do not wait for each other; the one that completes the last of them gives the files their final names.
    (A format that keeps all members in one file distributes whole initial times.) `checkpoint`
    identifies the weights, and is recorded with the resolved experiment. Ranks that share a field write whole chunks of it
    where the format has chunks; otherwise they send it to the first one, a variable at a time. Where fields are derived from
    neighbouring points, they send all variables to the first one at once. Forecasts of times of `trained_on`, which the
    weights were trained on, are counted in a warning. A forecast that overflows is written as it is, and a warning says from
    which lead on it is not finite. Raises UserError before anything is written for an invalid request, Locked where another
    process writes one of these forecasts, and RuntimeError if writing fails.
    """
    experiment, store, stepper = context.experiment, context.store, context.stepper
    derive, manager = _Derive.of(context), get_domain_manager(stepper.model)
    from_whole = derive is not None and derive.from_whole
    parts = (1, 1) if manager is None or from_whole else (manager.axes[0].size, manager.axes[1].size)
    missing = sorted(context.statistics.missing_times)
    forecast_plan = plan(experiment, store, context.variables, checkpoint, missing, parts)
    layout, section = forecast_plan.layout, experiment.inference
    if trained_on and context.runtime.is_main:
        _warn_of_training_times(forecast_plan, store, trained_on)
    noise, perturb = _differences(context)
    folder = experiment.forecast_folder
    writer: Writer = registry.of("writer", section.output).open_writer(section.output, layout, folder)
    try:
        claim(folder, _identity(experiment, forecast_plan, checkpoint), partial(_completed, experiment))
        writer.open()
    except FileNotFoundError as error:
        if (folder / RECORD).is_file():
            raise
        raise Locked(_removed(folder)) from error
    collects, share = context.runtime.tensor_rank == 0, None
    if manager is not None and collects:
        share = ChunkShare(manager, (store.grid.height, store.grid.width) if from_whole else writer.box)
        writer.part = share.part
    # A rank that writes what others computed holds one lead of it, not several, besides those that share a chunk.
    names = list(layout.chosen) if share is not None and share.alone and not from_whole else [None]
    tells = collects and (share is None or share.first)
    units = _units(forecast_plan, section, writer)[part[0] :: part[1]]
    stepper.eval()
    with ExitStack() as stack:
        todo = _reserved(stack, context, part, units, writer, forecast_plan, tells)
        background = Background(_WAITING if names == [None] else len(names))
        try:
            for unit in todo:
                states = _states(context, forecast_plan, unit, noise, perturb)
                for places, lead, state in _watched(states, context, forecast_plan, background if tells else None):
                    if collects and lead in layout.leads:
                        for name, fields in _fields(stepper, state, share, derive, layout, names):
                            background.submit(partial(_write, writer, places, layout.leads.index(lead), name, fields))
                if share is not None and not share.alone:
                    background.submit(partial(_flush, writer, unit))
                    background.flush()
                    share.wait_for_all(context.runtime.device)
                if tells:
                    background.submit(partial(_complete, writer, unit))
            background.close()
        except BaseException:
            background.abandon()
            writer.abandon()
            raise
        finished = writer.finish()
    return RolloutOutcome(forecast_path(experiment), sum(len(places) for unit in todo for places in unit), finished)


def _removed(folder: Path) -> str:
    return f"the forecasts in {folder} were removed by another process, perhaps with their run; start again"


def _reserved(
    stack: ExitStack,
    context: Context,
    part: tuple[int, int],
    units: Sequence[Unit],
    writer: Writer,
    forecast_plan: ForecastPlan,
    tells: bool,
) -> list[Unit]:
    """Lock the units that are not complete until `stack` ends, and return those that are not complete then.

    One rank of those that share a model does so, `tells`, and the others learn what it found. Raises Locked on every rank
    where another process has one of the units of any, or has removed the forecasts.
    """
    init, members = forecast_plan.layout.init, forecast_plan.layout.members
    missing = [unit for unit in units if not _is_complete(unit, writer)]
    keys = sorted(key for unit in missing for places in unit for key in places)
    left, refused = [], None
    if tells and missing:
        lock = FileLock(
            writer.folder / ".lock",
            writer.folder,
            "give each of them a part of the forecasts (--share)",
            min(_LOCK_PATIENCE, context.experiment.trainer.timeout.total_seconds() / 2),
            places=[i * members + member for i, member in keys],
            names=[f"the forecast from {calendar.to_text(init[i])}" for i, _ in keys],
        )
        try:
            stack.enter_context(lock)
            # A process that was ending may have completed more.
            left = [number for number, unit in enumerate(units) if not _is_complete(unit, writer)]
            if not (writer.folder / RECORD).is_file():
                refused = _removed(writer.folder)
        except FileNotFoundError:
            refused = _removed(writer.folder)
        except Locked as error:
            refused = str(error)
    found = [each for each in context.runtime.gather((part, refused, left) if tells else None) if each is not None]
    if refused := next((each[1] for each in found if each[1] is not None), None):
        raise Locked(refused)
    return [units[number] for own, _, numbers in found if own == part for number in numbers]


def _differences(context: Context) -> tuple[bool, ForMembers | None]:
    """Return whether each member has its own noise, and the perturbations of their initial states; seed the noise."""
    experiment, noise = context.experiment, context.stepper.noise
    ensemble = experiment.inference.ensemble
    # Keys that a model has for dropout alone do not make its members differ.
    noisy = noise is not None and (has_noise(experiment) or not has_dropout(experiment))
    from_noise, perturbed = ensemble.sources(noisy)
    if ensemble.members > 1 and from_noise and not noisy:
        raise UserError(
            f"inference.ensemble.from: expected a model with noise for members from {ensemble.from_}, got none; add "
            "model.noise or change it to perturbations"
        )
    if noise is not None:
        noise.reseed("members", ensemble.seed)
    if ensemble.members == 1 or not perturbed:
        return from_noise, None
    return from_noise, initial_states(context, computes_in_bfloat16(experiment))


Step = tuple[Sequence[ForecastKey], int, State]
"""(Initial times and members, lead, state)."""


def _states(
    context: Context, forecast_plan: ForecastPlan, unit: Unit, noise: bool, perturb: ForMembers | None
) -> Iterator[Step]:
    """Yield every step of a unit's forecasts."""
    for places in unit:
        members = [member for _, member in places]
        for lead, state in rollout(
            context.stepper,
            context.store,
            context.variables,
            [forecast_plan.init[i] for i, _ in places],
            forecast_plan.leads,
            history_len=context.experiment.data.history_len,
            rows=context.rows,
            columns=context.columns,
            members=members if noise else None,
            perturb=perturb(members) if perturb else None,
            amp=computes_in_bfloat16(context.experiment),
        ):
            yield places, lead, state


def computes_in_bfloat16(experiment: Experiment) -> bool:
    """Return whether forecasts are computed in bfloat16: `inference.amp` if given, else as in training."""
    if experiment.inference.amp is not None:
        return experiment.inference.amp
    trainer = experiment.trainer
    policy = trainer.fsdp2_mp_policy if trainer.parallelism.data == "fsdp2" else None
    return trainer.amp and (policy is None or policy.param_dtype == "bfloat16")


def forecast(
    stepper: Stepper,
    store: FieldStore,
    variables: Variables,
    init: Sequence[str],
    leads: int,
    *,
    history_len: int = 1,
    amp: bool = False,
) -> Iterator[xr.Dataset]:
    """Yield one forecast dataset per lead, with the initial times along `time`; with `amp`, computed in bfloat16.

    `init` are ISO times in the data. Fields are float32 in physical units, NaN at points without data. Nothing is written, and
    only one lead is in memory unless the caller keeps more. Raises UserError for a time that is not in the data.
    """
    positions = [store.index(time) for time in init]
    layout = ForecastLayout(
        init=times_at(store, positions),
        leads=(1,),
        timestep=store.step_seconds,
        members=1,
        grid=store.grid,
        variables=variables.outputs,
        chosen={variable.name: variable.levels for variable in variables.outputs},
        variable_attrs=output_attributes(store, variables),
        attrs={"Conventions": "CF-1.11"},
    )
    stepper.eval()
    for lead, state in rollout(stepper, store, variables, positions, leads, history_len=history_len, amp=amp):
        dataset = xr.Dataset(coords=layout.coordinates().coords, attrs=dict(layout.attrs))
        dataset = dataset.assign_coords(
            prediction_timedelta=[np.timedelta64(lead * store.step_seconds, "s").astype("timedelta64[ns]")]
        )
        fields = stepper.masked(stepper.outputs(state)).float().cpu().numpy()
        for name, values in layout.select(fields).items():
            dataset[name] = (layout.variable_dims(name), values[:, None], layout.attrs_of(name))
        yield dataset


def _identity(experiment: Experiment, forecast_plan: ForecastPlan, checkpoint: str) -> dict[str, Any]:
    """Return everything that the numbers in the files depend on, other than by rounding.

    A smaller batch must be able to complete forecasts for which the memory did not suffice.
    """
    init = [calendar.to_text(time) for time in forecast_plan.layout.init]
    return {
        "experiment": _kept(experiment),
        "bfloat16": computes_in_bfloat16(experiment),
        "checkpoint": checkpoint,
        "plugins": registry.forecast_hashes(experiment.plugins),
        "initial_times": init,
        "leads": list(forecast_plan.layout.leads),
    }


def _kept(experiment: Experiment) -> dict[str, Any]:
    resolved = experiment.to_dict()
    kept: dict[str, Any] = {
        key: resolved[key] for key in ("name", "seed", "data", "model", "physics", "inference") if key in resolved
    }
    kept["inference"] = {
        key: value for key, value in resolved["inference"].items() if key not in ("batch_size", "checkpoint")
    }
    return kept


def _completed(experiment: Experiment, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an earlier release with the defaults of keys that it lacks."""
    record = {"plugins": registry.forecast_hashes(experiment.plugins), **record}
    try:
        recorded = Experiment.model_validate({**experiment.to_dict(), **record["experiment"]})
    except (KeyError, TypeError, ValueError):
        return record
    return {**record, "experiment": _kept(recorded)}


def _batches(group: Sequence[int], members: int, batch_size: int) -> list[list[ForecastKey]]:
    """Return the (initial time, member) pairs of a group in batches of `batch_size`."""
    pairs = [(i, member) for i in group for member in range(members)]
    return [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)]


def _units(forecast_plan: ForecastPlan, section: InferenceSection, writer: Writer) -> list[Unit]:
    """Return the units of work of ranks and restarts: single batches, or all batches of a group where files hold members."""
    units = [_batches(group, section.ensemble.members, section.batch_size) for group in forecast_plan.groups]
    return [[places] for unit in units for places in unit] if writer.by_member else units


def _is_complete(unit: Unit, writer: Writer) -> bool:
    if writer.by_member:
        return all(writer.is_member_complete(init, member) for places in unit for init, member in places)
    return all(writer.is_complete(init) for places in unit for init, _ in places)


@dataclass(frozen=True)
class _Derive:
    """Derived fields of the stepper's outputs on this rank's part of the grid, or on all of it."""

    derivation: Derivation
    slices: dict[str, slice]
    ground_HW: Tensor | None
    grid: Grid
    from_whole: bool
    """Whether a field needs neighbouring points, so that all fields are derived from whole ones."""

    @classmethod
    def of(cls, context: Context) -> _Derive | None:
        """Return the derived fields to write, or None if there are none. Raises UserError where the data do not suit them."""
        derivation = written_derivation(context.experiment, context.variables)
        if derivation is None:
            return None
        derivation.check_units(context.store)
        whole, grid = derivation.needs_neighbours, context.store.grid
        rows, columns = (slice(None), slice(None)) if whole else (context.rows, context.columns)
        ground = derivation.ground(context.store)
        on_device = None
        if ground is not None:
            on_device = torch.from_numpy(np.ascontiguousarray(ground[rows, columns])).to(context.runtime.device)
        grid = Grid(grid.latitude[rows], grid.longitude[columns])
        return cls(derivation, Variables.slices(context.variables.outputs), on_device, grid, whole)

    def append(self, fields_BCHW: Tensor) -> Tensor:
        """Return the fields followed by the derived ones, in the order of `ForecastLayout.variables`."""
        by_name = {name: fields_BCHW[:, channels] for name, channels in self.slices.items()}
        return torch.cat([fields_BCHW, *self.derivation(by_name, self.ground_HW, self.grid).values()], 1)


def _fields(
    stepper: Stepper,
    state: State,
    share: ChunkShare | None,
    derive: _Derive | None,
    layout: ForecastLayout,
    names: Sequence[str | None],
) -> Iterator[tuple[str | None, HostCopy]]:
    """Yield the part of each variable that this rank writes, if any: (B, C, H, W) float32 with NaN at missing points.

    The name None stands for all variables. Fields that need neighbouring points are derived after these are collected, others
    before.
    """
    with torch.inference_mode():
        outputs = stepper.masked(stepper.outputs(state)).float()
        if derive is not None and not derive.from_whole:
            outputs = derive.append(outputs)
    for name in names:
        with torch.inference_mode():
            own = outputs if name is None else outputs[:, layout.channels(name)]
            fields = own if share is None else share.collect(own)
            if fields is None:
                continue
            copy = to_host(derive.append(fields) if derive is not None and derive.from_whole else fields)
        yield name, copy


def _watched(
    states: Iterator[Step], context: Context, forecast_plan: ForecastPlan, background: Background | None
) -> Iterator[Step]:
    """Yield the steps; after the last one of a batch, `background` warns of what is not finite. Collective over a field's ranks."""
    finite = []
    for places, lead, state in states:
        finite.append(_finite(state))
        yield places, lead, state
        if lead == forecast_plan.leads:
            # A field that ranks share is not finite where the part of any of them is not.
            wrong = to_host(context.runtime.sum_over_domain((~torch.stack(finite)).float()))
            if background is not None:
                background.submit(partial(_warn, forecast_plan.layout, places, wrong))
            finite = []


def _finite(state: State) -> Tensor:
    """Return which channels of the stepper's outputs are finite at all points of this rank, (B, C_out)."""
    with torch.inference_mode():
        # The sum is finite if all values are, and takes one pass over them.
        return torch.cat([x.sum((-2, -1)).isfinite() for x in (state.now, state.diagnostic)], 1)


def _warn(layout: ForecastLayout, places: Sequence[ForecastKey], wrong_LBC: HostCopy) -> None:
    """Warn of the forecasts of a batch that are not finite at some lead."""
    wrong = np.asarray(wrong_LBC.wait().numpy() > 0)
    bad = np.flatnonzero(wrong.any((0, 2)))
    if not bad.size:
        return
    first = int(wrong[:, bad[0]].any(-1).argmax())
    init, member = places[bad[0]]
    names = [channel for variable in layout.variables for channel in variable.channels]
    channels = [names[i] for i in np.flatnonzero(wrong[first, bad[0]])]  # the stepper's outputs come first
    _LOG.warning(
        "the forecast from %s%s is not finite from a lead of %s on: %s%s (%d of %d forecasts of this batch are not)",
        calendar.to_text(layout.init[init]),
        f", member {member}," if layout.members > 1 else "",
        hours_text(np.timedelta64((first + 1) * layout.timestep, "s")),
        ", ".join(channels[:3]),
        f" and {len(channels) - 3} others" if len(channels) > 3 else "",
        len(bad),
        len(places),
    )


def _write(writer: Writer, places: Sequence[ForecastKey], lead: int, name: str | None, fields: HostCopy) -> None:
    layout, numbers = writer.layout, fields.wait().numpy()
    writer.write(places, lead, layout.select(numbers) if name is None else {name: layout.shaped(name, numbers)})


def _flush(writer: Writer, unit: Unit) -> None:
    for batch in unit:
        for init, member in batch:
            writer.flush(init, member if writer.by_member and writer.layout.members > 1 else None)


def _complete(writer: Writer, unit: Unit) -> None:
    places = [place for batch in unit for place in batch]
    if writer.by_member and writer.layout.members > 1:
        for init, member in places:
            writer.complete_member(init, member)
    else:
        for init in dict.fromkeys(init for init, _ in places):
            writer.complete(init)
