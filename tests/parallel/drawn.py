"""Random experiments on random layouts, compared in fp64 with one process.

An experiment is drawn from all options that change the numbers of a step: data, model, noise, loss, corrections, optimiser and
the way the gradient is taken. Its fields are random, with the variables that every correction needs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
import yaml

from credit_like import build
from credit_like import verify as kit
from credit_like.check import checked_experiment
from credit_like.errors import UserError
from credit_like.layout import domain_shape
from credit_like.parallel.processes import run_ranks
from credit_like.schema.origin import StartFrom
from credit_like.state import Sample
from credit_like.training import step as training_step
from credit_like.training.forecasts import Allowance
from credit_like.training.stage import Batches
from tests.largest import largest

EXACT = {"outputs": 1e-12, "loss": 1e-12, "norm": 1e-12, "gradients": 1e-10, "weights": 1e-9}
"""Largest errors of three steps, relative to the largest value of a tensor; gradients are those of the first step."""
LEVELS = (300.0, 500.0, 850.0)
_ON_LEVELS = {"temperature": (260, 10), "u": (5, 8), "v": (0, 8), "specific_humidity": (2e-3, 5e-4)}
_AT_SURFACE = {
    "surface_pressure": (1e5, 800),
    "rain": (2e-3, 1e-3),
    "evaporation": (-3e-3, 1e-3),
    "top": (2e5, 1e5),
    "ground": (1e5, 5e4),
}
_TIMES = 28
HYBRID = {"a": [0.0, 20000.0, 15000.0, 0.0], "b": [0.0, 0.1, 0.5, 1.0]}


def make_store(path: Path, height: int, width: int, seed: int) -> None:
    """Write random fields, smooth in time, on a regular grid without poles."""
    rng = np.random.default_rng(seed)
    latitude = 90 - (np.arange(height) + 0.5) * 180 / height
    coords = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(_TIMES) * np.timedelta64(6, "h"),
        "level": list(LEVELS),
        "latitude": latitude,
        "longitude": np.arange(width) * 360 / width,
    }

    def field(*shape: int, mean: float, spread: float) -> np.ndarray:
        waves = np.cumsum(rng.standard_normal(shape), 0) / np.sqrt(np.arange(1, shape[0] + 1)).reshape(
            -1, *[1] * (len(shape) - 1)
        )
        return (mean + spread * waves).astype(np.float32)

    dims = ("time", "level", "latitude", "longitude")
    fields: dict[str, Any] = {}
    for name, (mean, spread) in _ON_LEVELS.items():
        fields[name] = (dims, field(_TIMES, len(LEVELS), height, width, mean=mean, spread=spread))
    for name, (mean, spread) in _AT_SURFACE.items():
        fields[name] = ((dims[0], *dims[2:]), field(_TIMES, height, width, mean=mean, spread=spread))
    fields["rain"] = (fields["rain"][0], np.abs(fields["rain"][1]))
    fields["specific_humidity"] = (dims, np.abs(fields["specific_humidity"][1]))
    fields["geopotential_at_surface"] = (dims[2:], field(1, height, width, mean=0, spread=2000)[0])
    xr.Dataset(fields, coords).to_zarr(
        path, zarr_format=3, consolidated=False, encoding={n: {"chunks": v[1].shape} for n, v in fields.items()}
    )


@dataclass
class Drawn:
    """An experiment and a layout: sections of the file, and keys of the trainer that the kit of `verify` leaves out."""

    sections: dict[str, Any]
    case: kit.Case
    trainer: dict[str, Any]
    size: tuple[int, int]
    start_from: dict[str, Any] | None
    """Low-rank changes, of the initial weights: the section is given to the steps alone, since there is no run to start from."""

    def __str__(self) -> str:
        model = {k: v for k, v in self.sections["model"].items() if k not in ("type", "dim", "dim_head")}
        rest = {k: v for k, v in self.sections.items() if k not in ("model", "data", "name", "save_loc", "inference")}
        data = {k: self.sections["data"][k] for k in ("history_len", "forecast_len")}
        return f"{self.case.name} | {self.size} | {model} | {data} {rest} {self.trainer} {self.start_from}"


DOMAINS = ((2, 2), (1, 2), (1, 4), (3, 2), (2, 3))
_PADDED = {1: (32, 64), 2: (64,), 3: (96,), 4: (128,)}
"""Padded rows or columns that so many ranks can share: two to a rank at the coarsest of four levels."""


def draw(seed: int, folder: Path, **only: Any) -> Drawn:
    """Return an experiment and its layout; `only` overrides what was drawn for the layout."""
    r = random.Random(seed)
    rows, columns = r.choice(DOMAINS)
    most = 6 // (rows * columns)
    noise = r.choice([None, None, "decoder", "conditional-norm"])
    ensemble = 2 if noise and most >= 2 and r.random() < 0.7 else 1
    tensor = r.choice([n for n in (1, 2) if ensemble * n <= most])
    data_ranks = r.choice([n for n in (1, 2) if ensemble * tensor * n <= most])
    data = r.choice(["fsdp2", "ddp"] if data_ranks > 1 else ["fsdp2", "ddp", "none"])
    padded = r.choice(_PADDED[rows]), r.choice(_PADDED[columns])
    interp = r.random() < 0.6
    mode = r.choice(["earth", "earth", "mirror", "replicate"])
    height = padded[0] - r.randint(0, min(padded[0] // 2, 14 * rows))
    width = padded[1] - 2 * r.randint(0, min(padded[1] // 4, 7 * columns))
    odd = interp and r.random() < 0.4
    pads = [_split(r, padded[0] + odd - height), _split(r, padded[1] - width)]
    model: dict[str, Any] = {
        "type": "wxformer", "dim": [4, 8, 16, 32], "depth": r.choice([[1, 1, 1, 1], [1, 2, 1, 1]]), "dim_head": 2,
        "cross_embed_kernel_sizes": r.choice([[[4, 8], [2, 4], [2, 4], [2, 4]], [[2, 4, 8], [4], [2, 4, 6], [2, 3]]]),
        "padding_conf": {"activate": True, "mode": mode, "pad_lat": pads[0], "pad_lon": pads[1]},
        "global_window_size": r.choice([[4, 4, 2, 1], [2, 2, 2, 1], [4, 2, 4, 2]]),
        "interp": interp,
        "upsample": r.choice(["pixel_shuffle", "transpose"]),
        "use_spectral_norm": r.random() < 0.5,
        "position_index": r.choice(["exact", "credit"]),
        "predict": r.choice(["increment", "state"]),
    }  # fmt: skip
    if noise:
        model["noise"] = {"type": noise, "channels": r.randint(1, 4), "correlation": r.choice([0.0, 0.5])}
    for key in ("attn_dropout", "ff_dropout", "drop_path"):
        if r.random() < 0.3:
            model[key] = r.choice([0.1, 0.3])
    members = 2 if noise and (ensemble > 1 or r.random() < 0.7) else 1
    forecast_len = r.choice([1, 1, 2, 3])
    trainer: dict[str, Any] = {
        "device": "cpu", "members": members,
        "optimizer": {"type": r.choice(["adamw", "adamw", "muon"]), "learning_rate": 1e-2, "weight_decay": 0.05},
        "scheduler": {"type": "constant"},
        "input_noise": r.choice([0.0, 0.0, 0.2]),
        "random_forecast_len": forecast_len > 1 and r.random() < 0.4,
    }  # fmt: skip
    if forecast_len > 1 and r.random() < 0.3:
        trainer["backprop_steps"] = r.randint(1, forecast_len - 1)
    sections: dict[str, Any] = {
        "name": "drawn", "seed": seed, "save_loc": str(folder / "run"),
        "data": _data(r, folder, forecast_len),
        "model": model,
        "loss": _loss(r, members),
        "trainer": trainer,
        "physics": _corrections(r),
        "inference": {"lead": "12h"},
    }  # fmt: skip
    start = {"path": "unused", "lora": {"rank": r.choice([1, 3]), "alpha": 2}} if r.random() < 0.25 else None
    name = f"seed {seed}: data {data_ranks} {data} × ensemble {ensemble} × tensor {tensor} × {rows} × {columns}"
    degrees = {"tensor": tensor, "domain": (rows, columns), "ensemble": ensemble} | only
    across, along = domain_shape(degrees["domain"])
    world = data_ranks * degrees["tensor"] * degrees["ensemble"] * across * along
    extra = {"activation_checkpoint": r.random() < 0.3, "shift_longitude": r.random() < 0.3}
    return Drawn(sections, kit.Case(name, world, data, **degrees), extra, (height, width), start)


def _split(r: random.Random, total: int) -> list[int]:
    first = r.randint(0, total) if r.random() < 0.5 else total // 2
    return [first, total - first]


def _data(r: random.Random, folder: Path, forecast_len: int) -> dict[str, Any]:
    def named(name: str, *transforms: dict[str, Any] | None) -> dict[str, Any]:
        chosen = r.choice(transforms)
        return {"name": name, "transform": chosen} if chosen else {"name": name}

    return {
        "source": {"type": "zarr", "path": str(folder / "data.zarr")},
        "timestep": "6h", "levels": list(LEVELS),
        "prognostic": {
            "level": ["temperature", "u", "v", named("specific_humidity", None, {"type": "sqrt", "scale": 1e-3})],
            "surface": ["surface_pressure"],
        },
        "diagnostic": {"surface": [
            named("rain", None, {"type": "log1p", "scale": 1e-3}, {"type": "asinh"}), "evaporation", "ground"
        ]},
        "dynamic_forcing": {"surface": ["top", {"name": "solar", "compute": "solar"}][: r.randint(1, 2)]},
        "static": {"surface": ["geopotential_at_surface"]},
        "history_len": r.choice([1, 1, 2]),
        "forecast_len": forecast_len,
        "train": ["2000-01-01", "2000-01-04"], "valid": ["2000-01-04T06", "2000-01-05T18"], "test": ["2000-01-06", "2000-01-07T18"],
    }  # fmt: skip


def _loss(r: random.Random, members: int) -> dict[str, Any]:
    kinds = ["crps", "spectral-crps", "energy"] if members > 1 else ["mse", "mae", "huber", "log-cosh", "spectral"]
    if r.random() < 0.4:
        terms = [{"loss": {"type": kind}, "weight": r.choice([0.5, 1.0])} for kind in r.sample(kinds, 2)]
        return {"type": "sum", "terms": terms}
    return {"type": r.choice(kinds)}


def _corrections(r: random.Random) -> list[dict[str, Any]]:
    hybrid = HYBRID if r.random() < 0.5 else {}
    possible: list[dict[str, Any]] = [
        {"type": "clip", "variables": ["specific_humidity", "rain"], "minimum": 1e-4},
        {"type": "conserve", "variables": ["temperature"]},
        {"type": "mass", **hybrid},
        {"type": "moisture", "precipitation": "rain", "water_scale": 1000, "evaporation_upward": False, **hybrid},
        {"type": "energy", "u": "u", "v": "v", "top": {"down": ["top"]}, "surface": {"down": ["ground"]}, **hybrid},
        {"type": "relax", "variables": ["u"], "rate": 0.1, "climatology": ["2000-01-01", "2000-01-04"]},
        {"type": "zonal-filter", "variables": ["v"], "highest": 6},
        {"type": "zonal-energy", "variables": ["u"], "lowest": 2},
        {"type": "zonal-energy", "variables": ["rain"], "rate": 0.1, "climatology": ["2000-01-01", "2000-01-04"]},
        {"type": "spherical-filter", "variables": ["temperature"], "winds": ["u", "v"], "highest": 6, "damping": 0.1},
        {
            "type": "spherical-filter",
            "variables": ["temperature"],
            "highest": 6,
            "climatology": ["2000-01-01", "2000-01-04"],
        },
    ]
    return r.sample(possible, r.randint(0, 4))


def written(drawn: Drawn, folder: Path) -> Path:
    """Write the data, once, and the file of the experiment; return the file."""
    if not (folder / "data.zarr").exists():
        make_store(folder / "data.zarr", *drawn.size, drawn.sections["seed"])
    file = folder / "drawn.yml"
    file.write_text(yaml.safe_dump(drawn.sections))
    return file


# ---- the comparison ------------------------------------------------------------------------------------------------


def refusal(file: Path, case: kit.Case) -> str:
    """Return why `check` refuses the experiment on the layout, or nothing."""
    parallelism = {k: list(v) if isinstance(v, tuple) else v for k, v in case.parallelism.items()}
    settings = [f"trainer.parallelism={yaml.safe_dump(parallelism, default_flow_style=True).strip()}"]
    settings += [f"trainer.global_batch_size={kit.BATCH}"]
    try:
        checked_experiment(file, settings, case.world)
    except UserError as error:
        return str(error)
    return ""


def _with_norms(work: Any) -> dict[str, Any]:
    """Return what `work` returns, and the norms of all gradients of its steps."""
    torch.set_num_threads(1)  # the ranks fill the cores
    norms: list[torch.Tensor] = []
    clip = training_step.clip_grad_norm_

    def recorded(*arguments: Any) -> torch.Tensor:
        norms.append(clip(*arguments).detach())
        return norms[-1]

    training_step.clip_grad_norm_ = recorded
    return {"result": work(), "norms": torch.stack(norms)}


def _disturbed(problem: kit.Problem, reference: Path, seed: int) -> dict[str, float]:
    """Return the errors of one process whose weights are one rounding off at first."""
    done = _with_norms(lambda: kit._rounded(problem, reference, seed))
    norms = torch.load(reference.with_suffix(".norms"), weights_only=True)
    errors: dict[str, float] = done["result"]
    return errors | {"norm": float(((done["norms"] - norms) / norms).abs().max())}


def _reference(problem: kit.Problem, reference: Path) -> float:
    done = _with_norms(lambda: kit._reference(problem, reference))
    torch.save(done["norms"], reference.with_suffix(".norms"))
    slope: float = done["result"]
    return slope


def _layout(problem: kit.Problem, case: kit.Case, reference: Path) -> dict[str, Any]:
    done = _with_norms(lambda: kit._layout(problem, case, reference))
    norms = torch.load(reference.with_suffix(".norms"), weights_only=True)
    result: dict[str, Any] = done["result"]
    result["errors"]["norm"] = float(((done["norms"] - norms) / norms).abs().max())
    return result


@dataclass
class Compared:
    """The errors of a layout and, where some are above `EXACT`, what explains them."""

    refused: str = ""
    errors: dict[str, float] | None = None
    disturbed: dict[str, float] | None = None
    """The errors of one process by one rounding of the weights."""
    undivided: dict[str, float] | None = None
    """The errors with `eps: 1`."""
    first: str = ""

    def wrong(self) -> dict[str, float]:
        """Return the errors that are neither within `EXACT` nor explained by rounding.

        They are explained if they are within what `verify` allows, and the same steps with `eps: 1`, which ends nearly all
        growth of rounding, are within `EXACT`.
        """
        assert self.errors is not None
        if self.disturbed is None or self.undivided is None:
            return _beyond(self.errors)
        grown = {k: e for k, e in _beyond(self.errors).items() if not e <= kit.GROWTH * self.disturbed[k]}
        return grown | _beyond(self.undivided)


def _beyond(errors: dict[str, float]) -> dict[str, float]:
    """Return the errors above `EXACT`."""
    return {k: e for k, e in errors.items() if not e <= EXACT[k]}


def _value(answers: list[Any]) -> Any:
    (answer,) = answers
    assert answer.state == "done", answer.value
    return answer.value


def prepared(drawn: Drawn, folder: Path) -> kit.Problem:
    """Return the experiment with its samples, and the keys that the kit of `verify` leaves out."""
    problem = kit.prepare(checked_experiment(folder / "drawn.yml", ["trainer.global_batch_size=2"], 1)[0], str(folder))
    section = problem.experiment.trainer.model_copy(update=drawn.trainer)
    start = StartFrom.model_validate(drawn.start_from) if drawn.start_from else None
    problem.experiment = problem.experiment.model_copy(update={"trainer": section, "start_from": start})
    return problem


_TIMEOUT = 1800.0


def compare(drawn: Drawn, folder: Path) -> Compared:
    """Run the experiment in one process and on the layout; a layout that `check` refuses is refused by the ranks too."""
    why = refusal(written(drawn, folder), drawn.case)
    problem = prepared(drawn, folder)
    reference = folder / "reference.pt"
    if why:
        answers = run_ranks(drawn.case.world, partial(kit._start, problem, drawn.case), _TIMEOUT)
        assert {answer.state for answer in answers} == {"refused"}, f"refused by check alone: {why}"
        return Compared(refused=answers[0].value)
    result = _steps(problem, drawn.case, reference)
    if _beyond(result.errors or {}):
        each = [_value(run_ranks(1, partial(_disturbed, problem, reference, seed), _TIMEOUT)) for seed in range(3)]
        result.disturbed = {k: max(errors[k] for errors in each) for k in each[0]}
        section = problem.experiment.trainer
        optimizer = section.optimizer.model_copy(update={"eps": 1.0})
        trainer = section.model_copy(update={"optimizer": optimizer})
        problem.experiment = problem.experiment.model_copy(update={"trainer": trainer})
        result.undivided = _steps(problem, drawn.case, reference).errors
    return result


def _steps(problem: kit.Problem, case: kit.Case, reference: Path) -> Compared:
    """Return the errors of the layout's steps."""
    _value(run_ranks(1, partial(_reference, problem, reference), _TIMEOUT))
    answers = run_ranks(case.world, partial(_layout, problem, case, reference), _TIMEOUT)
    failed = [answer.value for answer in answers if answer.state != "done"]
    assert not failed, failed[0]
    values = [answer.value for answer in answers]
    errors = {k: largest(value["errors"][k] for value in values) for k in values[0]["errors"]}
    return Compared(errors=errors, first=str(min((v["first"] for v in values if v["first"]), default="")))


# ---- a whole training ----------------------------------------------------------------------------------------------


DERIVED = [
    "wind_speed",
    "vorticity",
    "divergence",
    "relative_humidity",
    "total_column_water",
    {"pressure_levels": [400, 700]},
]


def as_training(drawn: Drawn) -> Drawn:
    """Return the experiment as one of two phases, with validations, short forecasts and derived fields.

    A large eps keeps the rounding of small gradients small.
    """
    r = random.Random(drawn.sections["seed"] + 1000)
    members = drawn.sections["trainer"]["members"]
    phases = [
        {"epochs": 1, "loss": drawn.sections["loss"], "forecast_len": drawn.sections["data"]["forecast_len"]},
        {
            "epochs": 1,
            "loss": _loss(r, members),
            "forecast_len": r.choice([1, 2]),
            "optimizer": {"learning_rate": 3e-3},
        },
    ]
    trainer = drawn.sections["trainer"] | {
        "optimizer": {"type": "adamw", "learning_rate": 1e-2, "eps": 1e-2},
        "phases": phases, "batches_per_epoch": 2, "valid_batches": 1, "use_ema": r.random() < 0.5,
        "monitor": {"every": 1, "init": 2, "lead": 2, "share": 1.0}, "checkpoint": {"async": False},
    }  # fmt: skip
    trainer.pop("backprop_steps", None)
    return replace(
        drawn, sections=drawn.sections | {"trainer": trainer, "evaluation": {"derive": DERIVED}}, start_from=None
    )


class _Doubled:
    """A loader whose samples are in fp64."""

    def __init__(self, loader: Batches) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Sample]:
        for sample in self.loader.batches(epoch, start):
            yield Sample(sample.prognostic.double(), sample.forcing.double(), sample.target.double(), sample.index)

    def again(self, epoch: int, start: int, count: int) -> list[Sample]:
        return list(islice(self.batches(epoch, start), count))


def _trained(problem: kit.Problem, case: kit.Case) -> list[dict[str, Any]]:
    """Train to the end and return the log."""
    torch.set_num_threads(1)
    assemble, load = build.build_trainer, build.build_loader
    build.build_loader = lambda *arguments: _Doubled(load(*arguments))
    build.build_trainer = lambda context, _: assemble(context)
    Allowance.affords = lambda *_: True  # whatever time they take
    trainer = kit._start(problem, case)
    for stage in trainer.stages:
        kit._widen(stage.loss)
        for module in stage.loss.modules():
            kit._widen(module)
    kit._widen(trainer.validation._made().area)
    assert trainer.fit().state == "finished"
    return [json.loads(line) for line in (Path(case.folder) / "log.jsonl").read_text().splitlines()]


def compare_trainings(drawn: Drawn, folder: Path) -> dict[str, float]:
    """Return the largest relative errors of all numbers in the log, by their name there."""
    written(drawn, folder)
    problem = prepared(drawn, folder)
    section = checked_experiment(folder / "drawn.yml", ["trainer.global_batch_size=2"], 1)[0].trainer
    kept = {key: getattr(section, key) for key in ("phases", "monitor", "use_ema")}
    problem.experiment = problem.experiment.model_copy(
        update={"trainer": problem.experiment.trainer.model_copy(update=kept)}
    )
    logs = []
    for case in (kit.Case("one process"), drawn.case):
        there = replace(case, folder=str(folder / f"of {case.world}"))
        answers = run_ranks(case.world, partial(_trained, problem, there), _TIMEOUT)
        failed = [answer.value for answer in answers if answer.state != "done"]
        assert not failed, failed[0]
        logs.append(answers[0].value)
    errors: dict[str, float] = {}
    for one, other in zip(*logs, strict=True):
        expected, found = _numbers(one), _numbers(other)
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            kind, *rest = name.split("/")
            kind = f"{kind}/{rest[0]}" if kind == "forecast" else kind
            scale = np.abs(values)
            if "acc" in kind or "filter/" in name:  # a filter leaves means, but for rounding
                scale = np.ones(1)
            elif "bias" in kind:  # which may vanish, where the error does not
                scale = expected[name.replace("/bias/", "/rmse/")]
            missing = np.isnan(values) & np.isnan(found[name])  # a score that neither has
            difference = np.where(missing, 0.0, np.abs(found[name] - values))
            error = float((difference / np.fmax(scale, 1e-30)).max())
            errors[kind] = largest([errors.get(kind, 0.0), error])
    return errors


_OF_THE_CLOCK = ("samples_per_second", "data_wait", "memory_mib", "seconds")


def _numbers(value: Any, name: str = "") -> dict[str, np.ndarray]:
    """Return every number in a row of the log by its path there."""
    if isinstance(value, dict):
        parts = (_numbers(part, f"{name}/{key}".strip("/")) for key, part in value.items() if key not in _OF_THE_CLOCK)
        return {key: number for part in parts for key, number in part.items()}
    return {} if isinstance(value, str) else {name: np.atleast_1d(np.asarray(value, float))}
