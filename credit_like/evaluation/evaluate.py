"""Scores of forecasts, streamed over initial times and blocks of leads.

A block holds only a few fields: truth, climatology and every source of forecasts for one variable from one initial
time, at as many leads as fit into 64 MiB. Blocks are dask tasks, so that a local pool or a cluster processes several at
a time. Only statistics per time, level and region are retained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import dask
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like import registry
from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.data.times import Times
from credit_like.errors import RunError, UserError
from credit_like.evaluation.climatology import Climatology, climatology_times, fit_climatology, load_climatology
from credit_like.evaluation.collect import Collected, vectors
from credit_like.evaluation.derived import forecast_files, scored_variables
from credit_like.evaluation.fields import Fields, Regions
from credit_like.evaluation.frames import COLUMNS
from credit_like.evaluation.gaps import Gaps
from credit_like.evaluation.html_page import REPORT_MARK
from credit_like.evaluation.metrics import needs, statistics, try_out
from credit_like.evaluation.needs import check_metrics, possible_metrics
from credit_like.evaluation.precipitation import dry_limit, is_precipitation, seeps_thresholds
from credit_like.evaluation.results import Wanted, evaluation_folder, is_results, open_results, read_results
from credit_like.evaluation.sources import (
    ClimatologyForecast,
    ForecastFiles,
    PersistenceForecast,
    Scored,
    Truth,
    in_order_of,
    open_forecast,
    unfinished,
)
from credit_like.evaluation.thresholds import event_labels, event_thresholds
from credit_like.naming import counted, hours_text
from credit_like.outputs import begins_with, check_own, folder_identity
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variable, Variables

_LOG = logging.getLogger(__name__)
_BLOCK_BYTES = 64 * 2**20
_AT_ONCE = 64  # blocks submitted to dask together
_LISTED = 6  # leads that a warning names
MODEL, PERSISTENCE, CLIMATOLOGY = "model", "persistence", "climatology"


@dataclass(frozen=True)
class ScoreBlock:
    """One variable from one initial time at some leads."""

    init: int
    variable: Variable
    levels: tuple[int, ...]
    first_lead: int
    leads: tuple[int, ...]


@dataclass(frozen=True)
class BlockScores:
    """Results of one block: (source, metric, statistic) → (leads, levels, regions[, extra]).

    `gaps`: source → the fraction of points at which its forecast is not finite, (leads,), of files alone.
    """

    statistics: Mapping[tuple[str, str, str], NDArray[np.float64]]
    gaps: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Scorer:
    """The data and metrics with which a block is scored."""

    truth: Truth
    sources: Mapping[str, Scored]
    climatology: Climatology
    regions: Regions
    metrics: Mapping[str, ModuleType]
    thresholds: Mapping[str, tuple[Any, Any]]
    dry: Mapping[str, float]
    events: Mapping[str, NDArray[np.float64]]

    def score(self, block: ScoreBlock, inits: Sequence[int]) -> BlockScores:
        """Return the statistics of one block."""
        store, init = self.truth.store, inits[block.init]
        valid = init + np.array(block.leads, np.int64)
        truth = self.truth.at(valid, block.variable, block.levels)
        times = calendar.from_seconds(valid, store.calendar)
        mean = self.climatology.at(block.variable.name, times, block.levels).astype(np.float64)
        result, gaps = {}, {}
        for name, source in self.sources.items():
            forecast = source.fields(init, block.leads, block.variable, block.levels)
            if forecast is None:
                continue
            rain = self.thresholds.get(block.variable.name), self.dry.get(block.variable.name, np.nan)
            events = self.events.get(block.variable.name)
            fields = Fields(forecast, truth, mean, self.regions, store.grid, *rain, events).lock()
            if isinstance(source, ForecastFiles):
                lost = 1 - np.isfinite(forecast).all(0).mean((1, 2, 3))
                gaps[name] = np.where(np.isin(block.leads, source.leads), lost, np.nan)
            for metric, module in self.metrics.items():
                if _applies(module, fields):
                    is_first = block.init == block.first_lead == 0 and name == MODEL
                    compute = try_out if is_first and registry.is_foreign(module.__name__) else statistics
                    for statistic, values in compute(metric, module, fields).items():
                        result[name, metric, statistic] = values
        return BlockScores(result, gaps)


def _applies(metric: ModuleType, fields: Fields) -> bool:
    has = {"climatology", "ensemble", "circles"}
    if len(fields.forecast) > 1:
        has.add("members")
    if fields.thresholds is not None:
        has.add("precipitation")
    if fields.events is not None:
        has.add("thresholds")
    return bool(has >= needs(metric))


def check_results(experiment: Experiment) -> None:
    """Raise UserError if `evaluate` would replace a file in the run's folder that it has not written."""
    folder = evaluation_folder(experiment)
    for source in (MODEL, PERSISTENCE, CLIMATOLOGY, *experiment.evaluation.baselines):
        check_own("save_loc", folder / f"{source}.nc", "scores of this command", _has_scores)
    check_own("save_loc", folder / "scores.csv", "a table of scores of this command", begins_with(",".join(COLUMNS)))
    check_own("save_loc", folder / "report.html", "a report of this command", begins_with(REPORT_MARK))


def _has_scores(path: Path) -> bool:
    with suppress(UserError):
        return is_results(path)
    return False


def evaluate(
    experiment: Experiment,
    forecasts: Path | str | xr.Dataset,
    truth: FieldStore,
    training: FieldStore,
    variables: Variables,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Score forecasts against the truth, together with persistence, climatology and the configured baselines.

    `training` is the store from which the climatology is computed (`truth` may be another source). Returns one dataset
    in the layout of WeatherBench2's results, (source, metric, region, lead_time[, level]) per variable, with
    `provenance` (source), the number of initial times, that of each lead as `initial_times_of_lead`, the statistics of every
    initial time as `<variable>_by_init` (source, statistic, init_time, region, lead_time[, level]), and, if the section
    requests them, bounds of 95 % from bootstrapping the initial times as metrics `<name>_low` and `<name>_high`. Warns of
    forecasts that are not finite everywhere, and of leads for which the truth lacks valid times. Raises UserError for
    forecasts, baselines or metrics that do not fit the truth, and RunError where forecasts are replaced meanwhile.
    """
    section = experiment.evaluation
    with registry.searching(experiment.plugins):
        metrics = possible_metrics({name: registry.module("metric", name) for name in section.metrics}, truth.grid)
    truth = in_order_of(training.grid, truth)
    read = (*([] if isinstance(forecasts, xr.Dataset) else [forecasts]), *section.baselines.values())
    stores = {path: folder_identity(Path(path)) for path in read}
    model = _files(forecasts, truth, "the forecasts")
    scored = _scored(variables, model)
    others, published = open_baselines(section.baselines, truth)
    inits = _common(model, others)
    leads = [int(lead) for lead in model.leads if lead > 0]
    if not leads:
        raise UserError(f"expected forecasts with leads above 0, got none in {model.provenance}; change inference.lead")
    truths = Truth(truth)
    has_truth = _has_truth(truths, inits, leads)
    times = calendar.from_seconds(np.unique(np.add.outer(inits, leads)), truth.calendar)
    scorer = _scorer(experiment, truths, training, model, others, scored, metrics, times)
    started = calendar.from_seconds(np.array(inits, np.int64), truth.calendar)
    labels = {name: event_labels(section.thresholds, name) for name in scorer.events}
    collected = Collected(list(scorer.sources), metrics, started, leads, scorer.regions.names, labels)
    gaps = Gaps(len(inits), leads)
    blocks = list(_blocks(scored, model, inits, leads, truth))
    for done, block, part in _run(scorer, blocks, inits):
        collected.add(block.variable, block.levels, block.init, block.first_lead, part.statistics)
        for name, fractions in part.gaps.items():
            gaps.add(name, block.variable.name, block.init, block.first_lead, fractions)
        if progress is not None:
            progress(done, len(blocks))
    for path, store in stores.items():
        if folder_identity(Path(path)) != store:  # zarr takes chunks that are not there for missing values
            raise RunError(
                f"expected the forecasts in {path} not to change while they are scored, got others or none; run "
                "`credit-like evaluate` again once they are complete"
            )
    for message in gaps.messages():
        _LOG.warning("%s", message)
    result = collected.dataset(section.bootstrap, experiment.seed)
    provenance = [source.provenance for source in scorer.sources.values()]
    result = result.assign_coords(provenance=("source", provenance))
    result.attrs["experiment"] = experiment.name
    told = {"long_name": "number of initial times with truth at the lead"}
    result["initial_times_of_lead"] = ("lead_time", has_truth.sum(0), told)
    _describe(result, scored, truth)
    for name, path in published.items():
        result = xr.concat(
            [result, read_results(path, name, result)],
            "source",
            data_vars="minimal",
            coords="minimal",
            compat="override",
            join="exact",
            combine_attrs="override",
        )
    return result


def _has_truth(truths: Truth, inits: Sequence[int], leads: Sequence[int]) -> NDArray[np.bool_]:
    """Return whether there is truth at (init, lead); warn where there is none. Raises UserError if there is none at all."""
    valid = np.add.outer(inits, leads)
    has_truth, _ = truths.positions(valid)
    if not has_truth.any():
        raise UserError(
            f"expected truth at valid times of the forecasts, got none between {_text(valid.min(), truths.store)} and "
            f"{_text(valid.max(), truths.store)}; change evaluation.truth or inference.init"
        )
    for message in _without_truth(has_truth, truths.positions(np.array(inits, np.int64))[0], leads):
        _LOG.warning("%s", message)
    return has_truth


def _scorer(
    experiment: Experiment,
    truths: Truth,
    training: FieldStore,
    model: ForecastFiles,
    others: Mapping[str, ForecastFiles],
    scored: Sequence[Variable],
    metrics: Mapping[str, ModuleType],
    times: Times,
) -> Scorer:
    """Return the sources to compare and what the metrics need, with the climatology at these valid times.

    Raises UserError for metrics that do not fit the forecasts.
    """
    section, truth = experiment.evaluation, truths.store
    rainy = [variable for variable in scored if is_precipitation(variable, training)]
    limits = section.thresholds
    check_metrics(metrics, model.members, [v.name for v in rainy], limits, [v.name for v in scored])
    period = climatology_times(training, experiment)
    fitting = (training, scored, period, times, section.climatology_window_days)
    climatology = load_climatology(Path(experiment.save_loc) / "climatology.zarr", *fitting) or fit_climatology(
        *fitting
    )
    sources: dict[str, Scored] = {MODEL: model, PERSISTENCE: PersistenceForecast(truths), **others}
    sources[CLIMATOLOGY] = ClimatologyForecast(climatology, truth.calendar)
    regions = Regions(truth.grid, section.regions)
    needed = {need for module in metrics.values() for need in needs(module)}
    thresholds = {v.name: seeps_thresholds(training, v, period) for v in rainy if "precipitation" in needed}
    dry = {variable.name: dry_limit(variable, training) for variable in rainy}
    events = {
        variable.name: event_thresholds(limits, training, variable, model.levels_of(variable), period)
        for variable in scored
        if "thresholds" in needed and event_labels(limits, variable.name)
    }
    return Scorer(truths, sources, climatology, regions, metrics, thresholds, dry, events)


def _without_truth(
    has_truth_IL: NDArray[np.bool_], has_truth_at_init_I: NDArray[np.bool_], leads: Sequence[int]
) -> Iterator[str]:
    """Yield a sentence on leads that are scored over fewer initial times than there are, and one on persistence."""
    number, cure = len(has_truth_IL), "change inference.init or evaluation.truth"
    fewer = [
        f"{hours_text(np.timedelta64(lead, 's'))} over {count}"
        for lead, count in zip(leads, has_truth_IL.sum(0).tolist(), strict=True)
        if count < number
    ]
    if fewer:
        more = f" and {counted(len(fewer) - _LISTED, 'more lead')}" if len(fewer) > _LISTED else ""
        yield (
            f"some leads are scored over fewer than {counted(number, 'initial time')}, because the truth lacks their valid times: "
            f"{', '.join(fewer[:_LISTED])}{more}; their scores are of other weather than those of the other leads; {cure}"
        )
    if not has_truth_at_init_I.all():
        yield (
            f"persistence is scored from {int(has_truth_at_init_I.sum())} of {counted(number, 'initial time')}: the truth "
            f"lacks the others; {cure}"
        )


def _scored(variables: Variables, model: ForecastFiles) -> list[Variable]:
    """Return the variables that the forecasts have. Raises UserError if they lack a derived one, or have none."""
    scored = [variable for variable in variables.outputs if model.levels_of(variable)]
    if absent := [v.name for v in variables.outputs if v.role == "derived" and v not in scored]:
        raise UserError(
            f"evaluation.derive: expected forecasts of {', '.join(absent)} or of all that they are derived from, got files "
            "without; change inference.output (variables, levels) or inference.derive and run `credit-like rollout` again"
        )
    if not scored:
        known = ", ".join(variable.name for variable in variables.outputs)
        raise UserError(f"expected forecasts of some of {known}, got none of them in {model.provenance}")
    return scored


def _describe(result: xr.Dataset, scored: Sequence[Variable], truth: FieldStore) -> None:
    """Set units of variables and levels, and the extent of the grid, as attributes; a vector has units of its first component."""
    result.attrs["grid"] = "global" if truth.grid.is_global else "regional"
    for name, one in _wanted(scored, truth).items():
        if name in result and one.units:
            result[name].attrs["units"] = one.units
    of_levels = {truth.level_units(variable) for variable in scored if variable.levels}
    if "level" in result.coords and len(of_levels) == 1 and (unit := of_levels.pop()):
        result["level"].attrs["units"] = unit


def _wanted(variables: Sequence[Variable], truth: FieldStore) -> dict[str, Wanted]:
    """Return units and kind of levels of variables, and of the vectors of which they may be components."""
    wanted = {one.name: Wanted(truth.attrs(one).get("units", ""), bool(one.levels)) for one in variables}
    return wanted | {vector: wanted[u] for vector, u, _ in vectors(wanted)}


def _files(forecasts: Path | str | xr.Dataset, truth: FieldStore, what: str) -> ForecastFiles:
    """Return a forecast dataset, opening it if it is a path, after checking that it is on the truth's grid."""
    if isinstance(forecasts, xr.Dataset):
        dataset, where = forecasts, what
    else:
        dataset, where = open_forecast(forecasts), str(forecasts)
        if left := unfinished(forecasts):
            _LOG.warning(
                "%s has unfinished forecasts, which are not scored: %s%s; run `credit-like rollout` again to complete them",
                *(forecasts, left[0].name, f" and {len(left) - 1} more" if left[1:] else ""),
            )
    made = ", ".join(str(dataset.attrs[key]) for key in ("title", "source") if key in dataset.attrs)
    return forecast_files(dataset, truth, f"{where}: {made}" if made else where)


def open_baselines(paths: Mapping[str, str], truth: FieldStore) -> tuple[dict[str, ForecastFiles], dict[str, Path]]:
    """Return the forecasts to score for comparison with the model, and the files of published results.

    Raises UserError for a file that is neither, for forecasts whose grid is not the truth's, and for results on other
    dimensions or in units of something else.
    """
    forecasts, published = {}, {}
    wanted = _wanted(scored_variables(truth.variables, truth).outputs, truth)
    for name, path in paths.items():
        if name in (MODEL, PERSISTENCE, CLIMATOLOGY):
            raise UserError(
                f"evaluation.baselines: expected another name than {name}, which every evaluation uses itself, change it"
            )
        try:
            if is_results(Path(path)):
                open_results(Path(path), wanted)
                published[name] = Path(path)
            else:
                forecasts[name] = _files(path, truth, name)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"evaluation.baselines.{name}: {error}") from error
    return forecasts, published


def _common(model: ForecastFiles, others: Mapping[str, ForecastFiles]) -> list[int]:
    """Return the initial times (seconds) common to all sources, since scores over different times cannot be compared."""
    common = sorted(set(model.init.tolist()).intersection(*(other.init.tolist() for other in others.values())))
    if not common:
        raise UserError(
            "evaluation.baselines: expected initial times in common with the forecasts, got none; "
            f"change {', '.join(others)}"
        )
    if len(common) < len(model.init):
        _LOG.warning("%d of %d initial times are scored: the baselines lack the others", len(common), len(model.init))
    return common


def _blocks(
    scored: Sequence[Variable], model: ForecastFiles, inits: Sequence[int], leads: Sequence[int], truth: FieldStore
) -> Iterator[ScoreBlock]:
    for variable in scored:
        levels = tuple(model.levels_of(variable))
        lead_bytes = 8 * model.members * len(levels) * truth.grid.height * truth.grid.width
        at_once = max(1, _BLOCK_BYTES // lead_bytes)
        for init in range(len(inits)):
            for first in range(0, len(leads), at_once):
                yield ScoreBlock(init, variable, levels, first, tuple(leads[first : first + at_once]))


def _run(
    scorer: Scorer, blocks: Sequence[ScoreBlock], inits: Sequence[int]
) -> Iterator[tuple[int, ScoreBlock, BlockScores]]:
    """Yield (blocks done, block, its scores), computed on the active dask scheduler."""
    for start in range(0, len(blocks), _AT_ONCE):
        some = blocks[start : start + _AT_ONCE]
        parts = dask.compute(*(dask.delayed(scorer.score, pure=False)(block, inits) for block in some))
        for i, (block, part) in enumerate(zip(some, parts, strict=True)):
            yield start + i + 1, block, part


def _text(second: int, truth: FieldStore) -> str:
    return calendar.to_text(calendar.one_time(second, truth.calendar))
