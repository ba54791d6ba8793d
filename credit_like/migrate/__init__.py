"""Translate an experiment of NCAR CREDIT, of its first or second generation, into an experiment of this package.

Every key of the source is read, or listed with its line and what it means here: nothing is dropped silently. The names
of CREDIT's keys are facts from its published configuration files and their comments.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from credit_like.errors import UserError
from credit_like.migrate import blocks
from credit_like.migrate.corrections import corrections
from credit_like.migrate.document import Document, Keys, Remark, read
from credit_like.models.wxformer import Config as WXFormer
from credit_like.outputs import check_new
from credit_like.schema.base import parse_duration
from credit_like.schema.data import DataSection
from credit_like.variables import ROLES, Variables

if TYPE_CHECKING:
    from credit_like.checkpoint.credit import ModelArguments

__all__ = ["Document", "Remark", "Translation", "read", "report", "run", "translate", "written"]

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
_WITH_NOISE = ("crossformer-ensemble", "crossformer-style")
_NOISE = {
    "noise_latent_dim": "not translated: see `channels` of `model.noise`",
    "encoder_noise_factor": "not translated: noise enters in the decoder",
    "decoder_noise_factor": "not translated: see `scales` of `model.noise`, whose effect is zero at first",
    "encoder_noise": "noise enters in the decoder",
    "freeze": "not translated: see `freeze` of `start_from`",
    "correlated": "not translated: noise is independent at each point; see `correlation` of `model.noise`, in time",
    "pretrained_weights": "give the weights as `import-credit CONFIG --weights FILE`, and name the result in `start_from`",
}
"""Keys of these models, and what is here instead."""
_LOSSES = {"mse": "mse", "mae": "mae", "l1": "mae", "huber": "huber", "logcosh": "log-cosh"}
_SCORES = ("KCRPS", "almost-fair-crps", "ring-crps")
"""Losses of ensembles; all of them are fair unless told otherwise."""
_TRAINERS = ("era5", "era5-gen1", "gen2", "era5-gen2", "era5-ensemble", "cam", "standard", "universal")
_MODES = {
    "fsdp": {"data": "fsdp2"}, "domain_parallel": {"data": "none"}, "fsdp+domain_parallel": {"data": "fsdp2"},
}  # fmt: skip
_CASPER = ("casper", "cpu", "gpgpu", "largemem", "vis", "htc", "rda", "l40")
_DERECHO = ("main", "preempt", "develop", "cpudev")
_WIDTH, _LINES = 140, 60
"""Of the experiment that is written, where it can be."""
_WHOLE_RUN = 999
"""A patience from which CREDIT's own configurations mean "never"."""

# Keys without a counterpart, by their last name: what this package does instead.
_INSTEAD = {
    "calendar": "the calendar is that of the files",
    "cycle_year": "the year is that of the files",
    "dataset_type": "files are read by `data.source`, whatever their origin",
    "engine": "the kind of a file follows from its name, or is `type` of `data.source`",
    "filename_time_format": "times are read from the files",
    "flip_vertical": "levels go by their numbers",
    "group_by": "netCDF has a file for each initial time",
    "job_name": "jobs are named after the experiment",
    "lat_spec": "insolation is computed on the grid of the data",
    "latitude_weights": "weights follow from the latitudes of the data",
    "lead_time_periods": "the time step is `data.timestep`",
    "level_coord": "the vertical coordinate is recognised, or named in `data.source.dims`",
    "levels": "the number of levels follows from `data.levels`",
    "load_optimizer": "a run continues from its own checkpoint, with everything",
    "load_scaler": "a run continues from its own checkpoint, with everything",
    "load_scheduler": "a run continues from its own checkpoint, with everything",
    "load_sheduler": "a run continues from its own checkpoint, with everything",
    "load_weights": "a run continues from its own checkpoint, with everything",
    "lon_lat_level_name": "the grid is that of the data",
    "lon_spec": "insolation is computed on the grid of the data",
    "metadata": "forecasts have the attributes of the data",
    "midpoint": "levels are the middles of layers",
    "num_epoch": "a job trains until its walltime, and the next one continues",
    "num_integration_steps": "insolation is integrated over the time step by its own rule",
    "num_workers": "readers are `trainer.loader.num_workers`",
    "reload_epoch": "a run continues from its own checkpoint, with everything",
    "retain_graph": "a backward pass frees what it no longer needs",
    "save_backup_weights": "checkpoints are kept by `trainer.checkpoint`",
    "save_best_weights": "the best checkpoint is always kept",
    "save_every_epoch": "checkpoints are kept by `trainer.checkpoint`",
    "save_forecast": "forecasts are written below `save_loc`",
    "save_loc_physics": "coefficients of levels are keys of the corrections",
    "save_metric_vars": "scores of all variables are logged",
    "scaler_type": "fields are normalised by mean and standard deviation",
    "simple_demo": "the grid is that of the data",
    "skip_validation": "every epoch ends with a validation",
    "start_epoch": "a run continues from its own checkpoint, with everything",
    "static_first": "channels are found by name",
    "time_coord": "the time coordinate is recognised, or named in `data.source.dims`",
    "total_time_steps": "the number of steps is `data.forecast_len`",
    "train_one_epoch": "a job trains until its walltime, and the next one continues",
    "update_learning_rate": "the learning rate follows from the step alone",
    "use_scheduler": "a schedule is always there; `constant` changes nothing",
    "use_tensorboard": "TensorBoard's files are always written",
    "valid_batch_size": "validations use the micro-batch of training",
    "valid_forecast_len": "validations have the length of training",
    "valid_history_len": "validations have the history of training",
    "valid_thread_workers": "validations use the readers of training",
}
# Keys that matter and are not translated, by their last name.
_NOT = {
    "base_loss_overrides": "not translated: all variables have the same loss",
    "climatology": "not read: `credit-like preprocess` fits the climatology",
    "cooldown": "the validations right after a reduction count like others",
    "custom_objects": "not read: give parts of your own as `plugins`",
    "data_clamp": "not translated: values of the data are not clamped",
    "max_forecast_len": "not translated: see `trainer.random_forecast_len` and `trainer.phases`",
    "metrics": "choose those of `evaluation.metrics`",
    "mixed_precision": "not translated: see `trainer.amp` and `trainer.fsdp2_mp_policy`",
    "quant_path": "not translated: see `transform` of a variable",
    "sst_forcing": "not translated: skin temperature over the sea is predicted like the rest",
    "seasonal_mean_climatology": "not read: `credit-like preprocess --climatology` writes it",
    "stop_after_epoch": "a job trains until its walltime: choose `pbs.walltime`",
    "stop_rollout": "not translated: see `trainer.random_forecast_len`",
    "training_metric": "the best checkpoint is that of the lowest validation loss",
    "training_metric_direction": "the best checkpoint is that of the lowest validation loss",
    "use_laplace_filter": "not translated: see the filters of `physics`",
}


@dataclass(frozen=True)
class Translation:
    """An experiment of this package as plain data for YAML, and what it could not express."""

    experiment: dict[str, Any]
    remarks: tuple[Remark, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Channels and normalisation in the metadata of the file of weights, where the source has them."""
    arguments: ModelArguments | None = None
    """Those of CREDIT's model."""


def translate(path: Path, upsample: str | None = None, weights: tuple[Path, Path] | None = None) -> Translation:
    """Translate the experiment in `path`.

    `upsample` is the decoder of the weights that belong to it, if they are at hand, and `weights` are CREDIT's checkpoint and
    the file of its conversion. Raises UserError if the file is no experiment of CREDIT, or its model is another architecture.
    """
    source = read(path)
    try:
        return _translated(source, path, upsample, weights)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path}: expected an experiment as CREDIT's own are, got values of another kind: {error!r}; correct them"
        ) from error


def _translated(source: Document, path: Path, upsample: str | None, weights: tuple[Path, Path] | None) -> Translation:
    second = isinstance(source.get("data", "source"), dict)
    source.read.discard(("data", "source"))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-") or "credit"
    functions, logs = blocks.transforms(source)
    data = (_second_generation if second else _first_generation)(source, functions)
    blocks.note(source)
    metadata = blocks.of_weights(source, data, weights[0], logs) if weights else {}
    if source.get("data", "mean_path") and "normalisation" not in metadata:
        for key in ("mean_path", "std_path"):
            source.remark(
                ("data", key),
                "not read: `credit-like preprocess` fits the statistics, or name a file in `data.statistics`",
            )
    variables = Variables(DataSection.model_validate(data))
    model, arguments = _model(source, upsample, variables, weights is not None)
    loss = _loss(source)
    experiment: dict[str, Any] = {
        "name": name,
        "seed": source.get("seed", default=0),
        "save_loc": _variables_of_the_shell(str(source.get("save_loc", default=f"runs/{name}"))).rstrip("/"),
        **({"start_from": {"path": str(weights[1])}} if weights else {}),
        "data": data,
        "model": model,
        "loss": loss,
        "physics": corrections(source, variables),
        "trainer": _trainer(source, model, loss, weights is not None),
        "inference": _inference(source, data),
        **_batch_system(source),
    }
    for keys in list(source.rest()):
        if source.get(*keys) in (None, {}, []):  # says nothing
            continue
        instead = _INSTEAD.get(str(keys[-1]))
        missing = next((_NOT[key] for key in map(str, keys) if key in _NOT), None)
        if source.get(*keys) is False and (missing or keys[-1] == "activate"):
            source.remark(keys, "not active", covered=True)
        elif missing:
            source.remark(keys, missing)
        else:
            meaning = instead or "unknown to this translation; see whether it matters"
            source.remark(keys, meaning, covered=instead is not None)
    remarks = sorted(set(source.remarks), key=lambda remark: (remark.line, remark.key))
    made = {key: value for key, value in experiment.items() if value not in ({}, [])}
    return Translation(made, tuple(remarks), metadata, arguments)


def written(translation: Translation, path: Path) -> str:
    """Return the experiment as YAML text: a key of a section on a line of its own, and what is below it beside it."""
    short = {key: f"{key}: {_flow(value)}" for key, value in translation.experiment.items()}
    for width in (_WIDTH, 10**9):  # the second time what does not fit stays on its line
        parts = {key: [line] for key, line in short.items()}
        for key, value in translation.experiment.items():
            if isinstance(value, dict) and len(str(value)) > 100:
                parts[key] = [f"{key}:", *(line for name, part in value.items() for line in _inside(name, part, width))]
        for key in sorted(short, key=lambda key: len(short[key])):  # short sections make room for long ones
            if sum(map(len, parts.values())) >= _LINES and len(short[key]) <= width:
                parts[key] = [short[key]]
        lines = [f"# Translated from CREDIT's {path.name} by `credit-like import-credit`.", *chain(*parts.values())]
        if len(lines) <= _LINES:
            break
    return "\n".join(lines) + "\n"


def _inside(name: str, value: Any, width: int) -> Iterator[str]:
    """Yield the lines of a key of a section; what does not fit on one has a line for each of its parts."""
    line = f"  {name}: {_flow(value)}"
    if len(line) <= width or not value or (isinstance(value, list) and not isinstance(value[0], dict)):
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


def _second_generation(source: Document, functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
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
            periods[name] = [[_time(time) for time in span] for span in spans[:-1]] + [periods[name]]
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


def _first_generation(source: Document, functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
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
    train = (_time(train[0]), _time(train[1]))
    if valid is None:
        last = dt.datetime.fromisoformat(train[1]).year
        valid = (f"{last}-01-01", train[1])
        earlier = before(valid[0])
        key: Keys = ("data", "end_datetime") if source.get("data", "end_datetime") else ("data", "train_years")
        source.remark(key, f"no validation period is given: {last} is taken for it, and training ends with {last - 1}")
        train = (train[0], earlier)
    valid = (_time(valid[0]), _time(valid[1]))
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
        made: dict[str, Any] = {"type": kind, "path": _variables_of_the_shell(path)}
        if path.startswith("gs://"):
            made["storage_options"] = {"token": "anon"}
        found.setdefault(path.replace("*", ""), made)
    if not found:
        raise UserError("expected paths of CREDIT's data, got none; is the source read from the network?")
    listed = list(found.values())
    return listed[0] if len(listed) == 1 else listed


# ---- model, loss, corrections ----------------------------------------------------------------------------------------


def _model(
    source: Document, upsample: str | None, variables: Variables, of_weights: bool
) -> tuple[dict[str, Any], ModelArguments | None]:
    """Return the `model` section and, of a model of CREDIT's that is here, its arguments.

    Raises UserError for another architecture with weights, or arguments that do not convert.
    """
    from credit_like.checkpoint.credit import ARGUMENTS, NO_EFFECT, TYPES, convert_model_args, model_block

    if not isinstance(source.values.get("model"), dict):
        height, width = _grid(source)
        source.absent("model", "there is no model section: the default WXFormer, padded to fit the grid, is taken")
        return _fitting(height, width), None
    kind = source.get("model", "type", default="wxformer")
    if kind in _WITH_NOISE and not of_weights:
        noise = _noise(source)
        block = model_block({**source.values, "model": {**source.values["model"], "type": "wxformer"}})
        block = {key: value for key, value in block.items() if key not in _NOISE}
    elif kind not in TYPES and not of_weights:
        return _another(source), None
    else:
        noise, block = {}, model_block(dict(source.values))
    if upsample is None:
        upsample = "pixel_shuffle" if block.get("upsample_with_ps") else "transpose"
        if "upsample_with_ps" not in block:
            source.absent(
                "model.upsample_with_ps", "the decoder of the published weights, `upsample: transpose`, is taken",
                source.lines.get(("model",), 1),
            )  # fmt: skip
    if block.get("frame_patch_size", 1) != 1:
        source.remark(("model", "frame_patch_size"), "not translated: every frame is embedded with all others")
    for key in set(block) & NO_EFFECT - {"upsample_with_ps", "pretrained_weights", "frame_patch_size"}:
        if block[key]:
            source.remark(("model", key), "not part of this architecture")
    if block.get("pretrained_weights") and not noise:
        source.remark(("model", "pretrained_weights"), _NOISE["pretrained_weights"])
    for key in set(block) - ARGUMENTS:
        source.remark(("model", key), "CREDIT's model has no argument of this name, and ignores it")
        del block[key]
    block.pop("post_conf", None)
    arguments = convert_model_args(block, upsample=upsample)
    config = arguments.config
    padding = next((key for key in ("padding_conf", "pad_lat") if key in source.section("model")), None)
    for problem in config.check(arguments.height, arguments.width):
        source.remark(("model", padding) if padding else ("model",), f"the sizes do not fit here: {problem}")
    for key in source.values["model"]:
        if key != "post_conf":
            source.get("model", key)
    for ours, theirs, what in (
        (variables.in_channels, arguments.in_channels, "input"), (variables.out_channels, arguments.out_channels, "output"),
    ):  # fmt: skip
        if ours == theirs or "channels" not in source.section("model"):
            continue
        if of_weights:
            raise UserError(
                f"expected data with the {theirs} channels of {what} of the weights, got {ours}; "
                "give their own experiment"
            )
        source.remark(("model", "channels"), f"the data have {ours} channels of {what}, the model's keys say {theirs}")
    if "frames" in source.section("model") and arguments.frames != (
        history := int(source.get("data", "history_len", default=1))
    ):
        source.remark(("model", "frames"), f"the data have {history} input states, as `data.history_len`")
    standard = WXFormer().model_dump(mode="json")
    made = {key: value for key, value in config.model_dump(mode="json").items() if value != standard[key]}
    return {"type": "wxformer", **made, "predict": "state", **noise}, arguments


def _noise(source: Document) -> dict[str, Any]:
    """Return the noise in place of CREDIT's, whose layers are others and are in the encoder too."""
    source.remark(
        ("model", "type"),
        "the noise is `model.noise`, in the decoder; compare its `channels` and `scales` with the keys below",
    )
    for key in _NOISE:
        if key in source.section("model"):
            source.remark(("model", key), _NOISE[key])
    return {"noise": {"type": "decoder"}}


def _another(source: Document) -> dict[str, Any]:
    """Return the default WXFormer in place of an architecture that is not here. Raises UserError if it does not fit the grid."""
    section = source.section("model")
    sizes = [source.get("model", key) for key in ("image_height", "image_width")]
    height, width = (int(size) for size in sizes) if all(sizes) else _grid(source)
    source.remark(
        ("model", "type"),
        "there is no such architecture: the default WXFormer, padded to fit the grid, is taken in its place",
    )
    for key in section:
        if key not in ("type", "post_conf", "image_height", "image_width"):
            source.remark(("model", key), "of the other architecture, or follows from the data", covered=True)
    return _fitting(height, width)


def _grid(source: Document) -> tuple[int, int]:
    """Return (rows, columns) according to the sources. Raises UserError if none has them."""
    for name, section in source.values["data"].get("source", {}).items():
        match = re.fullmatch(r"(\d+)x(\d+)", str(section.get("resolution", "")))
        if match:
            source.get("data", "source", name, "resolution")
            return int(match[2]), int(match[1])
    raise UserError(
        "expected a `model` section with image_height and image_width, or the resolution of a source, got neither; add one"
    )


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
    by_variable = isinstance(source.get("loss", "args"), dict)
    at: Keys = ("loss", "args") if by_variable else ("loss",)
    source.read.discard(("loss", "args"))
    kind = str(source.get(*at, "training_loss", default=source.get("loss", "type") or "mse"))
    kind = "mse" if kind == "base" else kind
    parameters: Keys = (*at, "base_loss_parameters" if by_variable else "training_loss_parameters")
    weighted = source.get(*at, "use_variable_weights", default=by_variable)
    made: dict[str, Any] = {"type": _LOSSES.get(kind, "mse"), "scale": "state"}
    if kind == "huber" and (delta := source.get(*parameters, "delta")) is not None:
        made["delta"] = float(delta)
    elif kind in _SCORES and int(source.get("trainer", "ensemble_size", default=1)) < 2:
        made["type"] = "mae"
        source.remark(
            (*at, "training_loss"), "of one member it is the mean absolute error, which is taken; see `trainer.members`"
        )
        source.get(*parameters)
    elif kind in _SCORES:
        made |= {"type": "crps", "alpha": 1.0}
        if source.get(*parameters, "biased"):
            made["alpha"] = 0.0
        if (alpha := source.get(*parameters, "alpha")) is not None:
            made["alpha"] = float(alpha)
    elif kind not in _LOSSES:
        place: Keys = (*at, "training_loss") if "training_loss" in source.section(*at) else ("loss", "type")
        source.remark(place, "not translated: the mean squared error is taken")
    # CREDIT's loss by variable weights rows only if told to.
    if not source.get(*at, "use_latitude_weights", default=not by_variable):
        made["latitude_weights"] = False
    for key in ("validation_loss", "validation_loss_parameters"):
        if source.get(*at, key):
            source.remark((*at, key), "validations use the loss of training; `trainer.monitor` scores short forecasts")
    for key, used, meaning in (
        ("use_power_loss", bool, "not translated: there is no power loss"),
        ("use_spectral_loss", bool, "not translated: choose `loss: {type: sum, …}` with a term `spectral`"),
        ("spectral_lambda_reg", bool, "the `weight` of such a term"),
        ("spectral_wavenum_init", bool, "a term `spectral` compares all wavenumbers"),
        ("include_computed_diagnostics", bool, "not translated: the loss is that of the predicted variables"),
        ("normalize_weights", _is_false, "weights are divided by their sum"),
    ):
        if used(value := source.get(*at, key)):
            source.remark((*at, key), meaning, covered=key == "normalize_weights")
        elif value is not None and key.startswith("use_"):
            for part in ("spectral_lambda_reg", "spectral_wavenum_init"):
                source.get(*at, part)
    weighting = source.get(*at, "var_weighting", default="inverse_variance" if by_variable else None)
    if weighting == "inverse_variance":
        if source.section("loss", "args").get("var_weighting"):
            source.remark(
                (*at, "var_weighting"), "errors are divided by the standard deviation of each variable", covered=True
            )
    elif weighting and weighting != "manual":
        source.remark(
            (*at, "var_weighting"), "errors are divided by the standard deviation of each variable; see `variable_weights`"
        )  # fmt: skip
    if source.get(*at, "scaler_path"):
        source.remark((*at, "scaler_path"), "errors are divided by the numbers of the statistics", covered=True)
    weights = source.get(*at, "variable_weights", default={})
    if isinstance(weights, Mapping) and weights:
        if weighted:
            made["variable_weights"] = {name.rpartition("/")[2]: _weight(value) for name, value in weights.items()}
        else:
            source.remark((*at, "variable_weights"), "not used, as in CREDIT", covered=True)
    return made


def _is_false(value: Any) -> bool:
    return value is False


def _weight(value: Any) -> Any:
    """Return the weight of a variable: one number, or one for each level unless these are the same."""
    values = [float(each) for each in (value if isinstance(value, list) else [value])]
    return values if len(set(values)) > 1 else values[0]


# ---- training, forecasts, jobs ---------------------------------------------------------------------------------------


def _trainer(
    source: Document, model: dict[str, Any], loss: Mapping[str, Any], of_weights: bool = False
) -> dict[str, Any]:
    """Return the `trainer` section; members of an ensemble need a model with noise."""

    def get(key: str, default: Any = None) -> Any:
        return source.get("trainer", key, default=default)

    if get("type") not in (None, *_TRAINERS):
        source.remark(("trainer", "type"), "not translated: there is one trainer, of states from one time to the next")
    batch, accumulate = int(get("train_batch_size", 1)), int(get("grad_accum_every", 1))
    layout, replicas = _layout(source)
    made: dict[str, Any] = {
        "parallelism": layout,
        "global_batch_size": replicas * batch * accumulate,
        "micro_batch_size": batch,
        "epochs": int(get("epochs", 1)),
    }
    if (members := int(get("ensemble_size", 1))) > 1:
        if loss["type"] == "crps":
            made["members"] = members
            model.setdefault("noise", {"type": "decoder"})
            meaning = "members of `trainer.members` differ by the noise of `model.noise`, which is new"
        else:
            meaning = "not translated: members need a loss of ensembles such as `crps`"
        source.remark(("trainer", "ensemble_size"), meaning)
    for theirs, ours in (("batches_per_epoch", "batches_per_epoch"), ("valid_batches_per_epoch", "valid_batches")):
        if get(theirs):
            made[ours] = int(get(theirs))
    for theirs, ours in (
        ("amp", "amp"), ("activation_checkpoint", "activation_checkpoint"), ("cpu_offload", "fsdp2_cpu_offload"),
        ("compile", "compile"), ("use_ema", "use_ema"),
    ):  # fmt: skip
        if get(theirs):
            made[ours] = True
    if (decay := get("ema_decay")) and get("use_ema"):
        made["ema_decay"] = float(decay)
    made["optimizer"] = {"type": "adamw", "learning_rate": float(get("learning_rate", 1e-3))}
    if get("weight_decay"):
        made["optimizer"]["weight_decay"] = float(get("weight_decay"))
    made["scheduler"] = _scheduler(source, made)
    clip = get("grad_max_norm", 0.0)
    if clip == "dynamic":
        source.remark(("trainer", "grad_max_norm"), "clipped to a norm of 1, the default; there is no dynamic norm")
    elif float(clip) != 1.0:
        made["grad_max_norm"] = float(clip) or None
    if get("skip_validation"):
        source.remark(
            ("trainer", "skip_validation"), "every epoch ends with a validation; `valid_batches: 1` makes it short"
        )
    elif (patience := int(get("stopping_patience", _WHOLE_RUN))) < min(_WHOLE_RUN, made["epochs"]):
        made["early_stopping"] = {"patience": max(patience, 1)}
    loader = {"num_workers": int(get("thread_workers", 0)), "prefetch_factor": int(get("prefetch_factor", 2))}
    made["loader"] = {
        key: value for key, value in loader.items() if value != {"num_workers": 0, "prefetch_factor": 2}[key]
    }
    if get("load_weights") and not of_weights:
        source.remark(("trainer", "load_weights"), "give the weights as `import-credit CONFIG --weights FILE`")
    return {key: value for key, value in made.items() if value != {}}


def _layout(source: Document) -> tuple[dict[str, Any], int]:
    """Return `trainer.parallelism`, and the number of replicas of the model on the ranks of the job."""
    mode, given = source.get("trainer", "mode", default="none"), source.get("trainer", "parallelism")
    if given:
        layout = {"data": "none", **given}
        if "mode" in source.section("trainer"):
            source.remark(("trainer", "mode"), "`trainer.parallelism` says it", covered=True)
    else:
        domain = int(source.get("trainer", "domain_parallel_size", default=1))
        layout = {"data": str(mode), **_MODES.get(str(mode), {}), "domain": domain}
    layout = {key: value for key, value in layout.items() if key == "data" or value != 1}
    conf = source.section("pbs") or source.section("slurm")
    ranks = int(conf.get("nodes") or 1) * int(conf.get("ngpus") or 1)
    shared = int(layout.get("tensor", 1)) * int(layout.get("domain", 1))
    return layout, 1 if layout["data"] == "none" else max(ranks // shared, 1)


def _scheduler(source: Document, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule of the learning rate; those of CREDIT by epoch become smooth in steps."""
    at: Keys = ("trainer", "scheduler")

    def get(key: str, default: Any = None) -> Any:
        return source.get(*at, key, default=default)

    conf = source.section(*at)
    if not source.get("trainer", "use_scheduler", default=bool(conf)):
        if conf:
            source.remark(at, "not used, as in CREDIT", covered=True)
        return {"type": "constant"}
    kind, epochs, per_epoch = get("scheduler_type", ""), trainer["epochs"], trainer.get("batches_per_epoch", 0)
    get("last_epoch")
    if kind == "linear-warmup-cosine":
        made = {"warmup_steps": int(get("warmup_steps", 1000)), "min_lr": float(get("min_lr", 1e-5))}
        return {"type": kind, **made, "total_steps": int(get("total_steps", 500_000))}
    if kind == "cosine-annealing":
        low, length = float(get("eta_min", 0.0)), int(get("T_max", epochs))
        made = {"min_lr": low} if low else {}
        if length > epochs and per_epoch:
            made["total_steps"] = length * per_epoch
        elif length != epochs:
            source.remark((*at, "T_max"), f"one cosine over the {epochs} epochs of the run is taken instead")
        return {"type": "linear-warmup-cosine", **made}
    if kind == "lambda":
        if not per_epoch:
            source.remark(
                at, "10 epochs of 100 of warm-up, then a cosine: set `warmup_steps`, which counts optimiser steps"
            )
            return {"type": "linear-warmup-cosine"}
        return {"type": "linear-warmup-cosine", "warmup_steps": 10 * per_epoch, "total_steps": 100 * per_epoch}
    if kind == "plateau":
        for key, value in (("mode", "min"), ("threshold_mode", "rel")):
            if get(key, value) != value:
                source.remark((*at, key), "the validation loss is to fall, by a fraction")
        # CREDIT reduces the rate after more validations than its patience.
        made = {"factor": float(get("factor", 0.1)), "patience": int(get("patience", 10)) + 1}
        made |= {"min_change": float(get("threshold", 1e-4)), "min_lr": float(get("min_lr", 0.0))}
        return {"type": "plateau", **made}
    if kind == "cosine-annealing-restarts":
        warmup, factor = int(get("warmup_steps", 0)), float(get("cycle_mult", 1.0))
        if "max_lr" in conf:
            trainer["optimizer"]["learning_rate"] = float(get("max_lr"))
            if "learning_rate" in source.section("trainer"):
                source.remark(("trainer", "learning_rate"), "the schedule has its own, as in CREDIT", covered=True)
        made = {
            "warmup_steps": warmup,
            "period": int(get("first_cycle_steps")) - warmup,
            "factor": max(round(factor), 1),
        }
        if warmup or float(get("gamma", 1.0)) != 1 or factor != round(factor):
            source.remark(
                at, "compare: here the first cycle alone has a warm-up, all reach the full rate, and the factor is whole"
            )  # fmt: skip
        return {"type": "cosine-restarts", **made, "min_lr": float(get("min_lr", 1e-3))}
    source.remark(at, "not translated: the learning rate stays constant")
    return {"type": "constant"}


def _inference(source: Document, data: dict[str, Any]) -> dict[str, Any]:
    """Return the `inference` section, and put its times into the test period of `data`."""
    derive = blocks.derived(source, data)
    further: dict[str, Any] = {"derive": derive} if derive else {}
    if (at_once := int(source.get("predict", "batch_size", default=1))) > 1:
        further["batch_size"] = at_once
    members = int(source.get("predict", "ensemble_size", default=1))
    if members > 1:
        source.remark(("predict", "ensemble_size"), "not translated: see `inference.ensemble`, how its members differ")
    for keys in (("inference", "mode"), ("predict", "mode")):
        if source.get(*keys) is not None:
            source.remark(keys, "forecasts are shared among the ranks of the job", covered=True)
    times = _initial_times(source, parse_duration(str(data["timestep"])))
    output = _output(source)
    if times is None:
        return further | ({"output": output} if output else {})
    init, lead = times
    first, last = init[0], init[1] if len(init) > 1 else init[0]
    end = dt.datetime.fromisoformat(last) + _length(lead)
    data["test"] = [first, end.strftime("%Y-%m-%dT%H")]
    return {"init": init, "lead": lead, "output": output or {"format": "netcdf"}, **further}


def _initial_times(source: Document, step: dt.timedelta) -> tuple[list[str], str] | None:
    """Return `init` and `lead` of the forecasts of either generation, or None without any."""
    listed = source.values.get("predict", {}).get("forecasts")
    if isinstance(listed, list):
        source.get("predict", "forecasts")
        pairs = [(dt.datetime.fromisoformat(str(a)), dt.datetime.fromisoformat(str(b))) for a, b in listed]
        leads = sorted({b - a + step for a, b in pairs})
        if len(leads) > 1:
            source.remark(("predict", "forecasts"), "their lengths differ: the longest is taken")
        return [a.strftime("%Y-%m-%dT%H") for a, _ in pairs], f"{int(leads[-1].total_seconds() // 3600)}h"
    if (old := source.section("predict", "forecasts")) and old.get("start_year"):
        return _of_days(source)
    mode = source.get("inference", "run_mode")
    single = source.section("inference", "single_forecast")
    if single and (mode == "single" or not source.section("inference", "batch_forecast")):
        source.get("inference", "single_forecast")
        if source.section("inference", "batch_forecast"):
            source.remark(("inference", "batch_forecast"), "not used, as in CREDIT: `run_mode` is single", covered=True)
        return [_time(str(single["start_datetime"]))], _lead(source, "single_forecast", single)
    if single:
        source.remark(
            ("inference", "single_forecast"), "the command is `credit-like rollout --init TIME`", covered=True
        )
    new = source.section("inference", "batch_forecast")
    if not new:
        return None
    for key in ("forecast_length", "first_init_date", "last_init_date", "init_interval"):
        source.get("inference", "batch_forecast", key)
    interval = str(new.get("init_interval", "12h"))
    return [
        _time(str(new["first_init_date"])), _time(str(new["last_init_date"])), interval
    ], _lead(source, "batch_forecast", new)  # fmt: skip


def _of_days(source: Document) -> tuple[list[str], str]:
    """Return `init` and `lead` of forecasts that start at the same hours of successive days."""
    at: Keys = ("predict", "forecasts")

    def get(key: str, default: Any) -> Any:
        return source.get(*at, key, default=default)

    if (kind := get("type", "custom")) not in ("custom", "10day_year"):
        source.remark((*at, "type"), "unknown: the days and hours below it are taken")
    of_a_year = kind == "10day_year"
    first = dt.datetime(get("start_year", 2020), get("start_month", 1), get("start_day", 1))
    hours = sorted(get("start_hours", [0]))
    duration, apart = (365 if of_a_year else int(get("duration", 365))), int(get("ic_interval_days", 1))
    lead = f"{10 if of_a_year else int(get('days', 10))}d"
    days = range(0, duration // apart * apart, apart)
    between = {b - a for a, b in zip(hours, [*hours[1:], hours[0] + 24 * apart], strict=True)}
    begin, last = first + dt.timedelta(hours=hours[0]), first + dt.timedelta(days=days[-1], hours=hours[-1])
    if len(between) == 1:
        return [begin.strftime("%Y-%m-%dT%H"), last.strftime("%Y-%m-%dT%H"), f"{min(between)}h"], lead
    times = [first + dt.timedelta(days=day, hours=hour) for day in days for hour in hours]
    if len(times) > 64:
        source.remark(
            at, "initial times are not regular: those of the first hour are taken; list all in `inference.init`"
        )
        last = begin + dt.timedelta(days=days[-1])
        return [begin.strftime("%Y-%m-%dT%H"), last.strftime("%Y-%m-%dT%H"), f"{24 * apart}h"], lead
    return [time.strftime("%Y-%m-%dT%H") for time in times], lead


def _output(source: Document) -> dict[str, Any]:
    """Return `inference.output`: format, variables, levels, leads and compression."""
    at: Keys = ("inference", "output")
    conf = source.section("inference", "output")
    if named := source.get("predict", "save_vars"):
        return {"format": "netcdf", "variables": list(named)}
    if not conf:
        return {}
    form = str(source.get(*at, "format", default="netcdf"))
    if form not in ("netcdf", "zarr"):
        source.remark((*at, "format"), "netCDF is taken")
        form = "netcdf"
    made: dict[str, Any] = {"format": form}
    if listed := source.get(*at, "variables"):
        named = [entry if isinstance(entry, dict) else {"name": entry} for entry in listed]
        made["variables"] = [str(entry["name"]).rpartition("/")[2] for entry in named]
        levels = [tuple(entry["levels"]) for entry in named if entry.get("levels")]
        if levels:
            made["levels"] = sorted({float(level) for group in levels for level in group})
        if len(set(levels)) > 1:
            source.remark((*at, "variables"), "levels differ between variables: all of them are written of each")
    if interval := source.get(*at, "output_interval"):
        source.remark(
            (*at, "output_interval"), f"not translated: list the leads in `inference.output.leads` ({interval})"
        )
    encoding = source.section("inference", "output", "encoding")
    if source.get(*at, "encoding", "zlib", default=False) and form == "netcdf":
        made["compression"] = int(source.get(*at, "encoding", "complevel", default=4))
    elif encoding:
        source.get(*at, "encoding", "complevel")
        if form == "zarr":
            source.remark((*at, "encoding"), "zarr compresses as its writer does", covered=True)
    if source.get(*at, "encoding", "dtype", default="float32") != "float32":
        source.remark((*at, "encoding", "dtype"), "fields are written as float32")
    return made


def _lead(source: Document, name: str, conf: Mapping[str, Any]) -> str:
    """Return a lead time in days or hours; CREDIT also counts in months and years."""
    match = re.fullmatch(r"(\d+)\s*([hdmy])", str(conf.get("forecast_length", "10d")).strip())
    if not match:
        source.remark(("inference", name), "the length of the forecasts is not understood: 10d is taken")
        return "10d"
    days = {"m": 30, "y": 365}.get(match[2])
    return f"{int(match[1]) * days}d" if days else f"{match[1]}{match[2]}"


def _length(lead: str) -> dt.timedelta:
    number = int(lead[:-1])
    return dt.timedelta(days=number) if lead.endswith("d") else dt.timedelta(hours=number)


def _batch_system(source: Document) -> dict[str, Any]:
    """Return the `site` to include and the `pbs` section, from CREDIT's section for PBS or for Slurm."""
    section = "pbs" if source.section("pbs") else "slurm"
    conf = source.section(section)
    if not conf:
        return {}

    def get(*names: str) -> Any:
        return next((value for name in names if (value := source.get(section, name)) is not None), None)

    made: dict[str, Any] = {}
    for theirs, ours in (
        (("project", "account"), "account"), (("nodes",), "nodes"), (("ngpus",), "ngpus"), (("walltime",), "walltime"),
    ):  # fmt: skip
        if (value := get(*theirs)) is not None:
            made[ours] = _with_hours(value) if ours == "walltime" else value
    queue = str(get("queue", "partition", "qos") or "")
    short = queue.split("@")[0]
    if section == "slurm":
        nersc = bool(constraint := get("constraint")) or get("cluster") == "perlmutter"
        if constraint not in (None, "gpu"):
            source.remark((section, "constraint"), "not translated: nodes are asked for by number of GPUs alone")
        site = "perlmutter" if nersc else "generic-slurm"
    else:
        site = "casper" if short in _CASPER else "derecho" if short in _DERECHO else "generic-pbs"
    if site == "casper" and short != "casper":
        source.remark((section, "queue"), "jobs go to `casper@casper-pbs`, which finds the nodes")
    elif queue and site != "casper":
        made["queue"] = queue if site == "generic-pbs" else short
    if gpu := get("gpu_type"):
        if site == "casper":
            made["fields"] = {"gpu_type": gpu}
        else:
            source.remark((section, "gpu_type"), "a node of the queue has its own kind of GPU")
    setup = [f"module load {name}" for name in _listed(get("modules"))]
    setup += _listed(get("env_setup"))
    if env := get("conda"):
        setup.append(f"conda activate {env}")
    if setup:
        made["setup"] = setup
    whole = site in ("derecho", "perlmutter")
    for key, ours in (("ncpus", "cpus"), ("mem", "memory_gb")):
        if (value := get(key)) is None:
            continue
        number = re.match(r"\d+", str(value))
        if whole or number is None or (key == "mem" and not str(value).upper().endswith(("GB", "G"))):
            source.remark((section, key), "jobs get the share of the node that comes with their GPUs", covered=whole)
        else:
            made[ours] = int(number[0])
    return {"site": site, "pbs": made}


def _with_hours(walltime: Any) -> Any:
    """Return a walltime with hours where Slurm's has days before them."""
    match = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", str(walltime))
    if match is None:
        return walltime
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return f"{24 * days + hours:02d}:{minutes:02d}:{seconds:02d}"


def _listed(value: Any) -> list[str]:
    return [] if value is None else [str(each) for each in (value if isinstance(value, list) else [value])]


def _variables_of_the_shell(text: str) -> str:
    """Return a path with `$USER` as `${USER}`."""
    return re.sub(r"\$([A-Za-z_]\w*)", r"${\1}", text)


def run(path: Path, weights: Path | None, output: Path) -> Translation:
    """Write the translation of an experiment, and of its weights beside it; return what was written.

    Nothing is written before everything that can be refused has been. Raises UserError as `translate` does, if the
    output exists, or if the weights do not fit the model.
    """
    from credit_like.checkpoint.credit import check_output, decoder_of, read_checkpoint, write_weights
    from credit_like.checkpoint.files import replace_file

    check_new("--output", output)
    converted = output.with_suffix(".safetensors")
    if weights:
        check_output(weights, converted)
    state = read_checkpoint(weights) if weights else {}
    translation = translate(path, decoder_of(state) if weights else None, (weights, converted) if weights else None)
    if weights:
        if translation.arguments is None:
            raise UserError(f"{path}: expected the `model` section of the weights, got none; give their own experiment")
        write_weights(state, translation.arguments, converted, translation.metadata)
    output.parent.mkdir(parents=True, exist_ok=True)
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
