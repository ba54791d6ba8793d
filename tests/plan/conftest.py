"""A small WXFormer for any combination of two tensor ranks, two bands and replicas; simulated and really run."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from credit_like.parallel.runtime import Runtime
from credit_like.plan import simulate as simulation
from credit_like.plan.layouts import with_layout
from credit_like.plan.meter import Meter
from credit_like.plan.replay import Recipes
from tests.training.without_data import global_grid, trainer_without_data
from tests.training.without_data import small_experiment as experiment_on

GRID = global_grid(64, 128)


def experiment(**trainer):
    """64 × 128 points, 3 prognostic channels and one diagnostic; `forecast_len` belongs to data, the rest to trainer."""
    return experiment_on(
        GRID,
        {
            "prognostic": {"level": ["height"], "surface": ["column_water"]},
            "diagnostic": {"surface": ["precipitation"]},
            "forecast_len": trainer.pop("forecast_len", 1),
        },
        model={
            "type": "wxformer",
            "depth": [1, 1, 2, 1],
            "dim_head": 4,
            "use_spectral_norm": True,
            **trainer.pop("model", {}),
        },
        loss=trainer.pop("loss", {"type": "mse"}),
        trainer={
            "parallelism": {"data": "fsdp2"},
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "use_ema": True,
            **trainer,
        },
    )


def _trainer(chosen, layout):
    """Build it as training does, with real memory and without data."""
    chosen = with_layout(chosen, layout)
    runtime = Runtime.start(layout.parallelism, torch.device("cpu"))
    trainer, sample = trainer_without_data(chosen, GRID, runtime)
    samples = [copy.deepcopy(sample) for _ in range(trainer.schedule.accumulation)]
    for sample in samples:
        for fields in (sample.prognostic, sample.forcing, sample.target):
            fields.normal_()
    return trainer, samples


def real(rank, chosen, layout):
    """A step on real tensors, twice: counted while torch's allocator is watched, and with torch's counter of operations."""
    trainer, samples = _trainer(chosen, layout)
    meter = Meter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        before = simulation.measured_step(trainer, iter(samples), len(samples), meter)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(iter(samples), len(samples), 1e-3, 2)
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [size for _, size in sorted(events, key=lambda event: event[0])]
    # DDP allocates the memory of gradients on construction, before the allocator is watched.
    buckets = before[simulation.PARAMETERS] if layout.data == "ddp" else 0
    return SimpleNamespace(
        messages=dict(meter.messages),
        kept=before,
        peak=sum(before.values()) + meter.peak,
        allocated=sum(before.values()) + buckets + int(np.cumsum(changes).max()),
        flops=counter.get_total_flops(),
    )


def simulated(rank, chosen, layout, which, recipes=None, gpu=False):
    return simulation.simulate(chosen, layout, which, GRID, gpu=gpu, recipes=recipes)


def _learning(rank, chosen, layout, which, known, gpu):
    recipes = Recipes(known)
    return simulated(rank, chosen, layout, which, recipes, gpu), recipes.learnt


@pytest.fixture(scope="session")
def small_experiment():
    return experiment


@pytest.fixture
def small():
    return SimpleNamespace(experiment=experiment, grid=GRID, real=real, simulated=simulated)


@pytest.fixture(scope="module")
def known():
    """Cached operations of earlier simulations, which the simulations of a plan share too."""
    return {}


@pytest.fixture
def simulate(run_ranks, known):
    """Return simulate(experiment, layout, rank, gpu), which simulates a rank in a process of its own."""

    def run(chosen, layout, rank=0, gpu=False):
        ((plan, learnt),) = run_ranks(1, _learning, chosen, layout, rank, known, gpu)
        known.update(learnt)
        return plan

    return run
