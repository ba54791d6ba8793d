"""Forecasts and scores by command: the same files from any number of ranks, and one message for what cannot be."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import yaml

from credit_like import build, cli
from credit_like.inference.forecast import write_forecasts
from credit_like.inference.writers._zarr import ZarrWriter
from credit_like.models import persistence
from credit_like.parallel.domain.spatial import ChunkShare
from credit_like.schema.load import dump_experiment, load_experiment
from tests.experiments import BANDED_MODEL, DEMO, SHORT, contents

ROOT = Path(__file__).parents[2]
TINY = [
    *SHORT,
    BANDED_MODEL,
    "trainer.device=cpu",
    "trainer.epochs=1",
    "trainer.batches_per_epoch=2",
    "trainer.scheduler.warmup_steps=1",
    "inference={init: [2000-01-11T06, 2000-01-12T06, 12h], lead: 18h}",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The file of a trained experiment without forecasts."""
    folder = tmp_path_factory.mktemp("run")
    experiment = load_experiment(DEMO, [*TINY, f"save_loc={folder / 'run'}"])
    assert build.train(experiment) == 0
    plain = experiment.to_dict()
    del plain["inference"]["output"]  # tests choose their own
    (folder / "experiment.yml").write_text(yaml.safe_dump(plain))
    return folder / "experiment.yml"


def _rollout(rank, file, overrides):
    return build.rollout(load_experiment(file, overrides))


DERIVED = "inference.derive=[wind_speed, vorticity, divergence]"
BY_POINT = "inference.derive=[wind_speed]"
ENSEMBLE = "inference.ensemble={members: 2, amplitude: {u: 0.5}}"
BRED = "inference.ensemble={members: 3, amplitude: {u: 0.5}, perturbations: {type: bred, cycles: 2, cycle: 6h}}"
LAGGED = "inference.ensemble={members: 3, perturbations: {type: lagged}}"
LAYOUTS = {
    "ddp": (2, ["trainer.parallelism={data: ddp}", "trainer.micro_batch_size=4"]),
    "fsdp2": (2, ["trainer.parallelism={data: fsdp2}", "trainer.micro_batch_size=4"]),
    "domain": (2, ["trainer.parallelism={domain: 2}"]),
    "columns": (2, ["trainer.parallelism={domain: [1, 2]}"]),
    "tensor": (2, ["trainer.parallelism={tensor: 2}"]),
}


@pytest.mark.parametrize(
    ("layout", "output", "ensemble", "derived"),
    [
        *(
            pytest.param(layout, "zarr", ENSEMBLE, DERIVED, marks=[pytest.mark.slow] * (layout != "domain"))
            for layout in LAYOUTS
        ),
        pytest.param("domain", "netcdf", ENSEMBLE, DERIVED, marks=pytest.mark.slow),
        pytest.param("domain", "netcdf", ENSEMBLE, BY_POINT, marks=pytest.mark.slow),
        pytest.param("domain", "zarr", BRED, DERIVED, marks=pytest.mark.slow, id="domain-bred"),
        pytest.param("columns", "zarr", BRED, DERIVED, marks=pytest.mark.long, id="columns-bred"),
        pytest.param("domain", "zarr", LAGGED, DERIVED, marks=pytest.mark.slow, id="domain-lagged"),
    ],
)
def test_every_layout_writes_the_store_of_one_process(run, tmp_path, run_ranks, layout, output, ensemble, derived):
    world, section = LAYOUTS[layout]
    paths = [tmp_path / "one", tmp_path / "many"]
    for path, ranks, extra in ((paths[0], 1, []), (paths[1], world, section)):
        sets = [ensemble, derived, f"inference.output={{type: {output}, path: {path}}}", *extra]
        assert run_ranks(ranks, _rollout, run, sets) == [0] * ranks
    if layout in ("ddp", "fsdp2"):  # the same arithmetic: the same bytes
        one, many = map(contents, paths)
        one.pop("forecast.json"), many.pop("forecast.json")
        assert one == many
        return
    name = "forecast.zarr" if output == "zarr" else "forecast"
    assert sorted(contents(paths[0] / name)) == sorted(contents(paths[1] / name))
    stores = []
    for path in paths:
        if output == "zarr":
            stores.append(xr.open_zarr(path / name).load())
        else:
            stores.append(xr.concat([xr.load_dataset(file) for file in sorted((path / name).iterdir())], "time"))
    for variable, array in stores[0].data_vars.items():
        np.testing.assert_allclose(stores[1][variable].values, array.values, rtol=0, atol=rounding(array))
        assert stores[1][variable].attrs == array.attrs


def rounding(array):
    """Return the largest difference that rounding explains: a small part of what changes from lead to lead."""
    change = float(array.diff("prediction_timedelta").std())
    return max(1e-3 * change, 4e-7 * float(np.abs(array).max()))  # the latter is what float32 resolves


def _share_of_rollout(rank, file, overrides, share):
    """The rows and columns that this rank writes, of the shape of each piece that it stores."""
    stored = []
    original = ZarrWriter._store

    def watched(writer, name, places, leads, values):
        stored.append((values.shape[-2:], writer.part))
        original(writer, name, places, leads, values)

    ZarrWriter._store = watched
    assert build.rollout(load_experiment(file, overrides), share) == 0
    assert len({str(one) for one in stored}) <= 1
    return stored[0] if stored else None


@pytest.mark.parametrize(
    ("layout", "world", "written"),
    [
        pytest.param("{domain: [2, 2], data: fsdp2}", 4, [(16, 32)] * 4, marks=pytest.mark.slow),
        ("{domain: 2}", 2, [(16, 64)] * 2),
        pytest.param("{domain: [1, 2], tensor: 2}", 4, [(32, 32), (32, 32), None, None], marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_a_field_write_their_chunks_of_it(run, tmp_path, run_ranks, layout, world, written):
    paths = [tmp_path / "one", tmp_path / "many"]
    levels_apart = 0.002  # a chunk for each level, and a shard for all of them
    output = f"inference.output={{type: zarr, chunk_mib: {levels_apart if world == 4 else 0.05}, path: %s}}"
    sets = [["inference.batch_size=2", output % path] for path in paths]
    assert run_ranks(1, _rollout, run, sets[0]) == [0]
    many = [*sets[1], f"trainer.parallelism={layout}"]
    parts = run_ranks(world, _share_of_rollout, run, many, (0, 2))
    assert [part and part[0] for part in parts] == written
    assert not (paths[1] / "forecast.zarr").exists()
    # One process computes the rest: it keeps the chunks of the store, and writes all of them.
    assert [part[0] for part in run_ranks(1, _share_of_rollout, run, sets[1], (1, 2))] == [(32, 64)]
    one, other = (xr.open_zarr(path / "forecast.zarr").load() for path in paths)
    assert other["u"].encoding["chunks"][-2:] == next(filter(None, written))
    for variable, array in one.data_vars.items():
        assert np.isfinite(other[variable].values).all()
        np.testing.assert_allclose(other[variable].values, array.values, rtol=0, atol=rounding(array))


def _collected(rank, file, overrides):
    """Forecast with a model that changes nothing, the same to the bit in any layout; return the shapes that this rank collects."""
    experiment = load_experiment(file, overrides).model_copy(update={"model": persistence.Config()})
    shapes, collect = [], ChunkShare.collect

    def watched(share, fields):
        result = collect(share, fields)
        shapes.append(None if result is None else tuple(result.shape[1:]))
        return result

    ChunkShare.collect = watched
    context = build.build_context(experiment, build.start(experiment, training=False), train=False)
    outcome = write_forecasts(context, "step-0")
    assert outcome.finished or rank  # others may look before the first one has written
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields", "derived", "channels"),
    [
        ("netcdf", "{levels: [2]}", None, [1, 1, 1, 1, 1]),
        ("netcdf", "{levels: [2]}", "[wind_speed]", [1, 1, 1, 1, 1, 2]),
        ("grib", "{variables: [u, v]}", None, [2, 2]),
        ("zarr", "{}", None, [8]),
        ("zarr", "{}", "[wind_speed]", [10]),
    ],
)
def test_the_rank_that_writes_collects_a_variable_at_a_time(run, tmp_path, run_ranks, kind, fields, derived, channels):
    """Of what is chosen alone; the others keep nothing, and the bytes are those of one process."""
    shapes = {}
    for world, layout in ((1, "{}"), (4, "{domain: [2, 2]}")):
        output = yaml.safe_load(fields) | {"type": kind, "path": str(tmp_path / str(world))}
        sets = [f"trainer.parallelism={layout}", f"inference.output={json.dumps(output)}"]
        sets += [f"inference.derive={derived}"] if derived else []
        shapes[world] = run_ranks(world, _collected, run, sets)
    first, *others = shapes[4]
    part = (16, 32) if kind == "zarr" else (32, 64)
    leads = 3  # of one batch
    assert first == [(count, *part) for count in channels] * leads
    assert all(set(one) == ({(*channels, *part)} if kind == "zarr" else {None}) for one in others)
    places = [tmp_path / name / ("forecast.zarr" if kind == "zarr" else "forecast") for name in "14"]
    if kind == "grib":
        one, many = map(contents, places)
        assert len(one) == 3
        assert one == many
    elif kind == "netcdf":
        for a, b in zip(*(sorted(place.iterdir()) for place in places), strict=True):
            assert xr.load_dataset(a).identical(xr.load_dataset(b))
    else:
        assert xr.open_zarr(places[0]).load().identical(xr.open_zarr(places[1]).load())


def _overflowed(rank, file, overrides):
    """Forecast with a model that makes one point of the last rank infinite at the second lead; return the warnings."""
    experiment = load_experiment(file, overrides).model_copy(update={"model": persistence.Config()})
    context = build.build_context(experiment, build.start(experiment, training=False), train=False)
    calls, said = [], []

    def overflow(_module, _inputs, y_BCTHW):
        calls.append(1)
        y_BCTHW = y_BCTHW.clone()
        if len(calls) == 2 and rank == context.runtime.world - 1:
            y_BCTHW[0, 1, :, -1, -1] = torch.inf
        return y_BCTHW

    context.stepper.model.register_forward_hook(overflow)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("credit_like.inference").addHandler(handler)
    write_forecasts(context, "step-0")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["netcdf", "zarr"])
def test_an_overflow_on_one_rank_is_said_once_and_as_by_one_process(run, tmp_path, run_ranks, kind):
    said = {}
    for world, layout in ((1, "{}"), (4, "{domain: [2, 2]}")):
        output = {"type": kind, "path": str(tmp_path / str(world))}
        sets = [f"trainer.parallelism={layout}", f"inference.output={json.dumps(output)}"]
        said[world] = run_ranks(world, _overflowed, run, sets)
    (alone,) = said[1][0]
    assert "is not finite from a lead of 12 h on: " in alone
    assert said[4] == [[alone], [], [], []]


def refused(capsys, *arguments) -> str:
    """The one message of a command that ends with exit status 2."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert end.value.code == 2, said.err
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["inference.init=2010-01-01"], "inference.init"),
        (["inference.init=2000-01-11T07"], "inference.init"),
        (["inference.lead=0"], "inference.lead"),
        (["inference.lead=-6h"], "inference.lead"),
        (["inference.lead=7h"], "inference.lead"),
        (["inference.output={type: zarr, variables: [q]}"], "inference.output.variables"),
        (["inference.output={type: zap}"], "inference.output"),
        (["inference.ensemble={members: 2, amplitude: {q: 1}}"], "inference.ensemble.amplitude"),
    ],
    ids=lambda value: value[0].removeprefix("inference.") if isinstance(value, list) else "",
)
def test_a_rollout_that_cannot_be_writes_nothing(run, tmp_path, capsys, sets, message):
    before = contents(run.parent)
    line = refused(capsys, "rollout", run, *(part for text in sets for part in ("--set", text)))
    assert message in line
    assert "expected" in line
    assert "got" in line
    assert contents(run.parent) == before


def test_forcing_that_ends_before_the_forecast_is_refused(tmp_path, capsys):
    """The experiment of files whose forcing does not go as far as the lead."""
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "inference"))
    from world import make_data, make_experiment

    make_data(tmp_path / "world.nc")
    experiment = make_experiment(tmp_path / "world.nc", tmp_path / "run", init="2000-01-12", lead="3d")
    file = tmp_path / "experiment.yml"
    file.write_text(dump_experiment(experiment))
    before = contents(tmp_path)
    assert "sst" in refused(capsys, "rollout", file)
    assert contents(tmp_path) == before


def test_the_folder_of_another_experiment_and_a_truth_without_a_variable_are_refused(run, tmp_path, capsys):
    shutil.copytree(run.parent, tmp_path / "copy")
    file = tmp_path / "copy" / "experiment.yml"
    file.write_text(file.read_text().replace(str(run.parent), str(tmp_path / "copy")))
    experiment = load_experiment(file)
    assert build.rollout(experiment) == 0
    before = contents(tmp_path)
    line = refused(capsys, "rollout", file, "--set", "inference.lead=12h")
    assert "inference.output.path: expected forecasts of this experiment" in line
    assert "inference.lead" in line
    assert contents(tmp_path) == before

    truth = xr.Dataset(
        {"u": (("time", "latitude", "longitude"), np.zeros((2, 32, 64), "f4"))},
        {
            "time": np.array(["2000-01-12", "2000-01-13"], "datetime64[ns]"),
            "latitude": np.linspace(-87, 87, 32),
            "longitude": np.arange(64) * 5.625,
        },
    )
    truth.to_netcdf(tmp_path / "truth.nc")
    before = contents(tmp_path)
    sets = ["--set", f"evaluation.truth={{type: netcdf, path: {tmp_path / 'truth.nc'}}}"]
    with pytest.raises(SystemExit) as end:
        cli.main(["evaluate", str(file), *sets])
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    assert "evaluation.truth" in said.err
    assert contents(tmp_path) == before
