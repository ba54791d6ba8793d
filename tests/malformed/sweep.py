"""Silly values of the right type for every key of an experiment, and what `check` and the command it concerns say of them.

`python -m tests.malformed.sweep FOLDER [TEXT [PART/PARTS]]` prints the answers to each case (of keys that contain TEXT).
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import BaseModel

import credit_like.physics.energy
from credit_like import cli, registry
from credit_like.data.sources.synthetic import Config as Synthetic
from credit_like.data.sources.synthetic import generate
from credit_like.schema.checks import SPLITS
from credit_like.schema.experiment import Experiment
from credit_like.schema.launch import MODES
from credit_like.schema.load import load_experiment
from tests.data.sources.test_anemoi import make as anemoi
from tests.experiments import DEMO
from tests.faults.test_run_folder import TINY

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**5, 10**12, -0.5, 1e-300, 1e300, float("nan"), float("inf"), "", " ", "absent", "x" * 300,
    "1s", "1000000d", "1900-01-01", [], ["absent"], ["1900-01-01", "1900-01-02"], [0], [-1], [10**9], [1e300], {}, {"absent": 0},
)  # fmt: skip
STEPS = 3
"""After so many optimiser steps a training is taken to go on."""
PROCESSES = 16
MEMORY = 3 * 2**30
SECONDS = 60
"""Of processor time, after which a command that `check` accepts is taken to go on."""
HANG = 3600  # seconds without an answer; a process that computes has ended long before
FLUXES = (*credit_like.physics.energy.Config().top.down, *credit_like.physics.energy.Config().surface.down)
ROLES: dict[str, dict[str, Any]] = {
    "columns.zarr": {
        "levels": [1, 2],
        "prognostic": {"level": ["u", "v", "temperature", "specific_humidity"], "surface": ["surface_pressure"]},
        "diagnostic": {"surface": ["total_precipitation", "evaporation", *FLUXES]},
        "static": {"surface": ["geopotential_at_surface"]},
    },
    "made.grib": {
        "levels": [850, 500],
        "prognostic": {"level": ["t"], "surface": ["2t"]},
        "static": {"surface": ["lsm"]},
    },
    "anemoi.zarr": {
        "levels": [850, 500],
        "prognostic": {"level": ["t", "u"], "surface": ["2t"]},
        "static": {"surface": ["lsm"]},
    },
}
"""The variables of data that the synthetic source cannot stand for."""


@dataclass(frozen=True)
class Variant:
    """An experiment that the command accepts, and the sections whose keys are tried in it."""

    command: str
    settings: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()


def variants(folder: Path) -> dict[str, Variant]:
    """Return experiments in which every key has a section of its own to stand in; `folder` has what they read."""
    noise = ("model.noise={correlation: 0.5}", "trainer.members=2", "loss={type: crps}")
    members = "inference.ensemble={members: 3, amplitude: {u: 0.5}, perturbations: "
    tiny = load_experiment(DEMO, TINY).to_dict()["data"]
    times = {key: tiny[key] for key in ("timestep", *SPLITS)}

    def on(name: str, kind: str, **keys: Any) -> str:
        source = {"type": kind, "path": str(folder / name), **keys}
        return "data=" + json.dumps({"source": source, **ROLES[name], **times})

    phases = "trainer.phases=[{epochs: 1, loss: {type: mae}}, {epochs: 1, forecast_len: 2}]"
    scored = (
        "evaluation.regions={belt: {south: -20, north: 20}}", "evaluation.thresholds={values: {u: [5]}, quantiles: [0.5]}",
        f"evaluation.baselines={{other: {folder / 'run/forecasts/forecast.zarr'}}}", "evaluation.bootstrap=5",
        "evaluation.climatology_period=[2000-01-01, 2000-01-09]",
    )  # fmt: skip
    trained = (
        "trainer.monitor={every: 1, init: 2, lead: 1, share: 1.0}", "trainer.early_stopping={patience: 2}",
        "trainer.stop_after=1h", "trainer.threads=1", "trainer.fsdp2_mp_policy={}",
    )  # fmt: skip
    lora = f"start_from={{path: {folder / 'run'}, lora: {{rank: 2}}}}"
    made = {
        "train": Variant(
            "train", trained, ("name", "seed", "save_loc", "data", "model", "trainer", "tracking", "plugins")
        ),
        "phases": Variant("train", (phases,), ("trainer",)),
        "noise": Variant("train", noise, ("model",)),
        "start-from": Variant("train", (lora,), ("start_from",)),
        "rollout": Variant("rollout", (), ("inference",)),
        "perturbed": Variant("rollout", (members + "{type: gaussian}}",), ("inference",)),
        "bred": Variant("rollout", (members + "{type: bred, cycles: 1, cycle: 6h}}",), ("inference",)),
        "lagged": Variant("rollout", (members + "{type: lagged, lag: 6h}}",), ("inference",)),
        "derived": Variant("rollout", ("inference.derive=[wind_speed]",), ("inference",)),
        "evaluate": Variant("evaluate", scored, ("evaluation",)),
        "submit": Variant(
            "submit", ("pbs={account: me, nodes: 1, rollout: {nodes: 2}}", "site=generic-pbs"), ("pbs", "site")
        ),
    }
    rows = {
        "optimizer": ("trainer.optimizer", "groups: [{match: '*', learning_rate: 0.001}]"),
        "scheduler": ("trainer.scheduler", ""),
        "loss": ("loss", ""),
        "physics": ("physics", ""),
        "writer": ("inference.output", ""),
    }
    keys = {
        "clip": "variables: [column_water]", "conserve": "variables: [column_water]",
        "relax": "variables: [u], climatology: [2000-01-01, 2000-01-09]", "spherical-filter": "variables: [height], highest: 5",
        "zonal-filter": "variables: [height], highest: 5", "zonal-energy": "variables: [height], rate: 0.5",
        "sum": "terms: [{loss: {type: mse}}, {weight: 2, loss: {type: mae}}]",
    }  # fmt: skip
    for kind, (place, extra) in rows.items():
        for name in registry.names(kind):
            text = ", ".join(part for part in (f"type: {name}", extra, keys.get(name, "")) if part)
            text = f"[{{{text}}}]" if kind == "physics" else f"{{{text}}}"
            more = noise if kind == "loss" and ("crps" in name or name == "energy") else ()
            if kind == "physics" and name in ("mass", "moisture", "energy"):
                more = (on("columns.zarr", "zarr"),)
            command = "rollout" if kind == "writer" else "train"
            made[f"{kind} {name}"] = Variant(command, (*more, f"{place}={text}"), (place.split(".")[0],))
    for name in ("zarr", "netcdf"):
        ending = {"zarr": "zarr", "netcdf": "nc"}[name]
        source = f"data.source={{type: {name}, path: {folder / f'data.{ending}'}, dims: {{}}, region: {{}}}}"
        made[f"source {name}"] = Variant("train", (source,), ("data",))
    if find_spec("eccodes"):
        made["source grib"] = Variant("train", (on("made.grib", "grib"),), ("data",))
    windows = "model={type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 8, local_window_size: 1, "
    windows += "global_window_size: [1, 1, 1, 1], padding_conf: {activate: true, mode: earth, pad_lat: [3, 4], pad_lon: [2, 2]}}"
    made["source anemoi"] = Variant("train", (on("anemoi.zarr", "anemoi", statistics=True), windows), ("data",))
    return made


def base(variant: Variant, folder: Path) -> Experiment:
    """Return the demonstration with whole sections replaced."""
    tree = load_experiment(DEMO, [*TINY, f"save_loc={folder / 'run'}"]).to_dict()
    for setting in variant.settings:
        key, _, text = setting.partition("=")
        tree = changed(tree, tuple(key.split(".")), yaml.safe_load(text))
    return Experiment.model_validate(tree)


def prepare(folder: Path) -> None:
    """Make what the experiments read: data, and a run that has been trained, with its forecasts."""
    made = generate(Synthetic(steps=60))
    made.to_zarr(folder / "data.zarr", zarr_format=3, consolidated=False)
    made.to_netcdf(folder / "data.nc")
    on_levels = made.rename(height="temperature")
    on_levels["temperature"].attrs["units"] = "K"
    on_levels["specific_humidity"] = 1e-6 * on_levels["temperature"]
    at_surface = {"surface_pressure": 1e5, "total_precipitation": 1.0, "evaporation": 1.0, **dict.fromkeys(FLUXES, 1e3)}
    on_levels = on_levels.assign({name: scale * made["column_water"] for name, scale in at_surface.items()})
    on_levels["geopotential_at_surface"] = 9.8 * made["orography"]
    on_levels.to_zarr(folder / "columns.zarr", zarr_format=3, consolidated=False)
    anemoi(folder / "anemoi.zarr", dates=60, start="2000-01-01")
    if find_spec("eccodes"):
        _write_grib(folder / "made.grib")
    for command in ("train", "rollout"):
        sets = [part for item in (*TINY, f"save_loc={folder / 'run'}") for part in ("--set", item)]
        with pytest.raises(SystemExit) as end:
            cli.main([command, str(DEMO), *sets])
        assert not end.value.code, command


def _write_grib(path: Path) -> None:
    """Write two variables in time and a static one, 32 x 64 points, in GRIB."""
    from tests.data.sources.test_grib import message, surface, write

    random, shape = np.random.default_rng(0), (32, 64)
    messages = [surface("lsm", random.random(shape), shape=shape, dataDate=20000101)]
    for step in range(60):
        day, hour = divmod(6 * step, 24)
        when = {"dataDate": 20000101 + day, "dataTime": 100 * hour, "shape": shape}
        messages += [message(random.random(shape), level=level, **when) for level in (850, 500)]
        messages.append(surface("2t", random.random(shape), **when))
    write(path, *messages)


# ---- cases -----------------------------------------------------------------------------------------------------------


Key = tuple[str | int, ...]


def keys(section: BaseModel, path: Key = ()) -> Iterator[tuple[Key, tuple[type, str]]]:
    """Yield the path of every key, with the class and the field that it is in it."""
    for name, field in type(section).model_fields.items():
        at = (*path, field.alias or name)
        yield at, (type(section), name)
        yield from inside(getattr(section, name), at)


def inside(value: Any, at: Key) -> Iterator[tuple[Key, tuple[type, str]]]:
    if isinstance(value, BaseModel):
        yield from keys(value, at)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from inside(item, (*at, i))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from inside(item, (*at, name))


def changed(tree: dict[str, Any], path: Key, value: Any) -> dict[str, Any]:
    result = at = copy.deepcopy(tree)
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return result


def silly(found: Any) -> Iterator[Any]:
    """Yield values for a key whose value is `found`."""
    yield from VALUES
    if isinstance(found, list) and found:
        yield from ([*found, *found], found * 1000, found[:1])
    if isinstance(found, dict) and found and "type" not in found:
        yield {"absent": next(iter(found.values()))}


@dataclass(frozen=True)
class Case:
    """A value of a key that the schema accepts."""

    variant: str
    path: Key
    value: Any

    def __str__(self) -> str:
        return f"{self.variant}: {'.'.join(map(str, self.path))} = {json.dumps(self.value)[:60]}"


@dataclass(frozen=True)
class Field:
    """A key of a variant's experiment, with the value that it has."""

    variant: str
    experiment: Experiment
    path: Key
    value: Any

    def cases(self) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Yield every case of this key whose experiment is a new and a valid one."""
        tree, accepted = self.experiment.to_dict(), [self.experiment]
        for value in silly(self.value):
            try:
                made = changed(tree, self.path, value)
                loaded = Experiment.model_validate(made)
            except (ValueError, KeyError, TypeError):
                continue
            if loaded not in accepted:
                accepted.append(loaded)
                yield Case(self.variant, self.path, value), made


def fields_of(folder: Path) -> Iterator[Field]:
    """Yield every key. Each field of a class is tried in one variant per command."""
    seen = set()
    for name, variant in variants(folder).items():
        experiment = base(variant, folder)
        tree = experiment.to_dict()
        for path, field in keys(experiment):
            if path[0] not in variant.sections or path[-1] == "type" or (variant.command, field) in seen:
                continue
            try:
                found = at(tree, path)
            except (KeyError, TypeError, IndexError):  # a part of a phase that is as in the others
                continue
            seen.add((variant.command, field))
            yield Field(name, experiment, path, found)


def cases(folder: Path) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield every case, with the whole experiment as plain data."""
    for field in fields_of(folder):
        yield from field.cases()


def at(tree: Any, path: Key) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else tree[part]
    return tree


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The end of a command: its status, None for an error that is no message, and what it said."""

    status: int | str | None
    said: str


def answer(arguments: list[str], said: Path) -> Answer:
    said.write_text("")
    try:
        cli.main(arguments)
    except SystemExit as end:
        return Answer(end.code or 0, said.read_text())
    except BaseException:  # noqa: BLE001 - a traceback is what is looked for
        return Answer(None, traceback.format_exc())
    return Answer(0, said.read_text())


def _ask(file: Path, variant: Variant, pipe: Connection) -> None:
    said = file.with_suffix(".said")
    os.chdir(file.parent)
    descriptor = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a command; workers end with their parent
    _limit(pipe)
    pipe.send(("check", answer(["check", str(file)], said)))
    if variant.command == "submit":
        for mode in MODES:  # check looks at all of them
            after = ["--after", "1"] if mode in ("rollout", "evaluate") else []  # there is no checkpoint yet
            pipe.send((f"submit {mode}", answer(["submit", str(file), "--dry-run", "--mode", mode, *after], said)))
    else:
        pipe.send((variant.command, answer([variant.command, str(file)], said)))
    pipe.close()
    os._exit(0)


def _limit(pipe: Connection) -> None:
    """End this process where it goes on for long, or starts many others."""
    from credit_like.training.step import TrainStep

    inner, count = TrainStep.__call__, [0]

    def step(self, *arguments, **options):
        count[0] += 1
        if count[0] > STEPS:
            pipe.send(("train", Answer("goes on", "")))
            os._exit(0)
        return inner(self, *arguments, **options)

    TrainStep.__call__ = step
    start, started = multiprocessing.process.BaseProcess.start, [0]

    def limited(self):
        started[0] += 1
        if started[0] > PROCESSES:
            pipe.send(("train", Answer("too many processes", "")))
            os._exit(0)
        return start(self)

    multiprocessing.process.BaseProcess.start = limited


def ask(number: int, made: dict[str, Any], variant: Variant, folder: Path) -> dict[str, Answer]:
    """Return the answers of `check` and of the command, in a process of its own; in the folder of a run if it needs one."""
    place = folder / f"case-{number}"
    place.mkdir()
    own = place / "run"
    if variant.command in ("rollout", "evaluate"):
        shutil.copytree(folder / "run", own)
        if variant.command == "rollout":
            shutil.rmtree(own / "forecasts")
    if made["save_loc"] == str(folder / "run"):
        made = {**made, "save_loc": str(own)}
    file = place / "x.yml"
    file.write_text(json.dumps(made))
    # Not forked from here: other tests of this process may have left threads, whose locks a child would wait for.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.malformed.warm"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_ask, args=(file, variant, send))
    process.start()
    send.close()
    found = {}
    while receive.poll(HANG):
        try:
            command, said = receive.recv()
        except EOFError:
            break
        found[command] = said
    else:
        process.kill()
    process.join()
    if process.exitcode == -signal.SIGXCPU and "check" in found:  # it compiles, or computes a forecast of years
        found.setdefault(variant.command, Answer("goes on", ""))
    elif process.exitcode:
        found.setdefault("check" if "check" not in found else variant.command, Answer(f"exit {process.exitcode}", ""))
    shutil.rmtree(place)
    return found


def disagreement(found: dict[str, Answer]) -> str | None:
    """Return what is wrong with the answers."""
    check = found["check"]
    if check.status not in (0, 2):
        return f"check: {check.status} {check.said[-1500:]}"
    others = {command: other for command, other in found.items() if command != "check"}
    for command, other in others.items():  # whatever `check` says, none ends in a traceback
        if other.status not in (0, 1, 2, "goes on") and "out of memory: " not in other.said:
            return f"check: {check.status}, {command}: {other.status} {other.said[-1500:]}"
    if check.status == 2 and all(other.status in (0, "goes on") for other in others.values()):
        return f"check: 2 {check.said[-1500:]}, {', '.join(others)}: accepted"
    for command, other in others.items():
        if check.status != 2 and other.status not in (0, "goes on") and "out of memory: " not in other.said:
            return f"check: 0, {command}: {other.status} {other.said[-1500:]}"
    return None


def main(folder: Path, text: str = "", share: str = "0/1") -> None:
    part, parts = map(int, share.split("/"))
    folder.mkdir(exist_ok=True)
    if not (folder / "run").exists():
        prepare(folder)
    every = variants(folder)
    for name, variant in every.items() if part == 0 else ():
        if wrong := disagreement(ask(-1, base(variant, folder).to_dict(), variant, folder)):
            print(f"NOT A BASE {name}: {wrong}", flush=True)
    for number, (case, made) in enumerate(cases(folder)):
        if text in str(case) and number % parts == part:
            found = ask(number, made, every[case.variant], folder)
            wrong = disagreement(found)
            print(
                f"{number} {'WRONG' if wrong else 'ok'} {case} {[a.status for a in found.values()]} {wrong or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
