"""Write an experiment for data at hand: roles from names and attributes, periods, and a model that fits grid and machine.

The proposal is checked like any experiment before it is written. Values that are guesses are marked by a comment in the file.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
import yaml
from numpy.typing import NDArray

from credit_like import registry
from credit_like.data.aliases import ALIASES
from credit_like.data.files import netcdf_files
from credit_like.data.files.find import find_files, is_url, source_type
from credit_like.data.sources._conventions import DIMS, own_name
from credit_like.data.times import seconds, to_text
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.models.wxformer import Config as WXFormer
from credit_like.outputs import check_new, process_name
from credit_like.schema.base import format_duration
from credit_like.variables import ROLES

FEWEST = 12
"""Fewest times from which training, validation and test periods can be cut."""
_STATIC = {
    "orography", "orog", "oro", "phis", "hgt", "topography", "surface_altitude", "geopotential_at_surface", "z_surface",
    "land_sea_mask", "lsm", "sftlf", "landfrac", "landmask", "xland", "land_binary_mask", "land_area_fraction", "soil_type",
    "slt", "sdor", "isor", "anor", "slor", "standard_deviation_of_orography", "lake_cover", "cl", "cvh", "cvl", "lakemask",
}  # fmt: skip
_ALSO_MOVING = {"hgt", "cl"}
"""Of these, names that are heights and cloud cover elsewhere: NCEP's geopotential height, the cover on levels of CMIP6."""
_FORCING = {
    "sea_surface_temperature", "sst", "tos", "sstk", "sea_ice_cover", "siconc", "siconca", "sic", "ci", "icefrac", "seaice",
    "sea_ice_area_fraction",
}  # fmt: skip
_SUN = {"toa_incident_solar_radiation", "tisr", "tsi", "rsdt", "solin", "toa_incoming_shortwave_flux"}
_DIAGNOSTIC = {
    "tp", "cp", "lsp", "pr", "prc", "prsn", "prect", "precc", "precl", "rainc", "rainnc", "precipitation", "e", "evspsbl",
    "evaporation", "qflx", "hfls", "hfss", "lhflx", "shflx", "slhf", "sshf", "lh", "hfx", "ssr", "ssrd", "str", "strd", "tsr",
    "ttr", "rlut", "rlutcs", "rsut", "rsutcs", "rlds", "rsds", "rlus", "rsus", "flut", "flnt", "fsnt", "flns", "fsns", "olr",
    "swdown", "glw", "ro", "sf", "rain", "rainfall", "precip", "prate", "apcp", "snowfall",
}  # fmt: skip
_STOCKS = ("_snow_amount", "canopy_water_amount")
"""Ends of standard names of amounts that are there, such as CMIP6's `snw`, instead of falling within a step."""
_SINCE_START = {"rainc", "rainnc", "acswdnb", "aclwdnb"}
_CORE = {
    "ua", "va", "ta", "hus", "zg", "wap", "psl", "ps", "tas", "uas", "vas", "huss", "ts", "pr", "omega", "z3", "relhum",
    "t2", "q2", "psfc", "trefht", "u10", "v10", "prect", "precipitation",
}  # fmt: skip
_DEGREES = re.compile("degrees?_?(north|east|n|e)")
_MANY_CHANNELS = 200
_WEATHERBENCH_LEVELS = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
_LARGE, _SMALL = 30_000, 6_000  # points of a grid


@dataclass(frozen=True)
class Found:
    """A variable of the data: its name in the experiment, where it is, and the role proposed for it."""

    name: str
    var: str
    role: str
    levels: tuple[float, ...]
    path: str | None = None
    why: str = ""


@dataclass
class Data:
    """The data as found: how to read them, their axes, the variables, and why others are left out."""

    sources: list[dict[str, Any]]
    grid: Grid
    times: NDArray[Any]
    variables: list[Found]
    left_out: dict[str, str] = field(default_factory=dict)


def run(data: Sequence[str], output: Path) -> list[str]:
    """Write an experiment for `data` to `output` and return the lines that describe it.

    Raises UserError, and writes nothing, for data that cannot be trained on and for an `output` that exists.
    """
    from credit_like.check import checked_experiment

    check_new("--output", output)
    if not output.absolute().parent.is_dir():
        raise UserError(
            f"--output: expected a file in an existing folder, got {output}; create the folder or change the path"
        )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", output.stem).strip("-") or "experiment"
    found = scan(data)
    text = propose(found, name)
    draft = output.with_name(f".{output.name}.{process_name()}.part.yml")
    try:
        draft.write_text(text, encoding="utf-8")
        experiment, store, _ = checked_experiment(draft)
        draft.replace(output)
    except UserError as error:
        raise UserError(str(error).replace(str(draft), f"{output} as proposed")) from error
    finally:
        draft.unlink(missing_ok=True)
    variables = store.variables
    roles = [f"{variables.n(role)} {role.replace('_', ' ')}" for role in ROLES]
    grid = store.fields.grid
    return [
        f"{output}: {grid.height} x {grid.width} grid, channels: {', '.join(roles)}; "
        f"{store.samples('train')} training samples of {format_duration(experiment.data.timestep)}",
        *(f"left out: {name}, {why}" for name, why in found.left_out.items()),
        f"next: credit-like check {output}; credit-like train {output}",
    ]


# ---- reading --------------------------------------------------------------------------------------------------------


def scan(paths: Sequence[str]) -> Data:
    """Open data and classify their variables. Raises UserError for data without fields on a grid at several times."""
    files = list(itertools.chain.from_iterable(_expand(path) for path in paths))
    opened = _without_single_times([_open(path) for path in files])
    left_out: dict[str, str] = {}
    usable = [_usable(dataset, left_out) for _, dataset in opened]
    varying = {name for i, names in enumerate(usable) for name in names if "time" in opened[i][1][name].dims}
    # What varies is compared, because one file of many often has the static fields.
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, names in enumerate(usable):
        if names:
            groups.setdefault(tuple(sorted(varying.intersection(names) or names)), []).append(i)
    if not groups:
        raise UserError(
            f"expected variables on latitude and longitude in {', '.join(paths)}, got "
            f"{'; '.join(f'{name}, {why}' for name, why in left_out.items()) or 'none'}; change or regrid the data"
        )
    repeated = {names: _repeated([opened[i][1] for i in group], names[0]) for names, group in groups.items()}
    fixed: dict[str, list[xr.Dataset]] = {}
    """Constant fields, as they are in each group."""
    for group in groups.values():
        of_group = {name: opened[i][1] for i in reversed(group) for name in usable[i] if name not in varying}
        for name, dataset in of_group.items():
            fixed.setdefault(name, []).append(dataset)
    counts = Counter(itertools.chain(*groups))
    # The same name then means different variables in different files.
    apart = (
        max(counts.values()) > 1
        or "other" in repeated.values()
        or (all(len(group) == 1 for group in groups.values()) and not all(itertools.starmap(_equal, fixed.items())))
    )
    members = [i for group in groups.values() for i in group]
    variables: list[Found] = []
    sources: list[dict[str, Any]] = []
    if apart:
        sources.append({key: value for key, value in opened[members[0]][0].items() if key != "path"})
        for stem, i in zip(_short([Path(files[i]).stem for i in members]), members, strict=True):
            dataset, alone = opened[i][1], len(usable[i]) == 1
            variables += [_classify(dataset, var, stem if alone else f"{stem}_{var}", files[i]) for var in usable[i]]
        times = _common_times({files[i]: [opened[i][1]] for i in members})
    else:
        as_given = len(groups) == 1 and len(paths) == 1 and not _is_folder_of_files(paths[0])
        for together, group in groups.items():
            if repeated[together] == "same":
                opened[group[0]][0]["duplicates"] = "first"
            where = list(paths) if as_given else _as_given(paths, [files[i] for i in group])
            sources.append({**opened[group[0]][0], "path": where[0] if len(where) == 1 else where})
            for var in dict.fromkeys(itertools.chain(together, *(sorted(usable[i]) for i in group))):
                if all(var != variable.name for variable in variables):
                    variables.append(_classify(next(opened[i][1] for i in group if var in usable[i]), var, var, None))
        times = _common_times({files[group[0]]: [opened[i][1] for i in group] for group in groups.values()})
    datasets = {files[i]: opened[i][1] for i in members}
    first = opened[members[0]][1]
    grid = Grid(*(first[axis].values.astype(np.float64) for axis in ("latitude", "longitude")))
    result = Data(sources, grid, times, variables, left_out)
    _check_times(result, paths)
    _drop_empty(result, datasets)
    _limit(result)
    if not any(variable.role == "prognostic" for variable in result.variables):
        raise UserError(
            f"expected variables to predict in {', '.join(paths)}, got "
            f"{', '.join(f'{v.name} ({v.role})' for v in result.variables) or 'none'}; change the data"
        )
    return result


def _expand(path: str) -> list[str]:
    """Return the stores or files of a path, template, glob or folder."""
    if _is_folder_of_files(path):
        return [str(file) for file in sorted(Path(path).iterdir()) if file.suffix in _SUFFIXES]
    return find_files(path, {})


def _as_given(paths: Sequence[str], files: list[str]) -> list[str]:
    """Return the path, template or glob that stands for exactly these files, or the files."""
    for path in paths:
        if not _is_folder_of_files(path) and sorted(_expand(path)) == sorted(files):
            return [path]
    return files


_SUFFIXES = (".nc", ".nc4", ".cdf", ".netcdf", ".grib", ".grib2", ".grb", ".grb2")


def _is_folder_of_files(path: str) -> bool:
    folder = Path(path)
    if (
        is_url(path)
        or not folder.is_dir()
        or any((folder / mark).exists() for mark in ("zarr.json", ".zgroup", ".zmetadata"))
    ):
        return False
    return any(file.suffix in _SUFFIXES for file in folder.iterdir())


def _open(path: str) -> tuple[dict[str, Any], xr.Dataset]:
    """Return the keys of a source for one file or store, and the file opened with them."""
    kind = source_type(path)
    config = registry.module("source", kind).Config
    keys: dict[str, Any] = {"type": kind}
    open_dataset = registry.module("source", kind).open_dataset
    try:
        return keys, open_dataset(config(path=path))
    except UserError:
        # Times without a start are the one thing that files often lack and that another variable of theirs may hold.
        if kind != "netcdf" or is_url(path):
            raise
        with netcdf_files.reading(path) as raw:
            reference = next(
                (str(name) for name in raw.variables if re.search("ref.*time|start.*time", str(name))), None
            )
        if reference is None:
            raise
        keys["time_units"] = f"hours since {reference}"
        return keys, open_dataset(config(path=path, time_units=keys["time_units"]))


def _without_single_times(opened: list[tuple[dict[str, Any], xr.Dataset]]) -> list[tuple[dict[str, Any], xr.Dataset]]:
    """Drop the time axis of variables that are in one file at one time, where other variables have more times.

    Constant fields often have such an axis, with a time that means nothing.
    """
    count = Counter(
        name for _, dataset in opened for name, v in dataset.data_vars.items() for _ in range(v.sizes.get("time", 0))
    )
    if not count or max(count.values()) == 1:
        return opened
    return [
        (
            keys,
            dataset.isel(time=0, drop=True)
            if dataset.sizes.get("time") == 1 and all(count[name] <= 1 for name in dataset.data_vars)
            else dataset,
        )
        for keys, dataset in opened
    ]


def _usable(dataset: xr.Dataset, left_out: dict[str, str]) -> list[str]:
    """Return the variables that are fields, and note why others that look like fields are none."""
    names = []
    for name, variable in dataset.data_vars.items():
        dims = set(map(str, variable.dims))
        on_grid = {"latitude", "longitude"} <= dims
        if variable.dtype.kind not in "iufb" or _DEGREES.fullmatch(str(variable.attrs.get("units", "")).lower()):
            continue  # text, and coordinates
        if not on_grid and len(dims) < 3:
            continue  # bounds, coefficients of levels and the like
        if other := sorted(map(own_name, dims.difference(DIMS))):
            left_out[str(name)] = f"which is on {', '.join(other)}{' too' if on_grid else ''}"
        elif not on_grid:
            left_out[str(name)] = "which is not on latitude and longitude"
        elif "level" in dims and dataset.sizes["level"] > 1 and "time" not in dims:
            left_out[str(name)] = "which is constant and on levels"
        else:
            names.append(str(name))
    return names


def _repeated(datasets: Sequence[xr.Dataset], name: str) -> Literal["", "same", "other"]:
    """Return whether files with the same fields have some times twice, and the same or another field `name` there.

    Files without times, and files of the same times, have another variable under the same name.
    """
    dated = [one for one in datasets if "time" in one.coords and one.sizes.get("time")]
    if len(datasets) < 2 or len(dated) < len(datasets):
        return "other" if len(datasets) > 1 else ""
    dated.sort(key=lambda one: int(seconds(one["time"].values)[0]))
    result: Literal["", "same"] = ""
    for one, after in itertools.pairwise(dated):
        first, second = (seconds(dataset["time"].values) for dataset in (one, after))
        if second[0] > first[-1]:
            continue
        if np.array_equal(first, second):
            return "other"
        common = np.intersect1d(first, second)
        if not len(common):
            continue  # the times of one are between those of the other, as of files for each hour of the day
        here, there = (int(np.flatnonzero(axis == common[-1])[0]) for axis in (first, second))
        if not np.array_equal(one[name].isel(time=here), after[name].isel(time=there), equal_nan=True):
            return "other"
        result = "same"
    return result


def _equal(name: str, datasets: Sequence[xr.Dataset]) -> bool:
    """Return whether a field is the same in all datasets."""
    first, *others = (dataset[name].transpose("latitude", "longitude", ...).values for dataset in datasets)
    return all(np.array_equal(first, other, equal_nan=True) for other in others)


def _common_times(groups: Mapping[str, Sequence[xr.Dataset]]) -> NDArray[Any]:
    """Return the times that all groups of files have, each under the path of its first file.

    Raises UserError where there is none.
    """
    axes = {}
    for path, group in groups.items():
        parts = [one["time"].values for one in group if "time" in one.coords and "time" in one.dims]
        if parts:
            axes[path] = np.unique(np.concatenate(parts))
    if not axes:
        return np.array([])
    common = next(iter(axes.values()))
    for path, axis in axes.items():
        left = common[np.isin(seconds(common), seconds(axis))]
        if len(common) and not len(left):
            apart = [other for other in axes if not np.isin(seconds(axes[other]), seconds(axis)).any()]
            # Each two may share times, and all together none.
            both = {name: axes[name] for name in ((apart[0], path) if apart else axes)}
            spans = (f"{name} ({to_text(there[0])} to {to_text(there[-1])})" for name, there in both.items())
            raise UserError(
                f"expected files with different fields to have times in common, got none in {' and '.join(spans)}; files that "
                "follow each other in time are joined where they have the same fields: give these, or files of one period"
            )
        common = left
    return common


def _short(stems: Sequence[str]) -> list[str]:
    """Return names of files without what all of them begin or end with."""
    if len(set(stems)) < 2:
        return list(stems)
    front, back = _common_start(stems), _common_start([stem[::-1] for stem in stems])
    short = [stem[front : len(stem) - back] if back else stem[front:] for stem in stems]
    return short if all(short) and len(set(short)) == len(short) else list(stems)


def _common_start(texts: Sequence[str]) -> int:
    """Return how many characters all texts begin with."""
    together = zip(*texts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, together))


def _check_times(data: Data, paths: Sequence[str]) -> None:
    if len(data.times) < FEWEST:
        raise UserError(
            f"expected at least {FEWEST} times, from which periods of training, validation and test are cut, got "
            f"{len(data.times)} in {', '.join(paths)}; give more files"
        )
    steps = np.diff(seconds(data.times))
    if (steps <= 0).any() or (steps % steps.min()).any():
        raise UserError(
            f"expected times a fixed step apart, got steps from {steps.min() / 3600:g} to {steps.max() / 3600:g} hours in "
            f"{', '.join(paths)}; the model has one time step, which calendar months are not"
        )


# ---- roles ----------------------------------------------------------------------------------------------------------


def _classify(dataset: xr.Dataset, var: str, name: str, path: str | None) -> Found:
    """Return a variable with the role that its name, attributes and dimensions suggest."""
    variable = dataset[var]
    names = {var.lower(), str(variable.attrs.get("standard_name", "")).lower()} - {""}
    names |= {alias.lower() for group in ALIASES if var in group for alias in group}
    cells = str(variable.attrs.get("cell_methods", "")).lower()
    levels: tuple[float, ...] = ()
    if "level" in variable.dims and dataset.sizes["level"] > 1:
        has = "level" in dataset.coords
        levels = (
            tuple(map(float, dataset["level"].values))
            if has
            else tuple(map(float, range(1, dataset.sizes["level"] + 1)))
        )
    if "time" not in variable.dims:
        role, why = "static", ""
    elif names & _SUN:
        role, why = "sun", ""
    elif names & _STATIC and not levels:
        role, why = "static", ""
    elif names & _FORCING and not levels:
        role, why = (
            "dynamic_forcing",
            "prescribed; with `fill: persist` forecasts beyond the data keep the field of their start",
        )
    elif (
        names & _DIAGNOSTIC
        or "time: sum" in cells
        or any(
            (text.endswith(("_flux", "_amount")) and not text.endswith(_STOCKS))
            or "precipitation" in text
            or "rainfall" in text
            for text in names
        )
    ):
        role, why = "diagnostic", "accumulated or averaged over a step, so it is no initial state"
        if names & _SINCE_START:
            role, why = "none", "which WRF accumulates from the start of the simulation: take differences first"
    else:
        role, why = "prognostic", ""
    return Found(name, var, role, levels, path, why)


def _drop_empty(data: Data, datasets: Mapping[str, xr.Dataset]) -> None:
    """Leave out variables that are the same everywhere or have no data; variables that never change are forcing.

    `datasets` are those of the files with usable variables, by path.
    """
    kept = []
    for variable in data.variables:
        paths = datasets if variable.path is None else [variable.path]
        array = next(datasets[path][variable.var] for path in paths if variable.var in datasets[path].data_vars)
        if "time" not in array.dims and variable.path is None and not _same_in_all([*datasets.values()], variable.var):
            data.left_out[variable.name] = "which has no time and is not the same in all files"
            continue
        if "time" in array.dims:
            last = array.sizes["time"] - 1
            array = array.isel(time=sorted({0, last // 2, last}))
        with np.errstate(all="ignore"):
            values = np.asarray(array.values, np.float64)
        finite = values[np.isfinite(values)]
        if variable.role == "none":
            data.left_out[variable.name] = variable.why
        elif not finite.size:
            data.left_out[variable.name] = "which has no values in the first, middle and last field"
        elif finite.min() == finite.max() and variable.role != "diagnostic":
            data.left_out[variable.name] = f"which is {finite.min():g} everywhere"
        elif variable.role == "prognostic" and "time" in array.dims and _still(array):
            kept.append(replace(variable, role="dynamic_forcing", why="it does not seem to change"))
        elif variable.role == "static" and "time" in array.dims and not _still(array):
            if variable.var.lower() in _ALSO_MOVING:
                kept.append(replace(variable, role="prognostic"))
            else:
                kept.append(replace(variable, role="dynamic_forcing", why="it changes in time"))
        else:
            kept.append(variable)
    data.variables = kept


def _same_in_all(datasets: Sequence[xr.Dataset], var: str) -> bool:
    """Return whether the first and the last of the datasets that have a field without time have the same one."""
    with_it = [one for one in datasets if var in one.data_vars]
    return _equal(var, [with_it[0], with_it[-1]])


def _still(array: xr.DataArray) -> bool:
    values = array.transpose("time", ...).values
    return len(values) > 1 and all(np.array_equal(values[0], other, equal_nan=True) for other in values[1:])


def _limit(data: Data) -> None:
    """Keep, of very many variables, the well-known ones."""
    common = _common_levels(data)
    kept = len(_some_levels(common))
    if (
        sum(kept if v.levels and v.levels == common else max(1, len(v.levels)) for v in data.variables)
        <= _MANY_CHANNELS
    ):
        return
    known = {alias for group in ALIASES for alias in group} | _CORE
    for variable in list(data.variables):
        if variable.role in ("prognostic", "diagnostic") and not {variable.var, variable.var.lower()} & known:
            data.left_out[variable.name] = f"because all variables together are more than {_MANY_CHANNELS} channels"
            data.variables.remove(variable)


# ---- the proposal ---------------------------------------------------------------------------------------------------


def propose(data: Data, name: str) -> str:
    """Return the text of an experiment for the data."""
    step, times = _timestep(data.times)
    periods = _periods(times, step)
    samples = len(times) * 7 // 10
    gpu = _gpu_gib()
    batch = 2 ** int(math.log2(max(1, min(8, sum(len(p) for p in periods["train"]) // 4))))
    points = data.grid.height * data.grid.width
    micro = batch if points < _LARGE else 1
    steps = max(1, sum(len(p) for p in periods["train"]) // batch)
    epochs = int(min(50, max(2, round(5_000 / steps))))
    lead = min(20, max(1, min(len(p) for p in periods["test"]) // 2))
    thinned = "  # thinned: a longer step makes forecasts cheaper and training easier"
    if any(v.role == "diagnostic" for v in data.variables):
        spacing = format_duration(dt.timedelta(seconds=int(np.diff(seconds(data.times)).min())))
        thinned += f"; accumulations are still those of {spacing}"
    lines = [
        f"# {name}: proposed by `credit-like new` from the data's names and attributes. Read it before a long run.",
        f"name: {_text(name)}",
        "seed: 0",
        f"save_loc: {_text(f'runs/{name}')}",
        "data:",
        *_source_lines(data),
        f"  timestep: {format_duration(step)}" + ("" if len(times) == len(data.times) else thinned),
        *_variable_lines(data),
        *_period_lines(periods),
        *_model_lines(data.grid, samples, gpu),
        "trainer:",
        f"  global_batch_size: {batch}",
        f"  micro_batch_size: {micro}"
        + ("" if micro == batch else "                # large grid: one sample at a time"),
        f"  epochs: {epochs}                          # of {steps} steps each",
        "  optimizer: {type: adamw, learning_rate: 1.0e-3, weight_decay: 0.01}",
        f"  scheduler: {{type: linear-warmup-cosine, warmup_steps: {max(1, min(500, steps * epochs // 10))}, min_lr: 1.0e-5}}",
    ]
    if data.grid.is_periodic and samples < 5_000:
        lines.append("  shift_longitude: true               # random shifts in longitude; augments a small data set")
    if gpu:
        lines.append("  amp: true                           # bfloat16 on the GPU")
    lines += [
        "  use_ema: true                       # forecasts use the moving average of the weights",
        f"  ema_decay: {0.99 if steps * epochs < 5_000 else 0.999}",
        f"inference: {{lead: {lead} steps}}            # initial times: every fourth step of the test period",
        "",
    ]
    return "\n".join(lines)


def _timestep(times: NDArray[Any]) -> tuple[dt.timedelta, NDArray[Any]]:
    """Return the time step, and the times that are whole steps apart."""
    since = seconds(times)
    spacing = int(np.diff(since).min())
    step = spacing
    if spacing < 6 * 3600 and (6 * 3600) % spacing == 0 and (since[-1] - since[0]) // (6 * 3600) >= 200:
        step = 6 * 3600
    midnight = since[0] - since[0] % 86400
    on_step = (since - midnight) % step == 0
    if not on_step.any():  # the times of means lie between the hours
        on_step = (since - since[0]) % step == 0
    kept = times[on_step] if step != spacing else times
    return dt.timedelta(seconds=step), kept


def _periods(times: NDArray[Any], step: dt.timedelta) -> dict[str, list[NDArray[Any]]]:
    """Cut the times into training, validation and test, each a list of runs without gaps.

    Of four whole years or more, the last is for tests and the one before for validation. Otherwise 70 %, 10 % and 20 %.
    """
    years = np.array([int(to_text(time)[:4]) for time in times[[0, -1]]])
    n = len(times)
    if years[1] - years[0] >= 3:
        of_year = np.array([int(to_text(time)[:4]) for time in times])
        last = years[1] if (of_year == years[1]).sum() > 0.9 * (of_year == years[1] - 1).sum() else years[1] - 1
        cuts = {"train": of_year < last - 1, "valid": of_year == last - 1, "test": of_year >= last}
    else:
        position = np.arange(n)
        first, second = max(4, n * 7 // 10), max(7, n * 8 // 10)
        cuts = {
            "train": position < first,
            "valid": (position >= first) & (position < second),
            "test": position >= second,
        }
    result = {}
    for name, inside in cuts.items():
        part = times[inside]
        gaps = np.flatnonzero(np.diff(seconds(part)) != int(step.total_seconds())) + 1
        runs = [run for run in np.split(part, gaps) if len(run) >= 2]
        if not runs:
            raise UserError(f"expected times without gaps for {name}, got {len(part)} with gaps; give more data")
        result[name] = runs
    return result


def _period_lines(periods: dict[str, list[NDArray[Any]]]) -> Iterator[str]:
    why = {
        "train": "",
        "valid": "later than the training period, so that the two do not share weather",
        "test": "the last part; used for forecasts and scores",
    }
    for name, runs in periods.items():
        shown = [f"[{to_text(run[0])}, {to_text(run[-1])}]" for run in runs]
        text = shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"
        more = "; ".join(filter(None, (why[name], "gaps in the data are left out" if len(shown) > 1 else "")))
        yield f"  {name}: {text}" + (f"  # {more}" if more else "")


def _source_lines(data: Data) -> Iterator[str]:
    def flow(source: dict[str, Any]) -> str:
        return "{" + ", ".join(f"{key}: {_text(value)}" for key, value in source.items()) + "}"

    if len(data.sources) == 1:
        hint = "  # the files have no unit of time; hours are assumed" if "time_units" in data.sources[0] else ""
        hint = hint or (
            "  # some times are in two files, with the same fields" if "duplicates" in data.sources[0] else ""
        )
        yield f"  source: {flow(data.sources[0])}{hint}"
    else:
        yield "  source:"
        yield from (f"    - {flow(source)}" for source in data.sources)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    text = str(value).replace("$", "$$")
    bare = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*( [A-Za-z0-9_.-]+)*", text) and yaml.safe_load(text) == text
    return text if bare else json.dumps(text, ensure_ascii=False)


def _variable_lines(data: Data) -> Iterator[str]:
    common = _common_levels(data)
    levels = _some_levels(common)
    if levels:
        hint = "" if levels == common else f"  # those of WeatherBench2 among the data's {len(common)}"
        yield f"  levels: [{', '.join(f'{level:.10g}' for level in levels)}]{hint}"
    for role in ROLES:
        chosen = [v for v in data.variables if v.role == role]
        sun = role == "dynamic_forcing" and _wants_sun(data)
        if not chosen and not sun:
            continue
        yield f"  {role}:"
        if above := [v for v in chosen if v.levels]:
            yield "    level:"
            yield from (_variable_line(v, v.levels if v.levels != common else ()) for v in above)
        if surface := [v for v in chosen if not v.levels]:
            yield "    surface:"
            yield from (_variable_line(v, ()) for v in surface)
        if sun:
            yield from () if surface else ("    surface:",)
            told = [v.name for v in data.variables if v.role == "sun"]
            why = (
                f"computed instead of read from {', '.join(told)}"
                if told
                else "tells the model the hour and the season"
            )
            yield f"      - {{name: toa_incident_solar_radiation, compute: solar}}  # {why}"
    for name, why in data.left_out.items():
        yield f"  # left out: {name}, {why}"


def _wants_sun(data: Data) -> bool:
    names = {v.name for v in data.variables if v.role != "sun"}
    return "toa_incident_solar_radiation" not in names and bool(np.abs(data.grid.latitude).max() <= 90)


def _variable_line(variable: Found, levels: Sequence[float]) -> str:
    keys = {"name": variable.name}
    if variable.var != variable.name:
        keys["var"] = variable.var
    if variable.path:
        keys["path"] = variable.path
    text = ", ".join(f"{key}: {_text(value)}" for key, value in keys.items())
    if levels:
        text += f", levels: [{', '.join(f'{level:.10g}' for level in levels)}]"
    short = len(keys) == 1 and not levels
    return f"      - {_text(variable.name) if short else '{' + text + '}'}" + (
        f"  # {variable.why}" if variable.why else ""
    )


def _common_levels(data: Data) -> tuple[float, ...]:
    """Return the levels that most variables on levels have; none without such variables."""
    own = [v.levels for v in data.variables if v.levels]
    return max(own, key=own.count) if own else ()


def _some_levels(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the thirteen pressure levels of WeatherBench2 where there are these and many more, else all levels."""
    for unit in (1.0, 100.0):  # hPa, Pa
        wanted = tuple(level * unit for level in _WEATHERBENCH_LEVELS)
        if len(levels) > 20 and set(wanted) <= set(levels):
            return tuple(level for level in levels if level in wanted)
    return levels


def _model_lines(grid: Grid, samples: int, gpu: float) -> Iterator[str]:
    model = fit_model(grid, samples, gpu)
    pad, (height, width) = model.padding_conf, model.padded(grid.height, grid.width)
    where = f"a GPU of {gpu:.0f} GiB" if gpu else "CPUs"
    modes = {
        "earth": "rows and columns continue across the poles and the date line",
        "mirror": "circular in longitude, mirrored in latitude",
        "replicate": "a region: its edges are repeated",
    }
    yield "model:"
    yield "  type: wxformer"
    yield f"  dim: [{', '.join(map(str, model.dim))}]" + f"           # for {samples} training samples and {where}"
    yield f"  depth: [{', '.join(map(str, model.depth))}]"
    yield f"  dim_head: {model.dim_head}"
    if model.cross_embed_strides[0] == 4:
        yield "  cross_embed_kernel_sizes: [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]]"
        yield "  cross_embed_strides: [4, 2, 2, 2]   # a large grid: the first stage works on every fourth point"
    yield f"  local_window_size: {model.local_window_size}                # windows divide the grid padded to {height} x {width}"
    yield f"  global_window_size: [{', '.join(map(str, model.global_window_size))}]"
    yield (
        f"  padding_conf: {{activate: true, mode: {pad.mode}, pad_lat: [{pad.pad_lat[0]}, {pad.pad_lat[1]}], "
        f"pad_lon: [{pad.pad_lon[0]}, {pad.pad_lon[1]}]}}  # {modes[pad.mode]}"
    )


def fit_model(grid: Grid, samples: int, gpu: float) -> WXFormer:
    """Return a WXFormer whose windows fit the padded grid, with the fewest added points, of a size that suits the data.

    `gpu` is the memory of this machine's GPU in GiB, 0 without one. Raises UserError for a grid that none fits.
    """
    points = grid.height * grid.width
    stride = 4 if points > 4 * _LARGE else 2
    width = 8 if points > _LARGE and not gpu else 16
    if gpu:
        width = 32 if samples < 2_000 else 64 if samples < 20_000 or gpu < 30 else 128
    elif samples >= 2_000 and points < _SMALL:
        width = 32
    mode = "earth" if grid.is_global and grid.width % 2 == 0 else "mirror" if grid.is_periodic else "replicate"
    most = {"earth": 2 * grid.height, "mirror": 2 * (grid.height - 1)}.get(mode, 10**9)
    coarse = 8 * stride
    # Tokens at the edges of a circle should have neighbours, so longitude is padded by at least one coarse cell.
    least = coarse if mode != "replicate" else 0
    best: tuple[float, int, int, int] | None = None
    for rows in range(-(-grid.height // coarse), -(-grid.height // coarse) + 6):
        for columns in range(-(-(grid.width + least) // coarse), -(-(grid.width + least) // coarse) + 6):
            if rows * coarse - grid.height > most or (mode != "replicate" and columns * coarse > 3 * grid.width):
                continue
            for window in (d for d in range(1, 13) if math.gcd(rows, columns) % d == 0):
                cost = rows * columns * (1.0 if window >= 3 else 1.25 if window == 2 else 2.0)
                if best is None or cost < best[0]:
                    best = (cost, rows, columns, window)
    if best is None:
        raise UserError(f"expected a grid that can be padded to {coarse} points, got {grid.height} x {grid.width}")
    _, rows, columns, window = best
    tall, wide = rows * coarse - grid.height, columns * coarse - grid.width
    keys: dict[str, Any] = {
        "dim": [width, 2 * width, 4 * width, 8 * width],
        "depth": [1, 1, 2, 1] if width < 64 else [2, 2, 4, 2],
        "dim_head": 8 if width < 32 else 32,
        "local_window_size": window,
        "global_window_size": [4, 4, 2, 1] if points < _LARGE else [8, 4, 2, 1],
        "padding_conf": {
            "activate": True,
            "mode": mode,
            "pad_lat": [tall // 2, tall - tall // 2],
            "pad_lon": [wide // 2, wide - wide // 2],
        },
    }
    if stride == 4:
        keys |= {
            "cross_embed_strides": [4, 2, 2, 2],
            "cross_embed_kernel_sizes": [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]],
        }
    model = WXFormer.model_validate(keys)
    if problems := model.check(grid.height, grid.width):
        raise UserError(f"expected a grid that windows fit, got {grid.height} x {grid.width}: {problems[0]}")
    return model


def _gpu_gib() -> float:
    """Return the memory of this machine's GPU in GiB, or 0 without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0
