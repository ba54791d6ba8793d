"""Translate CREDIT's sections `predict` and `inference`."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any

from credit_like.migrate import blocks
from credit_like.migrate.document import Document, Keys, iso_time
from credit_like.schema.base import parse_duration


def inference_section(source: Document, data: dict[str, Any]) -> dict[str, Any]:
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
        return [iso_time(str(single["start_datetime"]))], _lead(source, "single_forecast", single)
    if single:
        source.remark(
            ("inference", "single_forecast"),
            "the command is `credit-like rollout FILE --set 'inference.init=[TIME]' --set inference.output.path=FOLDER`",
            covered=True,
        )
    new = source.section("inference", "batch_forecast")
    if not new:
        return None
    for key in ("forecast_length", "first_init_date", "last_init_date", "init_interval"):
        source.get("inference", "batch_forecast", key)
    interval = str(new.get("init_interval", "12h"))
    return [
        iso_time(str(new["first_init_date"])), iso_time(str(new["last_init_date"])), interval
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
