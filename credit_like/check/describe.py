"""A description of a run that has no problems, as data and as a table."""

from __future__ import annotations

import itertools
from typing import Any

from credit_like import bands
from credit_like.check.run import steps_per_epoch
from credit_like.check.store import Store
from credit_like.errors import UserError
from credit_like.layout import domain_shape, domain_text
from credit_like.naming import counted
from credit_like.schema.base import format_duration
from credit_like.schema.checks import SPLITS, layout
from credit_like.schema.experiment import Experiment
from credit_like.schema.phases import Phase, phases
from credit_like.variables import ROLES


def describe(experiment: Experiment, store: Store, world: int) -> dict[str, Any]:
    """Return a description of the run as plain data."""
    grid, at = store.fields.grid, layout(experiment.trainer, world)
    trainer = experiment.trainer
    parts = [(phase, steps_per_epoch(store, phase)) for phase in phases(experiment)]
    return {
        "name": experiment.name,
        "save_loc": experiment.save_loc,
        "model": experiment.model.type,
        "variables": {
            role: [{"name": v.name, "levels": list(v.levels)} for v in store.variables.role(role)] for role in ROLES
        },
        "channels": {
            "in": store.variables.in_channels * experiment.data.history_len,
            "out": store.variables.out_channels,
        },
        "grid": {
            "height": grid.height,
            "width": grid.width,
            "latitude": [float(grid.latitude[0]), float(grid.latitude[-1])],
            "longitude": [float(grid.longitude[0]), float(grid.longitude[-1])],
            "global": grid.is_global,
        },
        "times": {
            "first": store.text(int(store.seconds[0])),
            "last": store.text(int(store.seconds[-1])),
            "count": len(store.seconds),
            "timestep": format_duration(experiment.data.timestep),
        },
        **({"sums": sums} if (sums := store.fields.told_other_sums()) else {}),
        "samples": {split: store.samples(split) for split in SPLITS},
        "forecasts": _describe_forecasts(store),
        "layout": {
            "world": at.world,
            "data": at.data,
            "ensemble": at.ensemble,
            "tensor": at.tensor,
            "domain": at.domain if at.columns == 1 else list(at.shape),
            "global_batch_size": trainer.global_batch_size,
            "micro_batch_size": trainer.micro_batch_size,
            "accumulation": at.accumulation,
            "steps_per_epoch": parts[0][1],
            "steps": sum(steps * phase.experiment.trainer.epochs for phase, steps in parts),
        },
        **({"phases": [_describe_phase(*part) for part in parts]} if trainer.phases else {}),
        **({"shards": shards} if (shards := _shards(experiment, grid.height, grid.width)) else {}),
    }


def _shards(experiment: Experiment, height: int, width: int) -> dict[str, dict[int, list[int]]]:
    """Return for rows and for columns, if ranks share them, size of an image in the model → what each rank has of it."""
    levels = getattr(experiment.model, "levels", None)
    shape = experiment.trainer.parallelism.degrees.shape
    return {
        name: {
            size: [stop - start for start, stop in bands.bands(size, level.unit, ranks)]
            for size, level in bands.merge(levels(height, width, axis)).items()
        }
        for axis, (name, ranks) in enumerate(zip(("rows", "columns"), shape, strict=True))
        if ranks > 1 and levels is not None
    }


def _sum_of(parts: list[int]) -> str:
    """Return parts as `181 + 3 × 180`."""
    counts = [(size, len(list(group))) for size, group in itertools.groupby(parts)]
    return " + ".join(f"{count} × {size}" if count > 1 else str(size) for size, count in counts)


def _describe_phase(phase: Phase, steps_per_epoch: int) -> dict[str, Any]:
    data, trainer = phase.experiment.data, phase.experiment.trainer
    return {
        "phase": phase.number,
        "epochs": trainer.epochs,
        "forecast_len": data.forecast_len,
        "global_batch_size": trainer.global_batch_size,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps_per_epoch * trainer.epochs,
    }


def _describe_forecasts(store: Store) -> dict[str, Any]:
    """Return the number of initial times and the lead in steps, or why `rollout` would refuse the default forecasts."""
    from credit_like.inference.times import initial_times, lead_steps

    inference, data = store.experiment.inference, store.experiment.data
    try:
        steps = lead_steps(inference.lead, data.timestep)
        made = {"initial_times": len(initial_times(inference, store.fields, data)), "steps": steps}
    except UserError as error:
        return {"refused": str(error)}
    unread = "in GRIB, which `evaluate` and `plot` do not read: for scores set inference.output.type to zarr or netcdf"
    return {**made, "note": unread} if inference.output.type == "grib" else made


def print_table(description: dict[str, Any]) -> None:
    """Print the description as a table."""
    from rich.text import Text

    from credit_like.terminal import folding_table, plain_console

    def names(variables: list[dict[str, Any]]) -> str:
        shown = [f"{v['name']} × {len(v['levels'])}" if v["levels"] else v["name"] for v in variables]
        return ", ".join(shown) or "none"

    grid, times, at = description["grid"], description["times"], description["layout"]
    made = description["forecasts"]
    processes = "1 process" if at["world"] == 1 else f"{at['world']} processes"
    members = f" × ensemble {at['ensemble']}" if at["ensemble"] > 1 else ""
    shape = domain_shape(at["domain"])
    domain = f"({domain_text(shape)})" if shape[1] > 1 else domain_text(shape)
    north, west = grid["latitude"], grid["longitude"]
    rows = {
        "model": description["model"],
        **{role.replace("_", " "): names(v) for role, v in description["variables"].items()},
        "channels": f"{description['channels']['in']} in, {description['channels']['out']} out",
        "grid": f"{grid['height']} × {grid['width']}{' global' if grid['global'] else ' regional'}, "
        f"latitude {north[0]:g} to {north[1]:g}, longitude {west[0]:g} to {west[1]:g}",
        "times": f"{times['count']} from {times['first']} to {times['last']}, stepped by {times['timestep']}",
        **({"sums": description["sums"]} if "sums" in description else {}),
        "samples": ", ".join(f"{split} {n}" for split, n in description["samples"].items())
        + " (before windows with missing fields are left out)",
        "forecasts": f"none: {made['refused']}"
        if "refused" in made
        else f"from {counted(made['initial_times'], 'time')}, {counted(made['steps'], 'step')} each"
        + (f"; {made['note']}" if "note" in made else ""),
        "layout": f"{processes} = data {at['data']}{members} × tensor {at['tensor']} × domain {domain}",
        **{
            f"{name} of each rank": ", ".join(f"{size} = {_sum_of(parts)}" for size, parts in of_sizes.items())
            for name, of_sizes in description.get("shards", {}).items()
        },
        "batch": f"{at['global_batch_size']} = micro {at['micro_batch_size']} × data {at['data']} × accumulation "
        f"{at['accumulation']}",
        "steps": f"{at['steps']} in all"
        if "phases" in description
        else f"{at['steps_per_epoch']} per epoch, {at['steps']} in all",
        **{
            f"phase {p['phase']}": f"{p['epochs']} × {p['steps_per_epoch']} steps, batch {p['global_batch_size']}, "
            f"forecast_len {p['forecast_len']}"
            for p in description.get("phases", ())
        },
        "save_loc": description["save_loc"],
    }
    table = folding_table("", "", show_header=False, box=None, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    console = plain_console()
    console.print(Text.assemble((description["name"], "bold"), ": no problems found"))
    console.print(table)
