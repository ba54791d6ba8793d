"""Scores in files: one netCDF per source of forecasts, in the layout of WeatherBench2's results."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from credit_like.data import units
from credit_like.data.aliases import find, other_quantity
from credit_like.data.files import netcdf_files
from credit_like.data.times import for_xarray
from credit_like.errors import UserError, reading
from credit_like.evaluation.scorecard import IN_UNITS
from credit_like.evaluation.sources import levels_in
from credit_like.outputs import replacing
from credit_like.schema.experiment import Experiment

_LOG = logging.getLogger(__name__)
_OF_ALL = ("initial_times", "initial_times_of_lead")
"""Variables that are the same for all sources."""
_POWERS = {
    **dict.fromkeys(IN_UNITS, 1),
    "mse": 2,
    **dict.fromkeys(("acc", "seeps", "spread-error", "spread-skill"), 0),
}
"""Powers of the units of a variable in which metrics are."""


def evaluation_folder(experiment: Experiment) -> Path:
    """Return the folder of scores and figures."""
    return Path(experiment.save_loc) / "evaluation"


def save_results(results: xr.Dataset, folder: Path) -> list[Path]:
    """Write `<source>.nc` for every source of forecasts: (metric, region, lead_time[, level]) per variable.

    Values of single initial times are compressed. Each file names all sources of the evaluation, and has a hash of all of
    its scores, by which files of different evaluations are told apart.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    evaluation, sources = _hash(results), json.dumps(list(map(str, results["source"].values)))
    for source in results["source"].values:
        path = folder / f"{source}.nc"
        one = results.sel(source=source)
        one = one.assign_attrs(provenance=str(one["provenance"].values), sources=sources, evaluation=evaluation)
        one = one.drop_vars(["source", "provenance"])
        one["lead_time"].encoding = {"units": "hours", "dtype": "float64"}
        by_init = {str(name): {"zlib": True} for name, array in one.data_vars.items() if "init_time" in array.dims}
        with replacing(path) as draft:
            netcdf_files.save(one, draft, by_init)
        paths.append(path)
    return paths


def load_results(folder: Path) -> xr.Dataset:
    """Load the files of `save_results` as one dataset with dimension `source`, the model first.

    Files of sources that only an earlier evaluation had are left out. Raises UserError if there are none, or not those of
    one evaluation, as after one that was killed between its files.
    """
    paths = sorted(folder.glob("*.nc"), key=lambda path: (path.stem != "model", path.stem))
    if not paths:
        raise UserError(f"expected scores in {folder}, got none; run `credit-like evaluate` first")
    parts: list[xr.Dataset] = []
    sources: list[str] = []
    evaluations: dict[str, str] = {}
    for path in paths:
        with reading("scores", path, "run `credit-like evaluate` again"):
            one = netcdf_files.load(path, decode_timedelta=True, decode_times=xr.coders.CFDatetimeCoder(time_unit="s"))
            if "init_time" in one.coords:
                one["init_time"] = one["init_time"].copy(data=for_xarray(one["init_time"].values))
        if absent := {"metric", "region", "lead_time", "initial_times"} - set(map(str, one.variables)):
            raise UserError(
                f"expected scores with {sorted(absent)[0]}, got {path} without; run `credit-like evaluate` again"
            )
        with reading("scores", path, "run `credit-like evaluate` again"):
            own = json.loads(one.attrs.pop("sources", "[]"))
        sources = sources or own
        evaluation = str(one.attrs.pop("evaluation", ""))  # earlier releases do not write it
        if not sources or path.stem in sources:
            evaluations[evaluation] = path.name
            parts.append(one.assign_coords(source=path.stem, provenance=str(one.attrs.pop("provenance", path))))
    if len(evaluations) > 1:
        raise UserError(
            f"expected scores of one evaluation in {folder}, got {' and '.join(evaluations.values())} of different ones; run "
            "`credit-like evaluate` again"
        )
    if lacking := sorted(set(sources) - {path.stem for path in paths}):
        _LOG.warning(
            "the scores of %s are not beside %s; run `credit-like evaluate` again to have them",
            *(", ".join(lacking), paths[0]),
        )
    with reading("scores that belong together", folder, "run `credit-like evaluate` again"):
        joined = xr.concat(
            parts,
            "source",
            data_vars="all",
            coords="different",
            compat="equals",
            join="outer",
            combine_attrs="override",
        )
    return joined.assign({name: parts[0][name] for name in _OF_ALL if name in parts[0]})


def _hash(results: xr.Dataset) -> str:
    """Return a hash of the names, values and attributes of all scores."""
    digest = hashlib.sha256(repr(sorted(results.attrs.items())).encode())
    for name, variable in sorted(results.variables.items(), key=lambda item: str(item[0])):
        digest.update(repr((str(name), variable.dims, variable.shape, sorted(variable.attrs.items()))).encode())
        values = variable.values
        digest.update(repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes())
    return digest.hexdigest()[:16]


def is_results(path: Path) -> bool:
    """Return whether a file holds scores rather than forecasts."""
    if path.suffix != ".nc" or not path.is_file():
        return False
    with reading("forecasts or scores", path, "change the path"), netcdf_files.reading(path) as file:
        return "metric" in file.dimensions


@dataclass(frozen=True)
class Wanted:
    """The units of a variable, empty where they are unknown, and whether it is on levels."""

    units: str
    on_levels: bool


@dataclass(frozen=True)
class Published:
    """Published scores of a variable on (metric, lead_time, region[, level]); `factor` converts its units to the wanted ones."""

    array: xr.DataArray
    factor: float


def open_results(path: Path, wanted: Mapping[str, Wanted]) -> tuple[dict[str, Published], str]:
    """Return the published scores of the variables of `wanted` that a file has, under our names, and where they are from.

    Raises UserError if it has none of them, or one on other dimensions or in units of something else. A variable that is
    another quantity by its attributes is left out, with a line in the log.
    """
    with reading("scores", path, "change the path"):
        theirs = netcdf_files.load(path, decode_timedelta=True)
    theirs = theirs.rename({old: "lead_time" for old in ("prediction_timedelta",) if old in theirs.dims})
    if "region" not in theirs.dims:
        theirs = theirs.expand_dims("region") if "region" in theirs.coords else theirs.expand_dims(region=["global"])
    found = {}
    for ours, what in wanted.items():
        there = find(ours, map(str, theirs.data_vars))
        if there is None:
            continue
        if there != ours and (told := other_quantity(ours, theirs[there].attrs)):
            _LOG.warning("%s of %s is not shown as %s: it is %r", there, path, ours, told)
            continue
        found[ours] = _published(theirs[there], what, f"{there} of {path}")
    if not found:
        raise UserError(
            f"expected scores of some of {', '.join(wanted)}, got {', '.join(map(str, theirs.data_vars))} in {path}; change "
            "the path"
        )
    return found, str(theirs.attrs.get("provenance", "results file"))


def _published(array: xr.DataArray, wanted: Wanted, what: str) -> Published:
    """Return the scores of one variable, with `level` where it has that and it is wanted."""
    known = ("metric", "lead_time", "region", *(("level",) if wanted.on_levels else ()))
    if wanted.on_levels and "level" in array.coords and not array["level"].ndim:
        array = array.expand_dims("level")
    array = array.squeeze([dim for dim in array.dims if dim not in known and array.sizes[dim] == 1], drop=True)
    expected = f"expected scores {what} on {', '.join(known)}"
    if further := [str(dim) for dim in array.dims if dim not in known]:
        raise UserError(f"{expected}, got {array.sizes[further[0]]} values of {further[0]!r} too; select one of them")
    if absent := [dim for dim in ("metric", "lead_time") if dim not in array.dims]:
        raise UserError(
            f"{expected}, got {', '.join(map(str, array.dims))} without {', '.join(absent)}; add them or remove the variable"
        )
    if bare := [str(dim) for dim in array.dims if dim not in array.coords]:
        raise UserError(f"{expected}, got no coordinate {bare[0]}; add it")
    if array["lead_time"].dtype.kind != "m":
        raise UserError(
            f"expected lead_time of {what} as time differences (attribute units: hours), got numbers; add the attribute"
        )
    found = str(array.attrs.get("units", ""))
    try:
        factor, _ = units.between(found, wanted.units) or (1.0, 0.0)
    except UserError as error:
        raise UserError(
            f"expected scores {what} in units that convert to the truth's {wanted.units!r}, got {found!r}; convert them or "
            "correct their units"
        ) from error
    return Published(array, factor)


def _in_wanted_units(published: Published, what: str) -> xr.DataArray:
    """Return scores in the wanted units, without metrics whose dependence on units is not known."""
    array = published.array
    if published.factor == 1:
        return array
    names = [str(name) for name in array["metric"].values]
    powers = [_POWERS.get(name.removesuffix("_low").removesuffix("_high")) for name in names]
    if unknown := [name for name, power in zip(names, powers, strict=True) if power is None]:
        _LOG.warning("%s of %s not shown: they may depend on units, which are others", ", ".join(unknown), what)
    factors = [np.nan if power is None else published.factor**power for power in powers]
    return array * xr.DataArray(factors, dims="metric", coords={"metric": array["metric"]})


def read_results(path: Path, name: str, like: xr.Dataset) -> xr.Dataset:
    """Read published scores under our variable names and in our units, at the metrics, regions, leads and levels of `like`.

    Raises UserError if they have no variable in common, and as `open_results` does.
    """
    wanted = {
        str(variable): Wanted(str(array.attrs.get("units", "")), "level" in array.dims)
        for variable, array in like.data_vars.items()
        if "metric" in array.dims
    }
    try:
        found, provenance = open_results(path, wanted)
    except UserError as error:
        raise UserError(f"evaluation.baselines.{name}: {error}") from error
    of_all = [one for one in _OF_ALL if one in like]
    result = xr.full_like(like.isel(source=[0]).drop_vars(of_all), np.nan).assign_coords(
        source=[name], provenance=("source", [f"{path}: {provenance}"])
    )
    result = result.assign({one: like[one] for one in of_all})
    for ours, published in found.items():
        mine, array = like[ours].isel(source=0, drop=True), _in_wanted_units(published, f"{ours} of {path}")
        if "level" in mine.dims and "level" in array.dims:
            levels = levels_in(published.array["level"], str(like["level"].attrs.get("units", "")))
            if not set(levels) & set(like["level"].values.tolist()):
                _LOG.warning("%s of %s is not shown: its levels are not those of the truth", published.array.name, path)
                continue
            array = array.assign_coords(level=list(levels))
        array = array.reindex({dim: mine[dim] for dim in mine.dims if dim in array.dims})
        if "level" in mine.dims and "level" not in array.dims:
            continue
        array = array.transpose(*mine.dims).expand_dims(source=[name]).assign_attrs(mine.attrs)
        result[ours] = array.assign_coords(provenance=result["provenance"])
    return result
