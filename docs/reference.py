"""Make the page of all keys and the table of all metrics from the code: `python docs/reference.py` prints the former.

Descriptions, types, limits and defaults are those of the sections themselves (`credit_like.schema` and the `Config` of
each plug-in). Units and examples that do not follow from a type or a default are given here.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from credit_like import registry
from credit_like.schema.base import Section
from credit_like.schema.experiment import Experiment

PLACES = {
    "source": "data.source",
    "model": "model",
    "loss": "loss",
    "physics": "physics",
    "optimizer": "trainer.optimizer",
    "scheduler": "trainer.scheduler",
    "writer": "inference.output",
}
"""Kind of plug-in → the key that chooses one."""

_UNITS = {
    "optimiser steps": "batches_per_epoch valid_every decay_steps total_steps warmup_steps period",
    "time steps": "history_len forecast_len backprop_steps steps",
    "epochs": "epochs after_epochs",
    "validations": "patience",
    "samples": "global_batch_size micro_batch_size",
    "micro-batches": "prefetch_factor",
    "global batches": "valid_batches",
    "forecasts": "batch_size",
    "ranks": "tensor domain ensemble",
    "copies of the model": "replicate",
    "members": "members",
    "threads": "threads",
    "processes": "num_workers processes",
    "nodes": "min_nodes max_nodes nodes walltime_up_to",
    "GPUs": "gpus ngpus",
    "CPUs": "cpus",
    "GB": "memory_gb",
    "MiB": "chunk_mib",
    "km": "length_scale_km",
    "days": "climatology_window_days",
    "° N": "south north",
    "° E": "west east",
    "°": "degrees",
    "hPa": "pressure_levels",
    "Pa (a), 1 (b), those of `data.levels` (lev)": "model_levels",
    "those of the level coordinate": "levels",
    "standard deviations of the change over a step": "amplitude input_noise",
    "those of the variable": "values minimum maximum",
    "checkpoints": "keep",
    "initial times": "init",
    "resamples": "bootstrap",
    "cycles": "cycles",
    "skipped steps": "max_skipped",
    "bits": "bits_per_value",
    "waves around the globe": "highest lowest",
    "points": "longitudes latitudes cross_embed_kernel_sizes",
    "tokens": "global_window_size local_window_size",
    "rows": "pad_lat",
    "columns": "pad_lon",
    "channels": "dim dim_head head_channels channels",
    "layers": "depth",
    "Pa": "a",
    "Pa per unit of `levels`": "level_pa",
    "units per kg kg⁻¹": "humidity_scale",
    "those of the coordinate": "select",
    "time steps, unless a duration is given": "lead leads",
    "seconds, unless a duration is given": "walltime",
    "bytes, unless a unit is given": "size",
    "kg m⁻² per unit of the variable": "water_scale",
    "1 (a share)": "share quantiles",
    "1 (a probability)": "attn_dropout ff_dropout drop_path",
    "1": "alpha b betas compression correlation cross_embed_strides damping delta ema_decay eps factor grad_max_norm "
    "lead_weights learning_rate level_weights min_change min_lr momentum order phase_weight point_weight rank rate scale scales "
    "seed variable_weights weight weight_decay",
}
UNITS = {key: unit for unit, keys in _UNITS.items() for key in keys.split()} | {
    "InferenceSection.checkpoint": "optimiser steps",
    "MonitorSection.every": "epochs",
    "CheckpointSection.every": "optimiser steps, unless a duration is given",
    "Transform.scale": "those of the variable",
}
"""Key, or class and key → the unit of its numbers; `1` for numbers without one."""

_CLIP: dict[str, Any] = {"type": "clip", "variables": ["specific_humidity"]}
_NETCDF: dict[str, Any] = {"type": "netcdf", "path": "/data/era5_%Y.nc"}
EXAMPLES: dict[str, Any] = {
    "plugins": ["my_parts"],
    "Experiment.name": "my-experiment",
    "save_loc": "runs/my-experiment",
    "Experiment.data": {
        "source": {"type": "zarr", "path": "era5.zarr"}, "timestep": "6h", "prognostic": {"surface": ["t2m"]},
        "train": ["1979-01-01", "2015-12-31T18"], "valid": ["2016-01-01", "2016-12-31T18"],
        "test": ["2017-01-01", "2017-12-31T18"],
    },
    "Experiment.model": {"type": "wxformer", "dim": [32, 64, 128, 256]},
    "start_from": "runs/pretrain",
    "physics": [_CLIP],
    "trainer": {"global_batch_size": 32, "epochs": 20},
    "inference": {"lead": "10d"},
    "evaluation": {"metrics": ["rmse", "acc"]},
    "site": "derecho",
    "pbs": {"account": "NAML0001", "nodes": 8, "ngpus": 4},
    "source": {"type": "zarr", "path": "era5.zarr"},
    "timestep": "6h",
    "levels": [500, 850],
    "prognostic": {"level": ["u", "v"], "surface": ["t2m"]},
    "diagnostic": {"surface": ["precipitation"]},
    "dynamic_forcing": {"surface": [{"name": "insolation", "compute": "solar"}]},
    "static": {"surface": ["orography"]},
    "train": ["1979-01-01", "2015-12-31T18"],
    "valid": ["2016-01-01", "2016-12-31T18"],
    "test": ["2017-01-01", "2017-12-31T18"],
    "DataSection.statistics": "runs/pretrain/statistics.nc",
    "level": ["u", {"name": "temperature", "var": "t"}],
    "Role.surface": ["t2m"],
    "VariableSpec.name": "temperature",
    "var": "t",
    "VariableSpec.path": "/data/precipitation_%Y.nc",
    "compute": "solar",
    "irradiance": "total_solar_irradiance.txt",
    "units": "mm",
    "transform": {"type": "log1p", "scale": 0.1},
    "Period.start": "1979-01-01",
    "Period.end": "2015-12-31T18",
    "StartFrom.path": "runs/pretrain",
    "freeze": ["stages.0.*"],
    "lora": {"rank": 4},
    "LoraConf.alpha": 8,
    "early_stopping": {"patience": 5},
    "backprop_steps": 4,
    "threads": 1,
    "parallelism": {"data": "fsdp2", "domain": 2},
    "Parallelism.domain": [4, 2],
    "fsdp2_mp_policy": {"param_dtype": "bfloat16"},
    "compile": True,
    "phases": [{"epochs": 30}, {"epochs": 4, "forecast_len": 4}],
    "stop_after": "11h",
    "checkpoint": {"every": "30min", "keep": 3},
    "InferenceSection.checkpoint": "best",
    "monitor": {"every": 1, "lead": "2d"},
    "loader": {"num_workers": 4},
    "patience": 5,
    "init": ["2017-01-01", "2017-12-01", "12h"],
    "MonitorSection.init": 4,
    "amp": True,
    "ensemble": {"members": 10, "from": "model"},
    "Parallelism.ensemble": 2,
    "derive": [{"pressure_levels": [850, 500]}, "geopotential"],
    "times": ["2017-01-01", "2017-07-01"],
    "InitialTimes.start": "2017-01-01",
    "InitialTimes.end": "2017-12-01",
    "interval": "12h",
    "amplitude": {"u": 0.5, "v": 0.5},
    "perturbations": {"type": "bred", "cycles": 4},
    "lag": "6h",
    "Derive.fields": ["geopotential"],
    "pressure_levels": [850, 500],
    "truth": _NETCDF,
    "thresholds": {"quantiles": [0.1, 0.9]},
    "regions": {"tropics": {"south": -20, "north": 20}},
    "baselines": {"ifs": "/data/ifs.zarr"},
    "climatology": ["1979-01-01", "2015-12-31T18"],
    "climatology_period": ["1990-01-01", "2015-12-31"],
    "values": {"precipitation": [1.0, 10.0]},
    "quantiles": [0.1, 0.9],
    "south": -20,
    "north": 20,
    "launcher_options": ["--cpu-bind", "none"],
    "directives": ["-A {account}", "-l walltime={walltime}"],
    "SiteSection.nodes": {"gpu": {"cpus": 64, "gpus": 4}},
    "SiteSection.fields": {"storage": {"required": True, "example": "gdata/xy12"}},
    "SiteSection.queues": {"main": {"nodes": ["this"], "max_walltime": "12h"}},
    "modules": ["purge", "load cuda/12.2"],
    "setup": ["conda activate credit"],
    "environment": {"OMP_NUM_THREADS": "1"},
    "memory_gb": 480,
    "request": ["-l select={nodes}:ngpus={gpus}"],
    "Queue.nodes": ["gpu"],
    "max_walltime": "12h",
    "walltime_up_to": {"24": "3h", "99": "6h"},
    "max_nodes": 64,
    "SiteField.default": "home",
    "example": "gdata/xy12+scratch/xy12",
    "queue": "main",
    "processes": 4,
    "cpus": 64,
    "account": "NAML0001",
    "PbsSection.fields": {"storage": "gdata/xy12+scratch/xy12"},
    "preprocess": {"queue": "main", "walltime": "2h"},
    "rollout": {"nodes": 4},
    "evaluate": {"walltime": "2h"},
    "Request.nodes": 4,
    "Request.ngpus": 4,
    "walltime": "12:00:00",
    "FileConfig.path": "/data/era5_%Y.nc",
    "rename": {"T": "temperature"},
    "dims": {"level": "plev"},
    "select": {"number": 0},
    "time_units": "hours since 1990-01-01",
    "calendar": "noleap",
    "regrid": {"degrees": 1.5},
    "region": {"south": 30, "north": 75, "west": -30, "east": 45},
    "storage_options": {"token": "anon"},
    "cache": {"folder": "/scratch/cache", "size": "200GB"},
    "Cache.folder": "/scratch/cache",
    "Cache.size": "200GB",
    "Dims.time": "valid_time",
    "Dims.level": "plev",
    "Dims.latitude": "lat",
    "Dims.longitude": "lon",
    "degrees": 1.5,
    "like": "/data/target.nc",
    "Regrid.weights": "/data/weights.nc",
    "west": -30,
    "east": 45,
    "padding_conf": {"activate": True, "pad_lat": [37, 38], "pad_lon": [12, 12]},
    "head_channels": 64,
    "noise": {"channels": 16},
    "variable_weights": {"temperature": 2},
    "level_weights": {500: 2},
    "lead_weights": [1, 1, 2, 4],
    "Term.loss": {"type": "spectral"},
    "column_water": "total_column_water",
    "a": [0.0, 5000.0, 0.0],
    "b": [0.0, 0.5, 1.0],
    "variables": ["specific_humidity"],
    "winds": ["u", "v"],
    "maximum": 1.0,
    "down": ["toa_incident_solar_radiation"],
    "up": ["outgoing_longwave"],
    "groups": [{"match": "head.*", "learning_rate": 1.0e-4}],
    "match": "head.*",
    "LoraConf.match": ["*.qkv"],
    "Group.learning_rate": 1.0e-4,
    "Group.weight_decay": 0.1,
    "total_steps": 20000,
    "WriterConfig.path": "/scratch/forecasts",
    "leads": [4, "5d"],
}  # fmt: skip
"""Key, or class and key → an example, where none follows from type and default."""

TEXTS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Part:
    """A section of the page: a class of the schema, and where an experiment has it."""

    cls: type[BaseModel]
    places: tuple[str, ...]
    prefix: str = ""
    """Prefix of the anchor, which distinguishes classes of plug-ins with the same name."""
    only: tuple[str, ...] | None = None
    """Keys to show, by default all."""

    @property
    def anchor(self) -> str:
        """Return the anchor of this part in the page."""
        return f"{self.prefix}{self.cls.__name__}"

    def fields(self) -> Iterator[tuple[str, FieldInfo]]:
        """Yield the keys, as a file spells them, with their fields; without the `type` that chooses a plug-in."""
        for name, field in self.cls.model_fields.items():
            literal = typing.get_origin(field.annotation) is typing.Literal
            if literal and name == "type" and len(typing.get_args(field.annotation)) == 1:
                continue
            if self.only is None or name in self.only:
                yield field.alias or name, field


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a type is made of."""
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from sections_in(argument)


def _walk(cls: type[BaseModel], place: str, found: dict[type[BaseModel], list[str]]) -> None:
    known = cls in found
    found.setdefault(cls, []).append(place)
    for name, field in cls.model_fields.items() if not known else ():
        for section in sections_in(field.annotation):
            _walk(section, f"{place}.{field.alias or name}".lstrip("."), found)


def core() -> list[Part]:
    """Return the sections that every experiment has."""
    found: dict[type[BaseModel], list[str]] = {}
    _walk(Experiment, "", found)
    return [Part(cls, tuple(places)) for cls, places in found.items()]


def plugins(kind: str) -> list[Part]:
    """Return the keys that the plug-ins of a kind have in common, and those of each of them."""
    configs = {name: registry.module(kind, name).Config for name in registry.names(kind)}
    bases = [base for config in configs.values() for base in config.__mro__[1:] if issubclass(base, Section)]
    shared = [base for base in dict.fromkeys(bases) if base is not Section and base.model_fields]
    parts = [Part(base, (), f"{kind}.", tuple(base.__annotations__)) for base in shared]
    for base in shared:
        parts += _nested(base, PLACES[kind], f"{kind}.")
    for name, config in configs.items():
        inherited = {key for base in config.__mro__[1:] if base in shared for key in base.__annotations__}
        own = tuple(key for key in config.model_fields if key not in inherited or key in config.__annotations__)
        parts.append(Part(config, (f"{PLACES[kind]}: {{type: {name}}}",), f"{kind}.{name}.", own))
        parts += [part for part in _nested(config, PLACES[kind], f"{kind}.{name}.") if part.cls not in _classes(parts)]
    return parts


def _classes(parts: list[Part]) -> list[type[BaseModel]]:
    return [part.cls for part in parts]


def _nested(cls: type[BaseModel], place: str, prefix: str) -> list[Part]:
    found: dict[type[BaseModel], list[str]] = {}
    _walk(cls, place, found)
    return [Part(inner, tuple(places), prefix) for inner, places in found.items() if inner is not cls]


def properties(part: Part) -> dict[str, Any]:
    """Return the JSON Schema of each key of a part."""
    schema = part.cls.model_json_schema(by_alias=True, ref_template="{model}")
    while "properties" not in schema:
        schema = schema["anyOf"][-1] if "anyOf" in schema else schema["$defs"][schema["$ref"]]
    found: dict[str, Any] = schema["properties"]
    return found


def shown_type(schema: dict[str, Any], anchors: dict[str, str]) -> str:
    """Return the type of a key in words, with its limits and with links to sections."""
    if "$ref" in schema:
        return f"[section](#{anchors[schema['$ref']]})" if schema["$ref"] in anchors else "section"
    if "x-plugin" in schema:
        return f"[{schema['x-plugin']}](#{schema['x-plugin']})"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = [shown_type(one, anchors) for one in schema[several] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    kind = schema.get("x-is", schema.get("type", "any value"))
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})]
        number = f"{len(items)} " if "prefixItems" in schema else ""
        return f"list of {number}{_plural(shown_type(items[0], anchors))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"mapping of names to {_plural(shown_type(inner, anchors))}" if isinstance(inner, dict) else "mapping"
    limits = [f"{sign} {schema[key]:g}" for key, sign in LIMITS.items() if key in schema]
    return " ".join([TEXTS.get(kind, kind), ", ".join(limits)]).strip()


def _plural(kind: str) -> str:
    """Return the type of the items of a list or mapping in the plural."""
    return re.sub(r"(^|\bor )(\[?)(whole number|number|text|section|list|mapping|duration|time)\b", r"\1\2\3s", kind)


def default_of(part: Part, field: FieldInfo) -> Any:
    """Return the default of a key as plain data; PydanticUndefined if it has none."""
    value = field.get_default(call_default_factory=True)
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "total_seconds"):
        from credit_like.schema.base import format_duration

        return format_duration(value)
    return str(value) if hasattr(value, "isoformat") else value


def in_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("...").strip()


def lookup(table: dict[str, Any], part: Part, key: str) -> Any:
    """Return what a table says of a key, by its class or for any class; None if nothing."""
    return table.get(f"{part.cls.__name__}.{key}", table.get(key))


def example_of(part: Part, key: str, field: FieldInfo, schema: dict[str, Any]) -> Any:
    """Return an example of a key's value; None if there is none."""
    given = lookup(EXAMPLES, part, key)
    if given is not None:
        return given
    default = default_of(part, field)
    choices = [value for one in (schema, *schema.get("anyOf", ())) for value in one.get("enum", [one.get("const")])]
    choices = [choice for choice in choices if choice is not None]
    if choices:
        return next((choice for choice in choices if choice != default), choices[0])
    if isinstance(default, bool):
        return not default
    if default is PydanticUndefined or default in (None, [], {}, ""):
        return None
    return default


def has_numbers(schema: dict[str, Any]) -> bool:
    """Return whether a key holds numbers, by themselves or in lists and mappings."""
    if schema.get("type") in ("integer", "number"):
        return True
    inner = [
        *schema.get("anyOf", ()),
        *schema.get("prefixItems", ()),
        schema.get("items"),
        schema.get("additionalProperties"),
    ]
    return any(has_numbers(one) for one in inner if isinstance(one, dict))


def problems(part: Part, key: str, value: Any) -> list[str]:
    """Return what is wrong with a value of a key, given alone in its section."""
    try:
        part.cls.model_validate({key: value})
    except ValidationError as error:
        return [item["msg"] for item in error.errors() if item["loc"][:1] == (key,)]
    return []


def table(part: Part, anchors: dict[str, str]) -> list[str]:
    """Return the lines of the table of a part's keys."""
    lines = ["| key | type, default, unit | meaning, example |", "|---|---|---|"]
    schemas = properties(part)
    for key, field in part.fields():
        schema, default = schemas[key], default_of(part, field)
        kind = [shown_type(schema, anchors)]
        if default is PydanticUndefined:
            kind.append("required")
        elif default is not None:
            kind.append(f"default `{in_yaml(default)}`")
        unit = lookup(UNITS, part, key) if has_numbers(schema) else None
        if unit not in (None, "1"):
            kind.append(f"unit: {unit}")
        meaning = [" ".join((field.description or "").split())]
        example = example_of(part, key, field, schema)
        if example is not None:
            meaning.append(f"`{key}: {in_yaml(example)}`")
        cells = [f"`{key}`", "<br>".join(kind), "<br>".join(meaning)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def heading(part: Part) -> str:
    """Return the title of a part: where an experiment has it."""
    if not part.places:
        return "Keys that all of them share"
    places = [place or "The file" for place in part.places]
    shown = [place if place == "The file" else f"`{place}`" for place in places[:4]]
    return ", ".join(shown) + (", …" if len(places) > 4 else "")


def _lines(part: Part, anchors: dict[str, str], level: str) -> Iterator[str]:
    yield f"{level} {heading(part)} {{#{part.anchor}}}"
    yield ""
    summary = part.cls.__doc__
    if part.anchor.endswith(".Config"):
        module = inspect.getmodule(part.cls)
        summary = module.__doc__ if module else summary
    if summary:
        yield from (inspect.cleandoc(summary).split("\n\n")[0], "")
    if list(part.fields()):
        yield from (*table(part, anchors), "")
    else:
        yield from ("It has no further keys.", "")


def parts() -> list[Part]:
    """Return all parts of the page in their order."""
    return [*core(), *(part for kind in PLACES for part in plugins(kind))]


def markdown() -> str:
    """Return the page of all keys."""
    lines = [
        "# Every key of an experiment file",
        "",
        "This page is generated from the schema that `credit-like check` uses; `credit-like schema` prints it as a JSON Schema for",
        "editors. A key without a default that is not marked as required may be left out. Durations are `90s`, `30min`, `6h`,",
        "`10d` or `12:00:00`. [Experiment files](experiment-files.md) describes how files are read and merged.",
        "",
    ]
    main = core()
    anchors = {part.cls.__name__: part.anchor for part in main}
    for part in main:
        lines += _lines(part, anchors, "##")
    for kind, place in PLACES.items():
        lines += [f"## Plug-ins: {kind} {{#{kind}}}", "", f"The `type` of `{place}` selects one of them.", ""]
        of_kind = plugins(kind)
        for part in of_kind:
            shared = {p.cls.__name__: p.anchor for p in of_kind if p.cls.__name__ != "Config"}
            near = shared | {p.cls.__name__: p.anchor for p in of_kind if p.prefix in (f"{kind}.", part.prefix)}
            lines += _lines(part, anchors | near, "###")
    return "\n".join(lines)


def metrics() -> str:
    """Return the table of all metrics: name, definition and needs, from the documentation of their modules."""
    lines = ["| metric | definition | needs |", "|---|---|---|"]
    for name in registry.names("metric"):
        module = registry.module("metric", name)
        paragraphs = [" ".join(text.split()) for text in inspect.cleandoc(module.__doc__ or "").split("\n\n")]
        needs = ", ".join(sorted(getattr(module, "NEEDS", ())))
        lines.append(f"| `{name}` | {' '.join(paragraphs[:2]).replace('|', chr(92) + '|')} | {needs} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
