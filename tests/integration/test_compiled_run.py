"""`train` and `rollout` of a compiled experiment: no graph is broken or given up, and the numbers are those of eager."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
import xarray as xr

from credit_like import build
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, SHORT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

SETTINGS = [
    *SHORT,
    BANDED_MODEL,
    "data.forecast_len=2",
    "trainer.device=cpu",
    "trainer.epochs=2",
    "trainer.batches_per_epoch=2",
    "trainer.valid_batches=1",
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=1",
    "trainer.scheduler.warmup_steps=1",
    "trainer.monitor={every: 1, init: 3, lead: 12h, share: 0.99}",
    "physics=[{type: clip, variables: [precipitation]}]",
    # Other batch sizes than in training: three together, then two.
    "inference={init: [2000-01-11T06, 2000-01-13T06, 12h], lead: 12h, batch_size: 3}",
]


def _rows(folder):
    """The loss, norm of gradients and scores of every step and validation."""

    def numbers(value):
        if isinstance(value, dict):
            return {k: numbers(v) for k, v in value.items() if k not in NOT_COMPARED}
        return value

    return [numbers(json.loads(line)) for line in (folder / "log.jsonl").read_text().splitlines()]


NOT_COMPARED = {"samples_per_second", "data_wait", "memory_mib", "seconds", "time"}


def _run(rank, folder, settings):
    """Train and forecast, without compilation and with it."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for how in ("eager", "compiled"):
        experiment = load_experiment(
            DEMO,
            [*SETTINGS, *settings, f"save_loc={folder}/{how}", f"trainer.compile={str(how == 'compiled').lower()}"],
        )
        assert build.train(experiment) == 0
        assert build.rollout(experiment) == 0
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


CASES = {
    "one": {},
    "fsdp2": {"data": "fsdp2"},
    "tensor": {"data": "fsdp2", "tensor": 2},
    "domain": {"data": "fsdp2", "domain": 2},
    "columns": {"data": "ddp", "domain": [1, 2]},
    "ensemble": {"data": "ddp", "ensemble": 2},
}
MORE = {
    "ensemble": ["trainer.members=2", "loss={type: crps}", "model.noise={channels: 2}", "inference.ensemble.members=2"],
}


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [
        ("one", False),
        ("fsdp2", True),
        ("fsdp2", False),
        ("tensor", True),
        ("domain", True),
        ("columns", False),
        ("ensemble", True),
    ],
)
def test_train_and_rollout_are_compiled_throughout(run_ranks, tmp_path, layout, checkpointing):
    settings = [
        f"trainer.parallelism={json.dumps(CASES[layout])}",
        f"trainer.activation_checkpoint={str(checkpointing).lower()}",
        *MORE.get(layout, []),
    ]
    graphs = run_ranks(2 if CASES[layout] else 1, _run, str(tmp_path), settings, timeout=3500)
    assert min(graphs) >= 10
    eager, compiled = (_rows(tmp_path / how) for how in ("eager", "compiled"))
    assert len(eager) == len(compiled) >= 6
    for a, b in zip(eager, compiled, strict=True):
        _same(a, b)
    with _forecasts(tmp_path / "eager") as a, _forecasts(tmp_path / "compiled") as b:
        assert a.data_vars
        for name in a.data_vars:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-4 * float(abs(a[name]).max()))


def _forecasts(folder):
    (store,) = folder.rglob("*.zarr")
    return xr.open_zarr(store)


def _same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            _same(value, b[key])
    elif isinstance(a, float | list):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)  # a correlation may be next to zero
    else:
        assert b == a
