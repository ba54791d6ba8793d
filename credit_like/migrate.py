"""Translate an experiment of NCAR CREDIT, of its first or second generation, into an experiment of this package.

Every key of the source is read, or listed with its line and what it means here: nothing is dropped silently. The names
of CREDIT's keys are facts from its published configuration files and their comments.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from credit_like.checkpoint.credit_scalers import Scaler, read_scalers
from credit_like.errors import UserError
from credit_like.models.wxformer import Config as WXFormer
from credit_like.schema.data import DataSection
from credit_like.variables import ROLES, Variable, Variables

if TYPE_CHECKING:
    import xarray as xr

Keys = tuple[str | int, ...]
"""Path of a key in a document."""

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
_LOSSES = {"mse": "mse", "mae": "mae", "l1": "mae", "huber": "huber"}
_WIDTH = 140
_WHOLE_RUN = 999
"""A patience from which CREDIT's own configurations mean "never"."""

# Keys without a counterpart, by their last name: what this package does instead.
_INSTEAD = {
    "activate_outside_model": "corrections always follow the model and see physical units",
    "clip_grad": "gradients are clipped by `trainer.grad_max_norm`",
    "dataset_type": "files are read by `data.source`, whatever their origin",
    "gpu_type": "a field of the site, `pbs.fields.gpu_type`",
    "job_name": "jobs are named after the experiment",
    "lead_time_periods": "the time step is `data.timestep`",
    "latitude_weights": "weights follow from the latitudes of the data",
    "load_optimizer": "a run continues from its own checkpoint, with everything",
    "load_scaler": "a run continues from its own checkpoint, with everything",
    "load_scheduler": "a run continues from its own checkpoint, with everything",
    "load_sheduler": "a run continues from its own checkpoint, with everything",
    "load_weights": "a run continues from its own checkpoint, with everything",
    "lat_spec": "insolation is computed on the grid of the data",
    "lon_spec": "insolation is computed on the grid of the data",
    "metadata": "forecasts have the attributes of the data",
    "num_epoch": "a job trains until its walltime, and the next one continues",
    "num_integration_steps": "insolation is integrated over the time step by its own rule",
    "num_workers": "readers are `trainer.loader.num_workers`",
    "level_coord": "the vertical coordinate is recognised, or named in `data.source.dims`",
    "reload_epoch": "a run continues from its own checkpoint, with everything",
    "save_backup_weights": "checkpoints are kept by `trainer.checkpoint`",
    "save_best_weights": "the best checkpoint is always kept",
    "save_forecast": "forecasts are written below `save_loc`",
    "save_loc_physics": "coefficients of levels are keys of the corrections",
    "scaler_type": "fields are normalised by mean and standard deviation",
    "skip_validation": "every epoch ends with a validation",
    "start_epoch": "a run continues from its own checkpoint, with everything",
    "static_first": "channels are found by name",
    "type": "there is one trainer",
    "update_learning_rate": "the learning rate follows from the step alone",
    "use_scheduler": "a schedule is always there; `constant` changes nothing",
    "use_tensorboard": "TensorBoard's files are always written",
    "valid_batch_size": "validations use the micro-batch of training",
    "valid_forecast_len": "validations have the length of training",
    "valid_history_len": "validations have the history of training",
    "valid_thread_workers": "validations use the readers of training",
}


@dataclass(frozen=True)
class Remark:
    """A key of the source that is not translated one to one."""

    line: int
    key: str
    value: str
    meaning: str
    covered: bool = False
    """Whether nothing is to be decided: this package does it another way, or always."""


@dataclass
class Document:
    """CREDIT's experiment: its values, the lines of its keys, and which of them have been read."""

    values: Mapping[str, Any]
    lines: Mapping[Keys, int]
    read: set[Keys] = field(default_factory=set)
    remarks: list[Remark] = field(default_factory=list)

    def get(self, *keys: str | int, default: Any = None) -> Any:
        """Return the value of a key, or `default` where it is absent or null; it counts as read with all below it."""
        found: Any = self.values
        for key in keys:
            inside = isinstance(found, Mapping) and key in found
            inside = inside or (isinstance(found, list) and isinstance(key, int) and key < len(found))
            if not inside:
                return default
            found = found[key]
        self.read.add(keys)
        return default if found is None else found

    def remark(self, keys: Keys, meaning: str, covered: bool = False) -> None:
        """List a key that is there, with what it means here."""
        place = self.lines.get(keys, 1), ".".join(map(str, keys))
        self.remarks.append(Remark(*place, _short(self.get(*keys)), meaning, covered))

    def rest(self) -> Iterator[Keys]:
        """Yield the keys with a value of their own that nothing has read."""

        def below(value: Any, keys: Keys) -> Iterator[Keys]:
            if keys in self.read:
                return
            if isinstance(value, Mapping) and value:
                for key, child in value.items():
                    yield from below(child, (*keys, key))
            else:
                yield keys

        yield from below(self.values, ())


@dataclass(frozen=True)
class Translation:
    """An experiment of this package as plain data for YAML, and what it could not express."""

    experiment: dict[str, Any]
    remarks: tuple[Remark, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Channels and normalisation in the metadata of the file of weights, where the source has them."""


def read(path: Path) -> Document:
    """Read CREDIT's file. Raises UserError if it is no YAML mapping with a `data` section."""
    try:
        text = path.read_text()
        values = yaml.safe_load(text)
        root = yaml.compose(text, yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: expected CREDIT's YAML, got a file that cannot be read: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("data"), dict):
        raise UserError(
            f"{path}: expected CREDIT's YAML with a `data` section, got none; is it an experiment of CREDIT?"
        )
    return Document(values, dict(_lines(root, ())))


def _lines(node: yaml.Node | None, keys: Keys) -> Iterator[tuple[Keys, int]]:
    children: list[tuple[str | int, int, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key.start_mark.line, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(i, value.start_mark.line, value) for i, value in enumerate(node.value)]
    for name, line, child in children:
        yield (*keys, name), line + 1
        yield from _lines(child, (*keys, name))


def translate(path: Path, upsample: str | None = None, start_from: str | None = None) -> Translation:
    """Translate the experiment in `path`.

    `upsample` is the decoder of the weights that belong to it, if they are at hand, and `start_from` the file in which
    they are. Raises UserError if the file is no experiment of CREDIT, or its model is another architecture.
    """
    source = read(path)
    try:
        return _translated(source, path, upsample, start_from)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path}: expected an experiment as CREDIT's own are, got values of another kind: {error!r}; correct them"
        ) from error


def _translated(source: Document, path: Path, upsample: str | None, start_from: str | None) -> Translation:
    second = isinstance(source.get("data", "source"), dict)
    source.read.discard(("data", "source"))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-") or "credit"
    data = _second_generation(source) if second else _first_generation(source)
    of_weights = _of_the_second_generation if second else _of_the_weights
    metadata = of_weights(source, data) if start_from else {}
    if source.get("data", "mean_path") and "normalisation" not in metadata:
        for key in ("mean_path", "std_path"):
            source.remark(
                ("data", key),
                "not read: `credit-like preprocess` fits the statistics, or name a file in `data.statistics`",
            )
    model = _model(source, upsample)
    experiment: dict[str, Any] = {
        "name": name,
        "seed": source.get("seed", default=0),
        "save_loc": _variables_of_the_shell(str(source.get("save_loc", default=f"runs/{name}"))).rstrip("/"),
        **({"start_from": {"path": start_from}} if start_from else {}),
        "data": data,
        "model": model,
        "loss": _loss(source),
        "physics": _physics(source),
        "trainer": _trainer(source),
        "inference": _inference(source, data),
        **_batch_system(source),
    }
    for keys in list(source.rest()):
        instead = _INSTEAD.get(str(keys[-1]))
        source.remark(
            keys, instead or "unknown to this translation; see whether it matters", covered=instead is not None
        )
    remarks = sorted(set(source.remarks), key=lambda remark: (remark.line, remark.key))
    made = {key: value for key, value in experiment.items() if value not in ({}, [])}
    return Translation(made, tuple(remarks), metadata)


def written(translation: Translation, path: Path) -> str:
    """Return the experiment as YAML text: a key of a section on a line of its own, and what is below it beside it."""
    lines = [f"# Translated from CREDIT's {path.name} by `credit-like import-credit`."]
    for key, value in translation.experiment.items():
        if isinstance(value, dict) and len(str(value)) > 100:
            lines.append(f"{key}:")
            for name, part in value.items():
                lines += _inside(name, part)
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _inside(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of a key of a section; what does not fit on one has a line for each of its parts."""
    line = f"  {name}: {_flow(value)}"
    if len(line) <= _WIDTH or not value or (isinstance(value, list) and not isinstance(value[0], dict)):
        yield line
        return
    yield f"  {name}:"
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield f"    {'-' if isinstance(value, list) else f'{key}:'} {_flow(part)}"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""

    class Dumper(yaml.SafeDumper):
        """A dumper without anchors."""

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    text = yaml.dump(value, Dumper=Dumper, sort_keys=False, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


# ---- data ------------------------------------------------------------------------------------------------------------


def _second_generation(source: Document) -> dict[str, Any]:
    """Return the `data` section from nested sources with `vars_3D` and `vars_2D` by role."""
    roles: dict[str, dict[str, list[Any]]] = {role: {} for role in ROLES}
    paths: list[str] = []
    levels: list[float] = []
    for name in source.values["data"]["source"]:
        at = ("data", "source", name)
        kind = source.get(*at, "dataset_type", default="local")
        own = [float(level) for level in source.get(*at, "levels", default=[])]
        if levels and own and own != levels:
            source.remark((*at, "levels"), "levels differ between sources: give them to its variables as `levels`")
        levels = levels or own
        resolution = source.get(*at, "resolution", default="1440x721")
        paths += [path.format(resolution=resolution) for path in _PUBLIC.get(kind, ())]
        if kind not in ("local", "tisr", *_PUBLIC):
            source.remark((*at, "dataset_type"), "no source reads it: give files of these variables in `data.source`")
        for role in source.values["data"]["source"][name].get("variables") or {}:
            for ours, theirs in (("level", "vars_3D"), ("surface", "vars_2D")):
                for variable in source.get(*at, "variables", role, theirs, default=[]):
                    spec = {"name": variable, "compute": "solar"} if kind == "tisr" else variable
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
    start, end = (str(source.get("data", key, default="")) for key in ("start_datetime", "end_datetime"))
    validation = [str(source.get("validation_data", key, default="")) for key in ("start_datetime", "end_datetime")]
    same = _without_periods(source.values.get("validation_data")) == _without_periods(source.values["data"])
    if all(validation) and same:
        source.get("validation_data")
    periods = _periods(source, (start, end), (validation[0], validation[1]) if all(validation) else None)
    return _data(source, roles, paths, levels, str(source.get("data", "timestep", default="6h")), periods, shift=0)


def _without_periods(section: Any) -> Any:
    return {k: v for k, v in section.items() if k not in ("start_datetime", "end_datetime")} if section else None


def _first_generation(source: Document) -> dict[str, Any]:
    """Return the `data` section from flat lists of variables and years."""
    roles: dict[str, dict[str, list[Any]]] = {role: {} for role in ROLES}
    paths: list[str] = []
    for role, groups in _FIRST_GENERATION.items():
        for names, place, path in groups:
            found = source.get("data", names, default=[])
            where = source.get("data", path)
            if found:
                roles[role].setdefault(place, []).extend(found)
                paths += [where] if where else []
    hours = int(source.get("data", "lead_time_periods", default=6)) * int(source.get("data", "skip_periods", default=1))
    levels = [float(level) for level in source.get("data", "level_ids", default=[])] or _levels_of_means(source)
    if not levels and roles["prognostic"].get("level"):
        count = int(source.values.get("model", {}).get("levels", 15))
        levels = [float(level) for level in range(1, count + 1)]
        source.remark(
            ("data", "variables"),
            f"the file does not say which {count} levels: set `data.levels` to those of the store",
        )
    years = [source.get("data", key) for key in ("train_years", "valid_years")]
    spans = [(f"{a}-01-01", f"{b - 1}-12-31T{24 - hours:02d}") if a else None for a, b in (y or (0, 0) for y in years)]
    periods = _periods(source, spans[0] or ("", ""), spans[1])
    return _data(source, roles, paths, levels, f"{hours}h", periods, shift=1)


def _of_the_weights(source: Document, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of the channels in CREDIT's order and, where its files are at hand, their normalisation.

    CREDIT's input is prognostic, static, forcing, or with `static_first: false` prognostic, forcing, static. Its files of
    mean and standard deviation hold whatever a model was trained with, such as residual standard deviations. Static and
    cyclic forcing fields are stored as the model sees them: mean 0, standard deviation 1.
    """
    variables = Variables(DataSection.model_validate(data))
    names = {role: Variables.channel_names(variables.role(role)) for role in ROLES}
    forcing, static = names["dynamic_forcing"], names["static"]
    first = source.get("data", "static_first", default=True)
    inputs = [*names["prognostic"], *((*static, *forcing) if first else (*forcing, *static))]
    channels = {"inputs": inputs, "outputs": [*names["prognostic"], *names["diagnostic"]]}
    files = [
        Path(_variables_of_the_shell(str(source.get("data", key, default="")))) for key in ("mean_path", "std_path")
    ]
    if not all(path.is_file() for path in files):
        return {"channels": channels}
    from credit_like.data.files import netcdf_files

    mean, std = (netcdf_files.load(path) for path in files)
    unscaled = {*source.get("data", "forcing_variables", default=[]), *(v.name for v in variables.role("static"))}
    normalisation: dict[str, dict[str, list[Any]]] = {}
    for role in ROLES:
        about = normalisation[role] = {"channels": names[role], "mean": [], "std": [], "change_std": []}
        for variable in variables.role(role):
            plain = variable.name in unscaled
            about["mean"] += [0.0] * len(variable) if plain else _values(mean, variable, files[0])
            about["std"] += [1.0] * len(variable) if plain else _values(std, variable, files[1])
        about["change_std"] = [None] * len(about["mean"])
    return {"channels": channels, "normalisation": normalisation}


def _of_the_second_generation(source: Document, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of the channels in CREDIT's order and, where its scaler file is at hand, their normalisation.

    CREDIT's channels are those of one source after the other; of each, prognostic, forcing and static variables, and within
    a role those on levels first.
    """
    variables = Variables(DataSection.model_validate(data))
    keys: dict[str, str] = {}
    for name, section in source.values["data"]["source"].items():
        for role in ("prognostic", "dynamic_forcing", "static", "diagnostic"):
            groups = (section.get("variables") or {}).get(role) or {}
            for dim in ("3D", "2D"):
                keys |= {one: f"{name}/{role}/{dim.lower()}/{one}" for one in groups.get(f"vars_{dim}") or ()}
    ordered = [variables[name] for name in keys]
    inputs = Variables.channel_names([variable for variable in ordered if variable.role != "diagnostic"])
    outputs = [v for role in ("prognostic", "diagnostic") for v in ordered if v.role == role]
    channels = {"inputs": inputs, "outputs": Variables.channel_names(outputs)}
    normalisation = _of_the_scalers(source, variables, keys)
    return {"channels": channels, **({"normalisation": normalisation} if normalisation else {})}


def _of_the_scalers(
    source: Document, variables: Variables, keys: Mapping[str, str]
) -> dict[str, dict[str, list[Any]]] | None:
    """Return the normalisation of CREDIT's scaler file; None, with a remark that says why, if it cannot be taken over."""
    at, block = next(_steps_of_type(source, "preblocks", "bridgescaler_transform"), ((), {}))
    arguments = block.get("args") or {}
    path = Path(os.path.expandvars(str(arguments.get("scaler_path", ""))))
    where = (*at, "args", "scaler_path")
    if not at or not path.is_file():
        return None
    scalers, chosen = read_scalers(path), arguments.get("variables") or [""]
    result: dict[str, dict[str, list[Any]]] = {}
    problems: dict[str, list[str]] = {}
    for role in ROLES:
        about = result[role] = {"channels": [], "mean": [], "std": [], "change_std": []}
        for variable in variables.role(role):
            key, count = keys[variable.name], len(variable)
            scaler = scalers.get(key) if any(key.startswith(prefix) for prefix in chosen) else None
            scaler = scaler or Scaler("", (0.0,) * count, (1.0,) * count)
            if why := _unfit(source, scaler, key, count):
                problems.setdefault(why, []).append(variable.name)
            about["channels"] += variable.channels
            about["mean"] += scaler.mean or ()
            about["std"] += scaler.std or ()
            about["change_std"] += [None] * count
    if problems:
        told = "; ".join(f"{', '.join(names)} ({why})" for why, names in problems.items())
        source.remark(where, f"not taken over: {told}. A run from these weights fits its own statistics")
        return None
    steps = [
        step for part in ("preblocks", "postblocks") for step in _steps_of_type(source, part, "bridgescaler_transform")
    ]
    places = {".".join(map(str, place)) for place, _ in steps}
    source.remarks[:] = [remark for remark in source.remarks if remark.key not in places]
    source.remark(where, "its numbers go with the weights", covered=True)
    return result


def _unfit(source: Document, scaler: Scaler, key: str, count: int) -> str:
    """Return why a scaler is not the mean and standard deviation of a variable with `count` channels, or nothing."""
    logarithms = _steps_of_type(source, "preblocks", "log_transform")
    if any(key in (step.get("args") or {}).get("variables", ()) for _, step in logarithms):
        return "numbers of the logarithm"
    if scaler.mean is None:
        return f"a {scaler.type}, which is no mean and standard deviation"
    return "" if len(scaler.mean) == count else f"{len(scaler.mean)} levels in place of {count}"


def _steps_of_type(source: Document, part: str, kind: str) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """Yield the place and the content of the steps of a type before (`preblocks`) or after the network."""
    section = source.values.get(part)
    if not isinstance(section, Mapping):
        return
    inside: Keys = (part, "per_step") if "per_step" in section else (part,)
    for name, block in (section.get("per_step", section) or {}).items():
        if isinstance(block, Mapping) and block.get("type") == kind:
            yield (*inside, name), block


def _values(dataset: xr.Dataset, variable: Variable, path: Path) -> list[float]:
    """Return the numbers of each channel of a variable, by level where the file has the levels, else in order."""
    if variable.name not in dataset:
        raise UserError(
            f"{path}: expected {variable.name}, got {', '.join(map(str, dataset.data_vars))}; give its file"
        )
    values = dataset[variable.name]
    if not variable.levels:
        return [float(values)]
    known = set(dataset["level"].values.tolist()) if "level" in dataset else set()
    if known.issuperset(variable.levels):
        return [float(value) for value in values.sel(level=list(variable.levels)).values]
    return [float(value) for value in values.values[: len(variable)]]


def _levels_of_means(source: Document) -> list[float]:
    """Return the levels in CREDIT's file of means, if it is there: the files of the data may have more."""
    path = Path(str(source.get("data", "mean_path", default="")))
    if not path.is_file():
        return []
    from credit_like.data.files import netcdf_files

    means = netcdf_files.load(path)
    return [float(level) for level in means["level"].values] if "level" in means else []


def _periods(source: Document, train: tuple[str, str], valid: tuple[str, str] | None) -> dict[str, list[str]]:
    """Return training, validation and test period; a file without a validation gives its last year to it."""
    if not all(train):
        raise UserError("expected the training period of CREDIT's experiment (train_years or start_datetime), got none")
    train = (_time(train[0]), _time(train[1]))
    if valid is None:
        last = dt.datetime.fromisoformat(train[1]).year
        valid = (f"{last}-01-01", train[1])
        earlier = f"{last - 1}-12-31T18"
        key: Keys = ("data", "end_datetime") if source.get("data", "end_datetime") else ("data", "train_years")
        source.remark(key, f"no validation period is given: {last} is taken for it, and training ends with {last - 1}")
        train = (train[0], earlier)
    valid = (_time(valid[0]), _time(valid[1]))
    if train[0] < valid[0] <= train[1]:
        key = ("validation_data", "start_datetime") if "validation_data" in source.values else ("data", "valid_years")
        source.remark(key, f"validation overlaps training, which ends before {valid[0]} here")
        day = dt.datetime.fromisoformat(valid[0]) - dt.timedelta(hours=6)
        train = (train[0], day.strftime("%Y-%m-%dT%H"))
    test = valid
    dates = (("predict", "forecasts"), ("inference", "batch_forecast"))
    if not any(source.values.get(section, {}).get(name) for section, name in dates):
        meaning = "no forecasts are given: the second half of the validation period becomes the test period"
        source.remarks.append(Remark(1, "predict", "absent", meaning))
        begin, end = (dt.datetime.fromisoformat(time) for time in valid)
        day = begin + dt.timedelta(days=max((end - begin).days // 2, 1))
        valid = (valid[0], (day - dt.timedelta(hours=6)).strftime("%Y-%m-%dT%H"))
        test = (day.strftime("%Y-%m-%d"), test[1])
    return {"train": list(train), "valid": list(valid), "test": list(test)}


def _time(value: str) -> str:
    return value.strip().removesuffix("Z").replace(" ", "T").removesuffix(":00").removesuffix(":00")


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
    source.get("data", "retain_graph")
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
    _blocks(source)
    return section | dict(periods)


def _sources(paths: Sequence[str]) -> list[dict[str, Any]] | dict[str, Any]:
    """Return one source for each distinct path; paths that differ in wildcards alone are one."""
    found: dict[str, dict[str, Any]] = {}
    for path in map(str, paths):
        kind = "netcdf" if re.search(r"\.(nc4?|h5)$", path) else "zarr"
        made: dict[str, Any] = {"type": kind, "path": _variables_of_the_shell(path)}
        if path.startswith("gs://"):
            made["storage_options"] = {"token": "anon"}
        found.setdefault(path.replace("*", ""), made)
    if not found:
        raise UserError("expected paths of CREDIT's data, got none; is the source read from the network?")
    listed = list(found.values())
    return listed[0] if len(listed) == 1 else listed


def _blocks(source: Document) -> None:
    """List the steps before and after the network that have another form here."""
    meanings = {
        "era5_normalizer": "fields are normalised by the statistics; those files are not read",
        "bridgescaler_transform": "fields are normalised by mean and standard deviation, which `preprocess` fits",
        "log_transform": "not translated: the variable is normalised as it is",
        "exp_transform": "not translated: the variable is normalised as it is",
        "fill_values": "missing values are masked in the loss and replaced by the mean in the input",
        "geopotential_diagnostic": "not translated: the model predicts the variables of the data alone",
    }
    for part in ("preblocks", "postblocks"):
        section = source.values.get(part)
        steps = section.get("per_step", section) if isinstance(section, Mapping) else {}
        inside: Keys = (part, "per_step") if isinstance(section, Mapping) and "per_step" in section else (part,)
        for name, block in (steps or {}).items():
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind in ("concat", "reconstruct"):
                source.get(*inside, name)
            elif kind in meanings:
                source.remark((*inside, name), meanings[kind])


# ---- model, loss, corrections ----------------------------------------------------------------------------------------


def _model(source: Document, upsample: str | None) -> dict[str, Any]:
    """Return the `model` section. Raises UserError for another architecture or arguments that do not convert."""
    from credit_like.checkpoint.credit import convert_model_args, model_block

    if not isinstance(source.values.get("model"), dict):
        height, width = _grid(source)
        source.remarks.append(
            Remark(
                1,
                "model",
                "absent",
                "there is no model section: the default WXFormer, padded to fit the grid, is taken",
            )
        )
        return _fitting(height, width)
    block = model_block(dict(source.values))
    if upsample is None:
        upsample = "pixel_shuffle" if block.get("upsample_with_ps") else "transpose"
        if "upsample_with_ps" not in block:
            source.remarks.append(
                Remark(
                    source.lines.get(("model",), 1), "model.upsample_with_ps", "absent",
                    "the decoder of the published weights, `upsample: transpose`, is taken",
                )
            )  # fmt: skip
    for key in ("upsample_v_conv", "decoder_attention_type"):
        if block.pop(key, None):
            source.remark(("model", key), "not part of this architecture")
    if block.pop("frame_patch_size", 1) != 1:
        source.remark(("model", "frame_patch_size"), "not translated: every frame is embedded with all others")
    block.pop("post_conf", None)
    arguments = convert_model_args(block, upsample=upsample)
    config = arguments.config
    for problem in config.check(arguments.height, arguments.width):
        source.remark(("model", "padding_conf"), f"the sizes do not fit here: {problem}")
    for key in source.values["model"]:
        if key != "post_conf":
            source.get("model", key)
    standard = WXFormer().model_dump(mode="json")
    made = {key: value for key, value in config.model_dump(mode="json").items() if value != standard[key]}
    return {"type": "wxformer", **made, "predict": "state"}


def _grid(source: Document) -> tuple[int, int]:
    """Return (rows, columns) according to the sources. Raises UserError if none has them."""
    for name, section in source.values["data"].get("source", {}).items():
        match = re.fullmatch(r"(\d+)x(\d+)", str(section.get("resolution", "")))
        if match:
            source.get("data", "source", name, "resolution")
            return int(match[2]), int(match[1])
    raise UserError("expected a `model` section or the resolution of a source, got neither; add CREDIT's model section")


def _fitting(height: int, width: int) -> dict[str, Any]:
    """Return the smallest padding with which the default architecture fits a grid, as a model section."""

    def padded(rows: int, columns: int) -> WXFormer:
        pads = {"pad_lat": (rows // 2, rows - rows // 2), "pad_lon": (columns // 2, columns - columns // 2)}
        return WXFormer.model_validate({"padding_conf": {"activate": True, "mode": "earth", **pads}})

    def problems(rows: int, columns: int) -> int:
        return len(padded(rows, columns).check(height, width))

    # Every stage halves the grid. What the windows require of latitude and of longitude does not depend on the other.
    factor = math.prod(WXFormer().cross_embed_strides)
    rows = min(range(-height % factor, 65, factor), key=lambda rows: (problems(rows, 0), rows))
    columns = min(range(-width % factor, 65, factor), key=lambda columns: (problems(rows, columns), columns))
    if problems(rows, columns):
        raise UserError(
            f"expected a grid that the default WXFormer fits with at most 64 rows and columns of padding, got {height} x {width}"
        )
    return {
        "type": "wxformer",
        "padding_conf": padded(rows, columns).padding_conf.model_dump(mode="json"),
        "predict": "state",
    }


def _loss(source: Document) -> dict[str, Any]:
    """Return the `loss` section; CREDIT compares normalised states."""
    at: Keys = ("loss", "args") if isinstance(source.get("loss", "args"), dict) else ("loss",)
    source.read.discard(("loss", "args"))
    source.get("loss", "type")
    kind = str(source.get(*at, "training_loss", default="mse"))
    if kind not in _LOSSES:
        source.remark((*at, "training_loss"), "not translated: the mean squared error is taken")
    made: dict[str, Any] = {"type": _LOSSES.get(kind, "mse"), "scale": "state"}
    if not source.get(*at, "use_latitude_weights", default=True):
        made["latitude_weights"] = False
    for key, meaning in (
        ("use_power_loss", "not translated: there is no power loss"),
        ("use_spectral_loss", "not translated: choose a spectral `loss.type` for it"),
        (
            "var_weighting",
            "errors are divided by the standard deviation of each variable; give `variable_weights` for others",
        ),
        ("include_computed_diagnostics", "not translated: the loss is that of the predicted variables"),
    ):
        if source.get(*at, key):
            source.remark((*at, key), meaning)
    for key in (
        "base_loss_parameters",
        "normalize_weights",
        "spectral_lambda_reg",
        "spectral_wavenum_init",
        "scaler_path",
    ):
        source.get(*at, key)
    weights = source.get(*at, "variable_weights", default={})
    if source.get(*at, "use_variable_weights", default=False) and isinstance(weights, dict):
        single = {name: value for name, value in weights.items() if isinstance(value, int | float)}
        if single != weights:
            source.remark((*at, "variable_weights"), "weights differ between levels: give one for each variable")
        if single:
            made["variable_weights"] = single
    return made


_ENERGY_NAMES = {
    "surface_pressure": "surface_pressure_name", "humidity": "specific_total_water_name", "u": "u_wind_name",
    "temperature": "air_temperature_name", "v": "v_wind_name", "surface_geopotential": "surface_geopotential_name",
}  # fmt: skip
_ENERGY_FLUXES = ("TOA_net_radiation_flux_name", "surface_net_radiation_flux_name", "surface_energy_flux_name")
_FIXERS = {"global_mass_fixer": "mass", "global_water_fixer": "moisture"}


def _physics(source: Document) -> list[dict[str, Any]]:
    """Return the corrections after every step that are active."""
    at: Keys = ("model", "post_conf")
    post = source.values.get("model", {}).get("post_conf") or {}
    source.get(*at, "activate")
    source.get(*at, "grid")
    if not post.get("activate"):
        source.get(*at)
        return []
    made: list[dict[str, Any]] = []
    for name, conf in post.items():
        if not isinstance(conf, dict):
            continue
        source.get(*at, name)
        if not conf.get("activate"):
            continue
        if name == "tracer_fixer":
            for variable, minimum in zip(conf.get("tracer_name", []), conf.get("tracer_thres", []), strict=False):
                same = [part for part in made if part["type"] == "clip" and part["minimum"] == float(minimum)]
                if same:
                    same[0]["variables"].append(variable)
                else:
                    made.append({"type": "clip", "variables": [variable], "minimum": float(minimum)})
        elif name in _FIXERS:
            names = {"surface_pressure": "surface_pressure_name", "humidity": "specific_total_water_name"}
            if name == "global_water_fixer":
                names |= {"precipitation": "precipitation_name", "evaporation": "evaporation_name"}
            part = {ours: conf[theirs][0] for ours, theirs in names.items() if conf.get(theirs)}
            if name == "global_water_fixer":
                part |= {"water_scale": 1000.0, "evaporation_upward": False}
            made.append({"type": _FIXERS[name], **part})
            if conf.get("grid_type", "pressure") == "sigma":
                source.remark(
                    (*at, name),
                    "set `a` and `b`, the coefficients of the interfaces of the hybrid levels, in `physics`",
                )
        elif name == "global_energy_fixer" and all(conf.get(theirs) for theirs in _ENERGY_FLUXES):
            part = {ours: conf[theirs][0] for ours, theirs in _ENERGY_NAMES.items() if conf.get(theirs)}
            top, radiation, turbulent = (conf[theirs] for theirs in _ENERGY_FLUXES)
            made.append({"type": "energy", **part, "top": {"down": top}, "surface": {"down": [*radiation, *turbulent]}})
            if conf.get("grid_type", "pressure") == "sigma":
                source.remark(
                    (*at, name),
                    "set `a` and `b`, the coefficients of the interfaces of the hybrid levels, in `physics`",
                )
        elif name.startswith("global_energy_fixer"):
            source.remark((*at, name), "not translated: list its fluxes by name in `physics: [{type: energy, …}]`")
        else:
            source.remark((*at, name), "not translated: there is no such correction")
    return made


# ---- training, forecasts, jobs ---------------------------------------------------------------------------------------


def _trainer(source: Document) -> dict[str, Any]:
    """Return the `trainer` section."""

    def get(key: str, default: Any = None) -> Any:
        return source.get("trainer", key, default=default)

    mode = {"fsdp": "fsdp2", "domain_parallel": "none"}.get(str(get("mode", "none")), str(get("mode", "none")))
    layout = {"data": mode, **(get("parallelism") or {})}
    layout = {key: value for key, value in layout.items() if key == "data" or value != 1}
    shared = int(layout.get("tensor", 1)) * int(layout.get("domain", 1))
    ranks = (
        1
        if layout["data"] == "none"
        else int(source.get("pbs", "nodes", default=1)) * int(source.get("pbs", "ngpus", default=1))
    )
    batch, accumulate = int(get("train_batch_size", 1)), int(get("grad_accum_every", 1))
    made: dict[str, Any] = {
        "parallelism": layout,
        "global_batch_size": max(ranks // shared, 1) * batch * accumulate,
        "micro_batch_size": batch,
        "epochs": int(get("epochs", 1)),
    }
    for theirs, ours in (("batches_per_epoch", "batches_per_epoch"), ("valid_batches_per_epoch", "valid_batches")):
        if get(theirs):
            made[ours] = int(get(theirs))
    for theirs, ours in (
        ("amp", "amp"), ("activation_checkpoint", "activation_checkpoint"), ("cpu_offload", "fsdp2_cpu_offload"),
        ("compile", "compile"), ("use_ema", "use_ema"),
    ):  # fmt: skip
        if get(theirs):
            made[ours] = True
    if get("use_ema") and get("ema_decay"):
        made["ema_decay"] = float(get("ema_decay"))
    made["optimizer"] = {"type": "adamw", "learning_rate": float(get("learning_rate", 1e-3))}
    if get("weight_decay"):
        made["optimizer"]["weight_decay"] = float(get("weight_decay"))
    made["scheduler"] = _scheduler(source, made["epochs"])
    clip = get("grad_max_norm", 1.0)
    if clip == "dynamic":
        source.remark(("trainer", "grad_max_norm"), "clipped to a norm of 1, the default; there is no dynamic norm")
    elif float(clip) != 1.0:
        made["grad_max_norm"] = float(clip) or None
    if int(get("stopping_patience", _WHOLE_RUN)) < min(_WHOLE_RUN, made["epochs"]):
        source.remark(("trainer", "stopping_patience"), "not translated: the run trains all its epochs")
    loader = {"num_workers": int(get("thread_workers", 0)), "prefetch_factor": int(get("prefetch_factor", 2))}
    made["loader"] = {
        key: value for key, value in loader.items() if value != {"num_workers": 0, "prefetch_factor": 2}[key]
    }
    if get("load_weights"):
        source.remark(("trainer", "load_weights"), "give the weights as `import-credit CONFIG --weights FILE`")
    source.read.discard(("trainer", "type"))
    return {key: value for key, value in made.items() if value != {}}


def _scheduler(source: Document, epochs: int) -> dict[str, Any]:
    """Return the schedule of the learning rate; those of CREDIT by epoch become smooth in steps."""
    at: Keys = ("trainer", "scheduler")
    conf = source.values.get("trainer", {}).get("scheduler") or {}
    for key in ("scheduler_type", "warmup_steps", "min_lr", "total_steps", "T_max", "eta_min", "last_epoch"):
        source.get(*at, key)
    if not source.get("trainer", "use_scheduler", default=bool(conf)):
        return {"type": "constant"}
    kind = conf.get("scheduler_type", "")
    if kind == "linear-warmup-cosine":
        made = {key: conf[key] for key in ("warmup_steps", "min_lr", "total_steps") if key in conf}
        return {"type": "linear-warmup-cosine", **{k: float(v) if k == "min_lr" else int(v) for k, v in made.items()}}
    if kind in ("cosine-annealing", "cosine-annealing-restarts"):
        if kind.endswith("restarts") or int(conf.get("T_max", epochs)) != epochs:
            source.remark(at, "one cosine over the whole run is taken instead")
        low = float(conf.get("eta_min", 0.0))
        return {"type": "linear-warmup-cosine", **({"min_lr": low} if low else {})}
    source.remark(at, "not translated: the learning rate stays constant")
    return {"type": "constant"}


def _inference(source: Document, data: dict[str, Any]) -> dict[str, Any]:
    """Return the `inference` section, and put its times into the test period of `data`."""
    old, new = (
        source.values.get(section, {}).get(name) or {}
        for section, name in (("predict", "forecasts"), ("inference", "batch_forecast"))
    )
    for key in ("type", "start_year", "start_month", "start_day", "start_hours", "duration", "days"):
        source.get("predict", "forecasts", key)
    for key in ("forecast_length", "first_init_date", "last_init_date", "init_interval"):
        source.get("inference", "batch_forecast", key)
    if old and old.get("start_year"):
        first = dt.datetime(old["start_year"], old.get("start_month", 1), old.get("start_day", 1))
        hours = sorted(old.get("start_hours", [0]))
        last = first + dt.timedelta(days=int(old.get("duration", 1)) - 1, hours=hours[-1])
        between = {b - a for a, b in zip(hours, [*hours[1:], hours[0] + 24], strict=True)}
        if len(between) > 1:
            source.remark(("predict", "forecasts"), "initial times are not regular: list them in `inference.init`")
        first, lead = first + dt.timedelta(hours=hours[0]), f"{int(old.get('days', 1))}d"
        init = [first.strftime("%Y-%m-%dT%H"), last.strftime("%Y-%m-%dT%H"), f"{min(between)}h"]
    elif new:
        lead = _lead(source, str(new.get("forecast_length", "10d")))
        init = [
            _time(str(new["first_init_date"])),
            _time(str(new["last_init_date"])),
            str(new.get("init_interval", "12h")),
        ]
    else:
        return {}
    end = dt.datetime.fromisoformat(init[1]) + dt.timedelta(days=float(lead[:-1]) if lead.endswith("d") else 1)
    data["test"] = [init[0], end.strftime("%Y-%m-%dT%H")]
    form = str(source.get("inference", "output", "format", default="netcdf"))
    for key in ("output_interval", "group_by", "variables"):
        if source.get("inference", "output", key):
            source.remark(("inference", "output", key), "not translated: every step and variable is written")
    for keys in (
        ("inference", "run_mode"), ("inference", "mode"), ("inference", "single_forecast"),
        ("inference", "output", "encoding"), ("predict", "mode"),
    ):  # fmt: skip
        source.get(*keys)
    return {"init": init, "lead": lead, "output": {"format": "zarr" if form == "zarr" else "netcdf"}}


def _lead(source: Document, text: str) -> str:
    """Return a lead time in days or hours; CREDIT also counts in months and years."""
    match = re.fullmatch(r"(\d+)\s*([hdmy])", text.strip())
    if not match:
        source.remark(("inference", "batch_forecast"), "the length of the forecasts is not understood: 10d is taken")
        return "10d"
    days = {"m": 30, "y": 365}.get(match[2])
    return f"{int(match[1]) * days}d" if days else f"{match[1]}{match[2]}"


def _batch_system(source: Document) -> dict[str, Any]:
    """Return the `site` to include and the `pbs` section."""
    conf = source.values.get("pbs") or {}
    if not conf:
        return {}
    for key in ("project", "nodes", "ngpus", "walltime", "queue", "gpu_type", "conda"):
        source.get("pbs", key)
    queue = str(conf.get("queue", ""))
    made: dict[str, Any] = {}
    for theirs, ours in (("project", "account"), ("nodes", "nodes"), ("ngpus", "ngpus"), ("walltime", "walltime")):
        if conf.get(theirs) is not None:
            made[ours] = conf[theirs]
    site = "casper" if queue.startswith("casper") else "derecho" if queue in ("main", "develop", "preempt") else None
    if site == "derecho":
        made["queue"] = queue
    elif site == "casper" and conf.get("gpu_type"):
        made["fields"] = {"gpu_type": conf["gpu_type"]}
    elif queue:
        made["queue"] = queue
    if conf.get("conda"):
        made["setup"] = [f"conda activate {conf['conda']}"]
    for key in ("ncpus", "mem"):
        if key in conf:
            source.remark(("pbs", key), "jobs get the share of the node that comes with their GPUs")
    return {"site": site or "generic-pbs", "pbs": made}


def _variables_of_the_shell(text: str) -> str:
    """Return a path with `$USER` as `${USER}`."""
    return re.sub(r"\$([A-Za-z_]\w*)", r"${\1}", text)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "…"


def run(path: Path, weights: Path | None, output: Path) -> Translation:
    """Write the translation of an experiment, and of its weights beside it; return what was written.

    Nothing is written before everything that can be refused has been. Raises UserError as `translate` does, if the
    output exists, or if the weights do not fit the model.
    """
    from credit_like.checkpoint.credit import decoder_of, import_credit, read_checkpoint
    from credit_like.checkpoint.files import replace_file

    if output.exists():
        raise UserError(f"expected a new file for the experiment, got {output}, which exists; change --output")
    upsample = decoder_of(read_checkpoint(weights)) if weights else None
    converted = output.with_suffix(".safetensors")
    translation = translate(path, upsample, str(converted) if weights else None)
    output.parent.mkdir(parents=True, exist_ok=True)
    if weights:
        import_credit(weights, path, converted, translation.metadata)
    replace_file(output, written(translation, path).encode())
    return translation


def report(translation: Translation, path: Path, output: Path) -> str:
    """Return what was written and every key that was not translated one to one, those that need a decision first."""
    lines = [f"{output}: {len(written(translation, path).splitlines())} lines"]
    for covered, title in (
        (False, "To decide:"),
        (True, "Without a counterpart, because this package does it another way or always:"),
    ):
        found = [remark for remark in translation.remarks if remark.covered == covered]
        lines += ["", title] if found else []
        lines += [f"{path.name}:{r.line}: {r.key} ({r.value}): {r.meaning}" for r in found]
    return "\n".join(lines)
