"""The real objects in layouts: checkpoints go from any layout into any other, and forecasts are the same from all."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from credit_like import build
from credit_like.checkpoint.manager import Checkpoint
from credit_like.parallel.shards import whole
from credit_like.schema.load import load_experiment
from tests.experiments import DEMO
from tests.parallel.shards import whole_of_shards
from tests.parallel.test_communication import SETTINGS, Case

SAMPLES = 2  # of a global batch
SERIAL = Case(1, 1, 1, data="none")
LAYOUTS = [
    SERIAL,
    *(Case(*degrees) for degrees in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]),
    Case(2, 1, 1, data="ddp"),
    Case(1, 1, 2, data="none"),
    Case(1, 1, 2, columns=2),
    Case(1, 1, 4, columns=2, data="none"),
    Case(1, 2, 2, columns=2),
    Case(1, 1, 6, columns=3),
    Case(2, 1, 3, columns=3, data="ddp"),
]
MEMBERS = [
    Case(1, 1, 1, data="none", members=2),
    Case(1, 1, 2, columns=2, members=2, ensemble=2),
    Case(1, 1, 4, columns=2, members=2),
    Case(1, 2, 1, members=2, ensemble=2),
    Case(2, 1, 2, columns=2, members=2),
]
"""Models with noise, whose members are on ranks of their own in some."""


def name(case):
    members = f"-{case.ensemble}of{case.members}" if case.members > 1 else ""
    return f"{case.data}-{case.dp}{case.tensor}{case.domain}{'-columns' * (case.columns > 1)}{members}"


def _experiment(case, save_loc, statistics):
    case = dataclasses.replace(case, micro=SAMPLES // case.dp)
    extra = [
        f"data.statistics={statistics}",
        "inference={init: [2000-01-11T06, 2000-01-12T06, 12h], lead: 12h, batch_size: 2}",
    ]
    if case.members > 1:
        # With the default eps, AdamW divides the smallest gradients of the noise by little more than their rounding.
        extra.append("trainer.optimizer.eps=1e-4")
    return load_experiment(DEMO, [*SETTINGS, *case.settings(), *extra, f"save_loc={save_loc}"])


def _trainer(case, save_loc, statistics):
    experiment = _experiment(case, save_loc, statistics)
    runtime = build.start(experiment)
    return build.build_trainer(build.build_context(experiment, runtime))


def _save(rank, folder, statistics, case):
    """Two steps and a checkpoint; beside it everything whole, gathered by other means than those of the checkpoint."""
    trainer = _trainer(case, folder / name(case), statistics)
    batches = trainer.train_loader.batches(0)
    for step in (1, 2):
        trainer.train_step(
            (next(batches) for _ in range(trainer.schedule.accumulation)), trainer.schedule.accumulation, 1e-2, step
        )
    trainer.state.progress.step = trainer.state.progress.position = 2
    trainer.state.save()
    trainer.manager.wait()
    state = {f"model/{n}": whole(p.detach()) for n, p in trainer.state.parameters.items()}
    for n, p in trainer.state.parameters.items():
        for kind, value in trainer.state.optimizer.state().get(n, {}).items():
            divided = value.shape == getattr(p, "_local_tensor", p).shape
            state[f"optimizer/{kind}/{n}"] = whole_of_shards(value, p) if divided else value
        state[f"ema/{n}"] = whole_of_shards(trainer.state.ema.average[n], p)
    trainer.runtime.close()
    if rank == 0:
        torch.save({n: t.detach().clone() for n, t in state.items()}, _saved(folder, case))


def _saved(folder, case):
    return folder / f"{name(case)}.pt"


def _load(rank, folder, statistics, case, sources):
    """From each source: every piece, bit by bit; then the loss of the next step."""
    trainer = _trainer(case, folder / "nowhere", statistics)
    losses = {}
    for source in sources:
        (newest,) = (folder / name(source) / "checkpoints").glob("step-*")
        trainer.state.restore(Checkpoint.open(newest))
        saved = torch.load(_saved(folder, source), mmap=True)
        for key, piece in trainer.state.pieces().items():
            if key in saved:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True))
                assert torch.equal(piece.local, saved[key][box]), (name(source), key)
        assert trainer.state.progress.step == 2
        batches = trainer.train_loader.batches(0, 2 * trainer.schedule.accumulation)
        micro = (next(batches) for _ in range(trainer.schedule.accumulation))
        losses[source] = float(trainer.train_step(micro, trainer.schedule.accumulation, 1e-2, 3).ready()[0])
    trainer.runtime.close()
    return losses


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """(folder, statistics file)."""
    folder = tmp_path_factory.mktemp("wiring")
    experiment = load_experiment(DEMO, [*SETTINGS, f"save_loc={folder}"])
    assert build.preprocess(experiment) == 0
    return folder, folder / "statistics.nc"


def save(run_ranks, folder, statistics, sources):
    """A checkpoint of each; the whole of every piece is read back from it bit by bit."""
    for source in sources:
        run_ranks(source.world, _save, folder, statistics, source, timeout=900)
        saved = torch.load(_saved(folder, source))
        (newest,) = (folder / name(source) / "checkpoints").glob("step-*")
        checkpoint = Checkpoint.open(newest)
        for key, value in saved.items():
            assert torch.equal(checkpoint.read(key), value), (name(source), key)
        assert {n for n in checkpoint.names() if n.startswith(("optimizer/", "ema/"))} <= set(saved)


def load(run_ranks, folder, statistics, sources, target):
    """The loss of the next step in `target`, which is the same from every source."""
    losses = run_ranks(target.world, _load, folder, statistics, target, sources, timeout=900)
    assert all(found == losses[0] for found in losses)
    values = np.array(list(losses[0].values()))
    np.testing.assert_allclose(values, values[0], rtol=2e-5)
    return values[0]


@pytest.fixture(scope="module")
def every_source(run_ranks, shared, tmp_path_factory):
    """(folder with a checkpoint of every layout, the loss of the next step in one process)."""
    folder = tmp_path_factory.mktemp("every")
    save(run_ranks, folder, shared[1], LAYOUTS)
    return folder, load(run_ranks, folder, shared[1], LAYOUTS, SERIAL)


@pytest.mark.long
def test_from_some_layouts_to_others(run_ranks, shared, tmp_path):
    """Between data, tensor and domain parallel, boxes, DDP and FSDP2; all pairs are among the long tests."""
    sources = [Case(1, 2, 2, columns=2), Case(2, 1, 1, data="ddp")]
    save(run_ranks, tmp_path, shared[1], sources)
    losses = [load(run_ranks, tmp_path, shared[1], sources, target) for target in (Case(2, 1, 2), SERIAL)]
    np.testing.assert_allclose(losses[:-1], losses[-1], rtol=5e-6)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600, func_only=True)  # the ranks that save, in the fixture, have limits of their own
@pytest.mark.parametrize("target", LAYOUTS[1:], ids=name)
def test_from_any_layout_to_any_other(run_ranks, shared, every_source, target):
    """Identical weights and optimiser state; training goes on with the same loss."""
    folder, loss = every_source
    np.testing.assert_allclose(load(run_ranks, folder, shared[1], LAYOUTS, target), loss, rtol=5e-6)


@pytest.mark.long
@pytest.mark.timeout(3600, func_only=True)
def test_from_any_layout_of_members_to_any_other(run_ranks, shared, tmp_path):
    """Boxes, ranks with some of the members, tensor and data parallel, with noise and its weights."""
    save(run_ranks, tmp_path, shared[1], MEMBERS)
    first, *others = (load(run_ranks, tmp_path, shared[1], MEMBERS, target) for target in MEMBERS)
    np.testing.assert_allclose(others, first, rtol=5e-6)


def _rollout(rank, experiment):
    return build.rollout(experiment)


def _forecasts(run_ranks, folder, statistics, cases):
    """The forecast of each case, from the same weights."""
    experiment = _experiment(SERIAL, folder / "first", statistics)
    trainer = build.build_trainer(build.build_context(experiment, build.start(experiment)))
    trainer.state.save()
    trainer.manager.wait()
    for case in cases:
        save_loc = folder / f"forecast-{name(case)}"
        shutil.copytree(folder / "first" / "checkpoints", save_loc / "checkpoints")
        experiment = _experiment(case, save_loc, statistics)
        assert run_ranks(case.world, _rollout, experiment, timeout=900) == [0] * case.world
        yield xr.open_zarr(Path(save_loc) / "forecasts" / "forecast.zarr").load()


def compare(forecasts):
    serial, *others = forecasts
    assert serial.sizes["time"] == 3
    for other in others:
        for variable in serial.data_vars:
            scale = float(abs(serial[variable]).max())
            np.testing.assert_allclose(other[variable], serial[variable], rtol=0, atol=2e-6 * scale, err_msg=variable)


@pytest.mark.slow
def test_forecasts_of_layouts(run_ranks, shared):
    compare(_forecasts(run_ranks, *shared, [SERIAL, Case(1, 1, 2)]))


@pytest.mark.slow
@pytest.mark.long
def test_forecasts_of_every_layout(run_ranks, tmp_path, shared):
    compare(_forecasts(run_ranks, tmp_path, shared[1], LAYOUTS))
