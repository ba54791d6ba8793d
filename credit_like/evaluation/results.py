"""Scores in files: one netCDF per source of forecasts, in the layout of WeatherBench2's results."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import xarray as xr

from credit_like.data.aliases import find
from credit_like.data.files import netcdf_files
from credit_like.errors import UserError, reading, replacing
from credit_like.evaluation.sources import levels_in
from credit_like.schema.experiment import Experiment

_LOG = logging.getLogger(__name__)
_OF_ALL = ("initial_times", "initial_times_of_lead")
"""Variables that are the same for all sources."""


def evaluation_folder(experiment: Experiment) -> Path:
    """Return the folder of scores and figures."""
    return Path(experiment.save_loc) / "evaluation"


def save_results(results: xr.Dataset, folder: Path) -> list[Path]:
    """Write `<source>.nc` for every source of forecasts: (metric, region, lead_time[, level]) per variable.

    Values of single initial times are compressed. Each file names all sources of the evaluation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for source in results["source"].values:
        path = folder / f"{source}.nc"
        one = results.sel(source=source)
        one.attrs["provenance"] = str(one["provenance"].values)
        one.attrs["sources"] = json.dumps(list(map(str, results["source"].values)))
        one = one.drop_vars(["source", "provenance"])
        one["lead_time"].encoding = {"units": "hours", "dtype": "float64"}
        by_init = {str(name): {"zlib": True} for name, array in one.data_vars.items() if "init_time" in array.dims}
        with replacing(path, path.with_suffix(".nc.part")) as draft:
            netcdf_files.save(one, draft, by_init)
        paths.append(path)
    return paths


def load_results(folder: Path) -> xr.Dataset:
    """Load the files of `save_results` as one dataset with dimension `source`, the model first.

    Files of sources that only an earlier evaluation had are left out. Raises UserError if there are none.
    """
    paths = sorted(folder.glob("*.nc"), key=lambda path: (path.stem != "model", path.stem))
    if not paths:
        raise UserError(f"expected scores in {folder}, got none; run `credit-like evaluate` first")
    parts: list[xr.Dataset] = []
    sources: list[str] = []
    for path in paths:
        with reading("scores", path, "run `credit-like evaluate` again"):
            one = netcdf_files.load(path, decode_timedelta=True)
        if absent := {"metric", "region", "lead_time", "initial_times"} - set(map(str, one.variables)):
            raise UserError(
                f"expected scores with {sorted(absent)[0]}, got {path} without; run `credit-like evaluate` again"
            )
        with reading("scores", path, "run `credit-like evaluate` again"):
            own = json.loads(one.attrs.pop("sources", "[]"))
        sources = sources or own
        if not sources or path.stem in sources:
            parts.append(one.assign_coords(source=path.stem, provenance=str(one.attrs.pop("provenance", path))))
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


def is_results(path: Path) -> bool:
    """Return whether a file holds scores rather than forecasts."""
    if path.suffix != ".nc" or not path.is_file():
        return False
    with reading("forecasts or scores", path, "change the path"), netcdf_files.reading(path) as file:
        return "metric" in file.dimensions


def read_results(path: Path, name: str, like: xr.Dataset) -> xr.Dataset:
    """Read published scores under our variable names, at the metrics, regions, leads and levels of `like`.

    Raises UserError if they have no variable in common.
    """
    theirs = netcdf_files.load(path, decode_timedelta=True)
    theirs = theirs.rename({old: "lead_time" for old in ("prediction_timedelta",) if old in theirs.dims})
    if "region" not in theirs.dims:
        theirs = theirs.expand_dims(region=["global"])
    wanted = [str(variable) for variable in like.data_vars if "metric" in like[variable].dims]
    found = {ours: other for ours in wanted if (other := find(ours, map(str, theirs.data_vars))) is not None}
    if not found:
        raise UserError(
            f"evaluation.baselines.{name}: expected scores of some of {', '.join(wanted)}, got "
            f"{', '.join(map(str, theirs.data_vars))} in {path}"
        )
    result = xr.full_like(like.isel(source=[0]).drop_vars("initial_times"), np.nan).assign_coords(
        source=[name], provenance=("source", [f"{path}: {theirs.attrs.get('provenance', 'results file')}"])
    )
    result["initial_times"] = like["initial_times"]
    for ours, there in found.items():
        mine = like[ours].isel(source=0, drop=True)
        if "level" in mine.dims and "level" in theirs[there].dims:
            levels = levels_in(theirs["level"], str(like["level"].attrs.get("units", "")))
            if not set(levels) & set(like["level"].values.tolist()):
                _LOG.warning("%s of %s is not shown: its levels are not those of the truth", there, path)
                continue
            theirs = theirs.assign_coords(level=list(levels))
        array = theirs[there].reindex({dim: mine[dim] for dim in mine.dims if dim in theirs[there].dims})
        if "level" in mine.dims and "level" not in array.dims:
            continue
        result[ours] = (
            array.transpose(*mine.dims).expand_dims(source=[name]).assign_coords(provenance=result["provenance"])
        )
    return result
