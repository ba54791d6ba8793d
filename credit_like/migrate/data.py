"""Translate CREDIT's `data` section: sources, variables by role, levels and periods."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credit_like.errors import UserError
from credit_like.migrate.document import Document, Keys, iso_time, shell_variables
from credit_like.schema.base import parse_duration
from credit_like.variables import ROLES

_FIRST_GENERATION = {
    "prognostic": (("variables", "level", "save_loc"), ("surface_variables", "surface", "save_loc_surface")),
    "diagnostic": (("diagnostic_variables", "surface", "save_loc_diagnostic"),),
    "dynamic_forcing": (
        ("dynamic_forcing_variables", "surface", "save_loc_dynamic_forcing"),
        ("forcing_variables", "surface", "save_loc_forcing"),
    ),
    "static": (("static_variables", "surface", "save_loc_static"),),
}
_ARCO = "gs://gcp-public-data-arco-era5/ar/"
_PUBLIC = {
    "arco_era5": (_ARCO + "model-level-1h-0p25deg.zarr-v1", _ARCO + "full_37-1h-0p25deg-chunk-1.zarr-v3"),
    "weatherbench2_era5": (
        "gs://weatherbench2/datasets/era5/1959-2023_01_10-6h-{resolution}_equiangular_with_poles_conservative.zarr",
    ),
}


def second_generation(source: Document, functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `data` section from nested sources with `vars_3D` and `vars_2D` by role."""
    roles: dict[str, dict[str, list[Any]]] = {role: {} for role in ROLES}
    paths: list[str] = []
    levels: list[float] = []
    for name in source.values["data"]["source"]:
        at = ("data", "source", name)
        kind = source.get(*at, "dataset_type", default="local")
        own = [float(level) for level in source.get(*at, "levels", default=[])]
        levels = levels or own
        others = {"levels": own} if own and own != levels else {}
        resolution = source.get(*at, "resolution", default="1440x721")
        cyclic = (matching := source.get(*at, "temporal_mode", default="exact")) == "cyclic"
        if matching == "persist":
            source.remark(
                (*at, "temporal_mode"), "not translated: a source has to have all times; interpolate it before"
            )
        paths += [path.format(resolution=resolution) for path in _PUBLIC.get(kind, ())]
        if kind not in ("local", "tisr", *_PUBLIC):
            source.remark((*at, "dataset_type"), "no source reads it: give files of these variables in `data.source`")
        for role in source.values["data"]["source"][name].get("variables") or {}:
            for ours, theirs in (("level", "vars_3D"), ("surface", "vars_2D")):
                for variable in source.get(*at, "variables", role, theirs, default=[]):
                    spec = _spec(variable, functions, others if ours == "level" else {})
                    spec = {"name": variable, "compute": "solar"} if kind == "tisr" else spec
                    if cyclic and role == "dynamic_forcing":
                        spec = {**(spec if isinstance(spec, dict) else {"name": spec}), "fill": "cyclic"}
                    roles[role].setdefault(ours, []).append(spec)
            path = source.get(*at, "variables", role, "path")
            paths += [path] if path else []
            if source.get(*at, "variables", role) is None:
                continue
            source.read.discard((*at, "variables", role))
    if any(path.startswith("gs://") for path in paths):
        for name in source.values["data"]["source"]:
            keys = ("data", "source", name, "dataset_type")
            if source.get(*keys) in _PUBLIC:
                source.remark(keys, "read from the public store, which needs gcsfs; a copy on disk is much faster")
    _validation_alike(source)
    training, validation = _spans(source, "data"), _spans(source, "validation_data")
    step = str(source.get("data", "timestep", default="6h"))
    last = validation[-1] if validation and all(validation[-1]) else None
    periods: dict[str, Any] = dict(_periods(source, training[-1] if training else ("", ""), last, step))
    for name, spans in (("train", training), ("valid", validation)):
        if len(spans) > 1:
            periods[name] = [[iso_time(time) for time in span] for span in spans[:-1]] + [periods[name]]
    return _data(source, roles, paths, levels, step, periods, shift=0)


def _spans(source: Document, section: str) -> list[tuple[str, str]]:
    """Return the periods of training (`data`) or validation in the second generation, in the order of time."""
    spans = source.get(section, "date_ranges")
    if spans:
        return sorted((str(start), str(end)) for start, end in spans)
    start, end = (str(source.get(section, key, default="")) for key in ("start_datetime", "end_datetime"))
    return [(start, end)] if start or end else []


def _spec(name: str, functions: Mapping[str, Mapping[str, Any]], keys: Mapping[str, Any] | None = None) -> Any:
    """Return a variable, as its name alone if it has no transform and no other keys."""
    spec = {"name": name, **(keys or {}), **({"transform": dict(functions[name])} if name in functions else {})}
    return spec if len(spec) > 1 else name


def _validation_alike(source: Document) -> None:
    """Count the keys of the validation as read that are those of the training, and list the others."""

    def compare(keys: tuple[str, ...], ours: Any, theirs: Any) -> None:
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours:
            for key, value in ours.items():
                compare((*keys, str(key)), value, theirs.get(key))
        elif ours == theirs:
            source.get("validation_data", *keys)
        elif keys not in (("start_datetime",), ("end_datetime",), ("date_ranges",)):
            source.remark(("validation_data", *keys), f"validations are like training, with {_told(theirs)}")

    if "validation_data" in source.values:
        compare((), source.section("validation_data"), source.section("data"))


def _told(value: Any) -> str:
    return "none" if value is None else " ".join(str(value).split())


def first_generation(source: Document, functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `data` section from flat lists of variables and years."""
    roles: dict[str, dict[str, list[Any]]] = {role: {} for role in ROLES}
    paths: list[str] = []
    for role, groups in _FIRST_GENERATION.items():
        for names, place, path in groups:
            found = source.get("data", names, default=[])
            where = source.get("data", path)
            if found:
                # Forcing of this kind is one climatological year.
                yearly = names == "forcing_variables"
                roles[role].setdefault(place, []).extend(
                    {"name": name, "fill": "cyclic"} if yearly else _spec(name, functions) for name in found
                )
                paths += where if isinstance(where, list) else [where] if where else []
    hours = int(source.get("data", "lead_time_periods", default=6)) * int(source.get("data", "skip_periods", default=1))
    levels = [float(level) for level in source.get("data", "level_ids", default=[])] or _levels_of_means(source)
    if not levels and roles["prognostic"].get("level"):
        count = int(source.section("model").get("levels", 15))
        levels = [float(level) for level in range(1, count + 1)]
        source.remark(
            ("data", "variables"),
            f"the file does not say which {count} levels: set `data.levels` to those of the store",
        )
    years = [source.get("data", key) for key in ("train_years", "valid_years")]
    spans = [(f"{a}-01-01", f"{b - 1}-12-31T{24 - hours:02d}") if a else None for a, b in (y or (0, 0) for y in years)]
    periods = _periods(source, spans[0] or ("", ""), spans[1], f"{hours}h")
    return _data(source, roles, paths, levels, f"{hours}h", periods, shift=1)


def _levels_of_means(source: Document) -> list[float]:
    """Return the levels in CREDIT's file of means, if it is there: the files of the data may have more."""
    path = Path(str(source.get("data", "mean_path", default="")))
    if not path.is_file():
        return []
    from credit_like.data.files import netcdf_files

    means = netcdf_files.load(path)
    return [float(level) for level in means["level"].values] if "level" in means else []


def _periods(
    source: Document, train: tuple[str, str], valid: tuple[str, str] | None, timestep: str
) -> dict[str, list[str]]:
    """Return training, validation and test period; a file without a validation gives its last year to it."""
    step = parse_duration(timestep)

    def before(time: str | dt.datetime) -> str:
        """Return the last time step before a time."""
        time = dt.datetime.fromisoformat(time) if isinstance(time, str) else time
        return (time - step).strftime("%Y-%m-%dT%H")

    if not all(train):
        raise UserError(
            "expected the training period of CREDIT's experiment (train_years, start_datetime or date_ranges), got none"
        )
    train = (iso_time(train[0]), iso_time(train[1]))
    if valid is None:
        last = dt.datetime.fromisoformat(train[1]).year
        valid = (f"{last}-01-01", train[1])
        earlier = before(valid[0])
        key: Keys = ("data", "end_datetime") if source.get("data", "end_datetime") else ("data", "train_years")
        source.remark(key, f"no validation period is given: {last} is taken for it, and training ends with {last - 1}")
        train = (train[0], earlier)
    valid = (iso_time(valid[0]), iso_time(valid[1]))
    if train[0] < valid[0] <= train[1]:
        key = ("validation_data", "start_datetime") if "validation_data" in source.values else ("data", "valid_years")
        source.remark(key, f"validation overlaps training, which ends before {valid[0]} here")
        train = (train[0], before(valid[0]))
    test = valid
    dates = (("predict", "forecasts"), ("inference", "batch_forecast"), ("inference", "single_forecast"))
    if not any(source.section(*keys) for keys in dates) and not source.values.get("predict", {}).get("forecasts"):
        source.absent(
            "predict", "no forecasts are given: the second half of the validation period becomes the test period"
        )
        begin, end = (dt.datetime.fromisoformat(time) for time in valid)
        day = begin + dt.timedelta(days=max((end - begin).days // 2, 1))
        valid = (valid[0], before(day))
        test = (day.strftime("%Y-%m-%d"), test[1])
    return {"train": list(train), "valid": list(valid), "test": list(test)}


def _data(
    source: Document,
    roles: Mapping[str, Mapping[str, list[Any]]],
    paths: Sequence[str],
    levels: Sequence[float],
    timestep: str,
    periods: Mapping[str, list[str]],
    shift: int,
) -> dict[str, Any]:
    """Return the `data` section; `shift` is what CREDIT's `forecast_len` lacks to the number of steps."""
    steps = int(source.get("data", "forecast_len", default=1 - shift)) + shift
    if source.get("data", "one_shot") and steps > 1:
        source.remark(("data", "one_shot"), "the loss is the mean over all leads, not that of the last alone")
    if source.get("data", "backprop_on_timestep") and steps > 1:
        source.remark(("data", "backprop_on_timestep"), "gradients flow through all leads")
    if source.get("data", "skip_periods") not in (None, 1):
        source.remark(("data", "skip_periods"), "part of `data.timestep`")
    section: dict[str, Any] = {"source": _sources(paths), "timestep": timestep}
    if levels:
        section["levels"] = [int(level) if level == int(level) else level for level in levels]
    section |= {role: dict(groups) for role, groups in roles.items() if any(groups.values())}
    if (history := int(source.get("data", "history_len", default=1))) > 1:
        section["history_len"] = history
    if steps > 1:
        section["forecast_len"] = steps
    return section | dict(periods)


def _sources(paths: Sequence[str]) -> list[dict[str, Any]] | dict[str, Any]:
    """Return one source for each distinct path; paths that differ in wildcards alone are one."""
    found: dict[str, dict[str, Any]] = {}
    for path in map(str, paths):
        kind = "netcdf" if re.search(r"\.(nc4?|h5)$", path) else "zarr"
        made: dict[str, Any] = {"type": kind, "path": shell_variables(path)}
        if path.startswith("gs://"):
            made["storage_options"] = {"token": "anon"}
        found.setdefault(path.replace("*", ""), made)
    if not found:
        raise UserError("expected paths of CREDIT's data, got none; is the source read from the network?")
    listed = list(found.values())
    return listed[0] if len(listed) == 1 else listed
