"""Steps before and after CREDIT's network (`preblocks`, `postblocks`): functions of variables, derived fields, statistics."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_like import transforms as functions_of
from credit_like.checkpoint.credit_scalers import Scaler, read_scalers
from credit_like.checkpoint.transfer import named
from credit_like.data.files import netcdf_files
from credit_like.derive.fields import Derivation
from credit_like.errors import UserError, reading
from credit_like.migrate.document import Document, Keys
from credit_like.schema.data import DataSection
from credit_like.schema.derive import Derive
from credit_like.small_files import read_yaml
from credit_like.variables import ROLES, Variable, Variables

if TYPE_CHECKING:
    import xarray as xr

_MEANINGS = {
    "era5_normalizer": "fields are normalised by the statistics; those files are not read",
    "bridgescaler_transform": "fields are normalised by mean and standard deviation, which `preprocess` fits",
    "sqrt_transform": "not the same: `transform: {type: sqrt, scale: …}` of a variable is √(1 + x / scale) − 1",
    "square_transform": "see `sqrt_transform`",
    "fill_values": "missing values are masked in the loss and replaced by the mean in the input",
    "regrid": "give the grid as `regrid` of `data.source`",
    "rename": "give the name in the files as `var` of a variable",
}
_MECHANICS = {
    "concat": "fields are joined by name",
    "to_device": "samples are copied to the device",
    "reconstruct": "fields are split by name",
    "flatten_to_tensor": "fields are joined by name",
}
_DERIVED = {
    "geopotential_diagnostic": "geopotential", "mslp_diagnostic": "mean_sea_level_pressure",
    "pressure_interp_diagnostic": "",
}  # fmt: skip
_CORRECTIONS = ("tracer_fixer", "global_mass_fixer", "global_water_fixer", "global_energy_fixer")
_SHIPPED = "ERA5_Lev_Info.nc"
"""CREDIT's own file of ERA5's 137 levels."""
_SCHEMA = "channel_schema.yaml"
"""CREDIT's record of the channels of a run, in its folder."""


def steps(source: Document, part: str) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """Yield the place and the content of each step of `preblocks` or `postblocks`, in the order in which they run."""
    section = source.section(part)
    parts = [name for name in ("ic_only", "per_step", "post_rollout") if name in section]
    inner: list[tuple[str, ...]] = [(part, name) for name in parts]
    for inside in inner or [(part,)]:
        for name, block in source.section(*inside).items():
            if isinstance(block, Mapping):
                yield (*inside, name), block


def steps_of_type(source: Document, part: str, kind: str) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """Yield the steps of one type."""
    return ((at, block) for at, block in steps(source, part) if block.get("type") == kind)


def variable_keys(source: Document) -> dict[str, str]:
    """Return variable → `SOURCE/ROLE/3d/NAME`, its key in the steps, in the order of CREDIT's input and output channels.

    The channels are those of one source after the other; of each, prognostic, static and forcing variables, and within a
    role those on levels first.
    """
    keys: dict[str, str] = {}
    for name, section in source.section("data", "source").items():
        for role in ("prognostic", "static", "dynamic_forcing", "diagnostic"):
            groups = (section.get("variables") or {}).get(role) or {}
            for dim in ("3D", "2D"):
                keys |= {one: f"{name}/{role}/{dim.lower()}/{one}" for one in groups.get(f"vars_{dim}") or ()}
    return keys


def note(source: Document) -> None:
    """List the steps that have another form here; corrections, functions and derived fields are read elsewhere."""
    for part in ("preblocks", "postblocks"):
        for at, block in steps(source, part):
            kind = str(block.get("type"))
            if kind in _MECHANICS:
                source.remark(at, _MECHANICS[kind], covered=True)
            elif kind in _MEANINGS:
                source.remark(at, _MEANINGS[kind])
            elif not kind.startswith(_CORRECTIONS) and kind not in (*_DERIVED, "log_transform", "exp_transform"):
                source.remark(at, "not translated: there is no such step")


# ---- functions of variables ------------------------------------------------------------------------------------------


def _selected(chosen: Sequence[str], key: str) -> bool:
    """Return whether a step is for a variable: of no names it is for all, and a part of a path is for all below it."""
    return not chosen or any(key == one or key.startswith(f"{one}/") for one in chosen)


def transforms(source: Document) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Return variable → transform of the predicted variables of which CREDIT takes the logarithm, and variable → ln(base).

    CREDIT's log(x + ε) − log ε is log(1 + x / ε), our `log1p` with ε as its scale but for the factor 1 / ln(base), which
    the normalisation takes out.
    """
    found: dict[str, dict[str, Any]] = {}
    factors: dict[str, float] = {}
    for at, block in steps_of_type(source, "preblocks", "log_transform"):
        arguments = block.get("args") or {}
        base = str(arguments.get("base", "e"))
        inputs = []
        for name, key in variable_keys(source).items():
            if not _selected(arguments.get("variables") or (), key):
                continue
            if key.split("/")[1] in ("prognostic", "diagnostic"):
                found[name] = {"type": "log1p", "scale": float(arguments.get("eps", 1e-8))}
                factors[name] = math.log(float(base)) if base != "e" else 1.0
            else:
                inputs.append(name)
        if inputs:
            source.remark(at, f"translated but for {', '.join(inputs)}: only predicted variables have a `transform`")
        else:
            source.remark(at, "log(x + ε) − log ε is `transform: {type: log1p, scale: ε}`", covered=True)
    for at, _ in steps_of_type(source, "postblocks", "exp_transform"):
        source.remark(at, "predictions are transformed back to physical units", covered=True)
    return found, factors


# ---- derived fields --------------------------------------------------------------------------------------------------


def derived(source: Document, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `inference.derive` for CREDIT's diagnostics after the network and its interpolation of forecasts."""
    variables = Variables(DataSection.model_validate(data))
    predicted = {variable.name for variable in variables.outputs}
    places: list[Keys] = []
    made: dict[str, Any] = {"fields": [], "pressure_levels": [], "model_levels": "pressure", "conventions": "credit"}
    for at, asked in _asked(source):
        more = {key: [*made[key], *asked[key]] if isinstance(made[key], list) else asked[key] for key in asked}
        more = made | {key: list(dict.fromkeys(x)) if isinstance(x, list) else x for key, x in more.items()}
        more["fields"] = [name for name in more["fields"] if name not in predicted]
        try:
            Derivation(Derive.model_validate(more), variables, "inference.derive")
        except UserError as error:
            source.remark(at, f"left out: {error}")
        else:
            places.append(at)
            made = more
    if not places:
        return {}
    for at in places:
        meaning = "`inference.derive` writes and scores it; names on pressure levels end in `_pl`"
        if at[0] == "postblocks" and source.section("loss", "args").get("include_computed_diagnostics"):
            meaning += "; the loss does not see it"
        source.remark(at, meaning, covered=True)
    return {key: value for key, value in made.items() if value and (key, value) != ("model_levels", "pressure")}


def _asked(source: Document) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Yield the place and the keys of `inference.derive` of each of CREDIT's diagnostics."""
    for at, block in steps(source, "postblocks"):
        kind, arguments = block.get("type"), block.get("args") or {}
        if kind not in _DERIVED:
            continue
        if arguments.get("key", "y_processed") != "y_processed":
            source.remark(at, "scores derive the same fields from the truth", covered=True)
            continue
        asked: dict[str, Any] = {"fields": [_DERIVED[kind]] if _DERIVED[kind] else []}
        asked["pressure_levels"] = [float(level) for level in arguments.get("pressure_levels") or ()]
        if kind != "mslp_diagnostic":
            asked["model_levels"] = _levels(arguments.get("level_info_file", _SHIPPED))
        yield at, asked
    of_forecasts: Keys = ("predict", "interp_pressure")
    if conf := source.section(*of_forecasts):
        if conf.get("height_levels"):
            source.remark((*of_forecasts, "height_levels"), "not translated: there are no levels of height")
        levels = [float(level) for level in conf.get("pressure_levels") or (500.0, 850.0)]
        fields = ["geopotential", "mean_sea_level_pressure"]
        model_levels = _levels(conf.get("model_level_file", _SHIPPED))
        yield of_forecasts, {"fields": fields, "pressure_levels": levels, "model_levels": model_levels}


def _levels(path: object) -> str:
    """Return `model_levels` for a file of CREDIT's; its own one describes ERA5's 137 levels."""
    return "era5-137" if Path(str(path)).name == _SHIPPED else os.path.expandvars(str(path))


# ---- what goes with weights ------------------------------------------------------------------------------------------


def of_weights(
    source: Document, data: Mapping[str, Any], weights: Path | None, logs: Mapping[str, float]
) -> dict[str, Any]:
    """Return the names of the channels in CREDIT's order and, where its files are at hand, their normalisation.

    `logs` are variables of which CREDIT takes the logarithm, with ln of its base.
    """
    variables = Variables(DataSection.model_validate(data))
    second = bool(source.section("data", "source"))
    channels = _channels(source, variables, weights) if second else _first_channels(source, variables)
    normalisation = _of_the_scalers(source, variables, logs) if second else None
    normalisation = normalisation or _of_the_files(source, variables, logs)
    return {"channels": channels, **({"normalisation": normalisation} if normalisation else {})}


def _first_channels(source: Document, variables: Variables) -> dict[str, list[str]]:
    """Return the channels of the first generation: prognostic, static, forcing; with `static_first: false` static last."""
    names = {role: _named(variables.role(role)) for role in ROLES}
    forcing, static = names["dynamic_forcing"], names["static"]
    first = source.get("data", "static_first", default=True)
    inputs = [*names["prognostic"], *((*static, *forcing) if first else (*forcing, *static))]
    return {"inputs": inputs, "outputs": [*names["prognostic"], *names["diagnostic"]]}


def _channels(source: Document, variables: Variables, weights: Path | None) -> dict[str, list[str]]:
    """Return the channels of the second generation, from CREDIT's own record of the run if it is at hand."""
    keys = variable_keys(source)
    ordered = {
        "inputs": [name for name, key in keys.items() if "/diagnostic/" not in key],
        "outputs": [name for name, key in keys.items() if key.split("/")[1] in ("prognostic", "diagnostic")],
    }
    folders = [Path(os.path.expandvars(str(source.get("save_loc", default="."))))]
    for folder in [weights.parent, *folders] if weights else folders:
        record = folder / _SCHEMA
        if record.is_file():
            ordered = _recorded(record, variables)
            break
    else:
        source.absent(
            _SCHEMA,
            "CREDIT's record of the channels is not beside the weights: prognostic, static, forcing is taken as their order",
        )
    return {side: _named([variables[name] for name in names]) for side, names in ordered.items()}


def _named(variables: Sequence[Variable]) -> list[str]:
    """Return the names of channels as `start_from` compares them, with their transforms."""
    return named(Variables.channel_names(variables), functions_of.names(variables))


def _recorded(path: Path, variables: Variables) -> dict[str, list[str]]:
    """Return the variables in CREDIT's record. Raises UserError if it is of another experiment."""
    try:
        content = read_yaml(path)
        found = {
            ours: [str(entry["var_key"]).rpartition("/")[2] for entry in content[theirs]]
            for ours, theirs in (("inputs", "input"), ("outputs", "target"))
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected CREDIT's record of channels, got {error!r}; correct or remove it") from error
    expected = {
        "inputs": {v.name for role in ("prognostic", "static", "dynamic_forcing") for v in variables.role(role)},
        "outputs": {v.name for v in variables.outputs},
    }
    for side, names in found.items():
        if differ := sorted(set(names) ^ expected[side]):
            raise UserError(
                f"{path}: expected the {side} of the experiment, got a record that differs in {', '.join(differ)}; "
                "give the experiment of these weights"
            )
    return found


def _of_the_files(
    source: Document, variables: Variables, logs: Mapping[str, float]
) -> dict[str, dict[str, list[Any]]] | None:
    """Return the numbers of CREDIT's files of mean and standard deviation; None if they are absent or those of other quantities.

    They hold whatever a model was trained with, such as residual standard deviations. In the first generation static and
    cyclic forcing fields are stored as the model sees them; in the second, whatever the files do not have.
    """
    at, block = next(steps_of_type(source, "preblocks", "era5_normalizer"), (("data",), {}))
    arguments = block.get("args") or source.section("data")
    places: list[Keys] = [(*at, "args", key) if block else ("data", key) for key in ("mean_path", "std_path")]
    files = [Path(os.path.expandvars(str(arguments.get(key, "")))) for key in ("mean_path", "std_path")]
    if not all(path.is_file() for path in files):
        return None
    mean, std = (_loaded(path) for path in files)
    unscaled = {*source.get("data", "forcing_variables", default=[]), *(v.name for v in variables.role("static"))}
    if block:
        known = set(mean.data_vars) & set(std.data_vars)
        unscaled = {v.name for role in ROLES for v in variables.role(role) if v.name not in known}
    chosen = arguments.get("levels")
    if chosen:
        mean, std = (_at_numbers(dataset, chosen) for dataset in (mean, std))
    result: dict[str, dict[str, list[Any]]] = {}
    keys = variable_keys(source) if block else {}
    problems: dict[str, list[str]] = {}
    for role in ROLES:
        scalers = {}
        for variable in variables.role(role):
            n = len(variable)
            plain = variable.name in unscaled
            scalers[variable.name] = scaler = Scaler(
                "",
                (0.0,) * n if plain else tuple(_values(mean, variable, files[0])),
                (1.0,) * n if plain else tuple(_values(std, variable, files[1])),
            )
            if not _usable(scaler):
                raise UserError(
                    f"{files[1]}: expected finite numbers of {variable.name} and standard deviations above 0, got mean "
                    f"{scaler.mean} and std {scaler.std}; give the files that belong to these weights"
                )
            if not plain and (why := _unfit(source, scaler, keys.get(variable.name, ""), n, logs)):
                problems.setdefault(why, []).append(variable.name)
        result[role] = _moments(variables.role(role), scalers, logs)
    if problems:
        _remark_unfit(source, places, problems)
        return None
    if block:
        source.remarks[:] = [remark for remark in source.remarks if remark.key != ".".join(map(str, at))]
    for place in places:
        source.remark(place, "its numbers go with the weights", covered=True)
    return result


def _loaded(path: Path) -> xr.Dataset:
    with reading("CREDIT's file of means or standard deviations", path, "give the file that belongs to these weights"):
        return netcdf_files.load(path)


def _at_numbers(dataset: xr.Dataset, levels: Sequence[int]) -> xr.Dataset:
    """Return the entries of levels that are counted from 1, of the variables that have more than these."""
    positions = [int(level) - 1 for level in levels]
    dims = [dim for dim, size in dataset.sizes.items() if size > max(positions) and size > len(positions)]
    return dataset.isel(dict.fromkeys(dims, positions))


def _of_the_scalers(
    source: Document, variables: Variables, logs: Mapping[str, float]
) -> dict[str, dict[str, list[Any]]] | None:
    """Return the normalisation of CREDIT's scaler files; None, with a remark that says why, if it cannot be taken over."""
    keys = variable_keys(source)
    found: dict[str, Scaler] = {}
    places: list[Keys] = []
    for at, block in steps_of_type(source, "preblocks", "bridgescaler_transform"):
        arguments = block.get("args") or {}
        path = Path(os.path.expandvars(str(arguments.get("scaler_path", ""))))
        if not path.is_file():
            return None
        places.append((*at, "args", "scaler_path"))
        chosen = arguments.get("variables") or ()
        found |= {key: scaler for key, scaler in read_scalers(path).items() if _selected(chosen, key)}
    if not places:
        return None
    result: dict[str, dict[str, list[Any]]] = {}
    problems: dict[str, list[str]] = {}
    for role in ROLES:
        scalers = {}
        for variable in variables.role(role):
            count = len(variable)
            scaler = found.get(keys[variable.name]) or Scaler("", (0.0,) * count, (1.0,) * count)
            if why := _unfit(source, scaler, keys[variable.name], count, logs):
                problems.setdefault(why, []).append(variable.name)
            scalers[variable.name] = scaler
        result[role] = _moments(variables.role(role), scalers, logs)
    if problems:
        _remark_unfit(source, places, problems)
        return None
    of_scalers = {
        ".".join(map(str, at))
        for part in ("preblocks", "postblocks")
        for at, _ in steps_of_type(source, part, "bridgescaler_transform")
    }
    source.remarks[:] = [remark for remark in source.remarks if remark.key not in of_scalers]
    for place in places:
        source.remark(place, "its numbers go with the weights", covered=True)
    return result


def _moments(
    variables: Sequence[Variable], scalers: Mapping[str, Scaler], logs: Mapping[str, float]
) -> dict[str, list[Any]]:
    """Return the moments of the channels of a role, of our transforms where CREDIT takes a logarithm to another base."""
    about: dict[str, list[Any]] = {"channels": [], "mean": [], "std": [], "change_std": []}
    functions = []
    for variable in variables:
        scaler, factor = scalers[variable.name], logs.get(variable.name, 1.0)
        about["channels"] += variable.channels
        about["mean"] += [value * factor for value in scaler.mean or ()]
        about["std"] += [value * factor for value in scaler.std or ()]
        about["change_std"] += [None] * len(variable)
        functions += [str(variable.spec.transform or "")] * len(variable)
    return about | ({"transform": functions} if any(functions) else {})


def _usable(scaler: Scaler) -> bool:
    """Return whether a field can be divided by the standard deviations."""
    numbers = (*(scaler.mean or ()), *(scaler.std or ()))
    return all(map(math.isfinite, numbers)) and min(scaler.std or (1.0,)) > 0


def _unfit(source: Document, scaler: Scaler, key: str, count: int, logs: Mapping[str, float]) -> str:
    """Return why a scaler is not the mean and standard deviation of a variable with `count` channels, or nothing."""
    for part in ("log_transform", "sqrt_transform"):
        for _, block in steps_of_type(source, "preblocks", part):
            if _selected((block.get("args") or {}).get("variables") or (), key) and key.rpartition("/")[2] not in logs:
                return f"numbers after `{part}`"
    if scaler.mean is None:
        return f"a {scaler.type}, which is no mean and standard deviation"
    if not _usable(scaler):
        return "a standard deviation of 0, or no finite number"
    return "" if len(scaler.mean) == count else f"{len(scaler.mean)} levels in place of {count}"


def _remark_unfit(source: Document, places: Sequence[Keys], problems: Mapping[str, Sequence[str]]) -> None:
    """Remark that numbers are not taken over: for each reason the variables."""
    told = "; ".join(f"{', '.join(names)} ({why})" for why, names in problems.items())
    for place in places:
        source.remark(place, f"not taken over: {told}. A run from these weights fits its own statistics")


def _values(dataset: xr.Dataset, variable: Variable, path: Path) -> list[float]:
    """Return the numbers of each channel of a variable, by level where the file has the levels, else in order."""
    if variable.name not in dataset:
        raise UserError(
            f"{path}: expected {variable.name}, got {', '.join(map(str, dataset.data_vars))}; give its file"
        )
    values = dataset[variable.name]
    if not variable.levels:
        if values.size != 1:
            raise UserError(f"{path}: expected one number for {variable.name}, got {values.size}; give its file")
        return [float(values.values.item())]
    known = set(dataset["level"].values.tolist()) if "level" in dataset else set()
    if known.issuperset(variable.levels):
        return [float(value) for value in values.sel(level=list(variable.levels)).values]
    if values.ndim != 1 or len(values) < len(variable):
        raise UserError(
            f"{path}: expected a number of {variable.name} on each of {len(variable)} levels, got shape {values.shape}; "
            "give the file that belongs to these weights"
        )
    return [float(value) for value in values.values[: len(variable)]]
