"""The real thing, killed and moved: embedded data, WXFormer with spectral norm, loader workers, the trainer."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from credit_like import build
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, SHORT
from tests.faults import harness

TINY = [
    *SHORT,
    BANDED_MODEL,
    "trainer.device=cpu",
    "trainer.epochs=2",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=1",
    "trainer.shift_longitude=true",
    "trainer.use_ema=true",
    "trainer.scheduler.warmup_steps=2",
    "trainer.checkpoint={every: 2, keep: 2}",
]
PHASES = [
    "trainer.phases=[{epochs: 1, batches_per_epoch: 3}, {epochs: 1, batches_per_epoch: 4, forecast_len: 3, backprop_steps: 2, "
    "global_batch_size: 2, optimizer: {type: muon, learning_rate: 0.001}, loss: {type: sum, terms: [{loss: {type: mse}}, "
    "{weight: 0.1, loss: {type: spectral}}]}, scheduler: {warmup_steps: 0}}]",
]
ROLLOUT = ["data.forecast_len=2", "trainer.batches_per_epoch=5"]


def train(rank, world, port, save_loc, section) -> int:
    """Run one rank to its end."""
    return build.train(load_experiment(DEMO, [*TINY, *section, f"save_loc={save_loc}"]))


def held(number: int):
    """Train as well, but wait in optimiser step `number`."""

    def body(rank, world, port, save_loc, section) -> int:
        harness.hold_at(number, save_loc)
        return train(rank, world, port, save_loc, section)

    return body


def whole(folder: Path, section: list[str], world: int = 1) -> None:
    job = harness.Job(folder, section, world, body=train)
    assert job.wait(), Path(folder).with_suffix(".0.out").read_text()[-4000:]
    assert job.end() == [0] * world, Path(folder).with_suffix(".0.out").read_text()[-4000:]


def wait_for_a_step(folder: Path, job: harness.Job) -> None:
    """Until this start has logged something new, or has ended."""
    path = folder / "log.jsonl"
    before = path.stat().st_mtime_ns if path.exists() else 0
    while not job.wait(0.01):
        if path.exists() and path.stat().st_mtime_ns > before and path.stat().st_size:
            return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "moments"),
    [
        pytest.param(["trainer.loader.num_workers=1"], 5, id="workers", marks=pytest.mark.long),
        pytest.param([*PHASES, "trainer.loader.num_workers=1"], 5, id="phases", marks=pytest.mark.long),
        pytest.param(
            [*ROLLOUT, "trainer.optimizer={type: muon, learning_rate: 0.001}"],
            3,
            id="rollout-muon",
            marks=pytest.mark.long,
        ),
    ],
)
def test_kill_minus_nine_at_some_moments(tmp_path, section, moments) -> None:
    whole(tmp_path / "whole", section)
    rng, kills = random.Random(0), 0
    for start in range(moments):
        job = harness.Job(tmp_path / "killed", section, body=held(3 * start + 3) if start < 2 else train)
        wait_for_a_step(tmp_path / "killed", job)
        time.sleep(rng.uniform(0.0, 0.4))
        if job.processes[0].is_alive():
            job.signal(signal.SIGKILL)
            kills += 1
        job.end()
    whole(tmp_path / "killed", section)
    assert kills >= 2
    harness.assert_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("extra", [[], PHASES, ROLLOUT], ids=["single", "phases", "rollout"])
def test_moved_through_every_kind_of_layout(tmp_path, extra) -> None:
    """Stopped after some steps in each: the curve of one process, to rounding."""
    layouts = [
        (1, "{data: none}", "trainer.loader.num_workers=2"),
        (2, "{data: none, tensor: 2}", "trainer.loader.num_workers=0"),
        (2, "{data: none, domain: 2}", "trainer.loader.num_workers=0"),
        (4, "{data: fsdp2, domain: 2}", "trainer.loader.num_workers=0"),
        (2, "{data: ddp}", "trainer.loader.num_workers=1"),
        (4, "{data: fsdp2, tensor: 2}", "trainer.loader.num_workers=0"),
    ]
    whole(tmp_path / "whole", extra)
    for number, (world, parallelism, workers) in enumerate(layouts):
        section = [*extra, f"trainer.parallelism={parallelism}", workers]
        if number < len(layouts) - 1:
            # The first boundary after the first step of this start.
            job = harness.Job(tmp_path / "moved", section, world, body=train)
            wait_for_a_step(tmp_path / "moved", job)
            if job.processes[0].is_alive():
                job.signal(signal.SIGUSR1, 0)
            assert job.wait()
            assert job.end() == [0] * world, (tmp_path / "moved.0.out").read_text()[-4000:]
        else:
            whole(tmp_path / "moved", section, world)
    a, b = (harness.rows(tmp_path / name) for name in ("whole", "moved"))
    assert [row["step"] for row in a] == [row["step"] for row in b]
    losses = [np.array([row.get("loss", row.get("valid_loss")) for row in rows]) for rows in (a, b)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(losses[1][:3], losses[0][:3], rtol=5e-6)
