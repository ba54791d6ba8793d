"""The trainer itself in jobs: a chain of killed jobs ends with the weights of one job that was left alone."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from credit_like import build
from credit_like.launch.resources import Options
from credit_like.launch.status import status
from credit_like.launch.submit import submit
from credit_like.schema.load import load_experiment
from tests.faults import harness
from tests.launch.standin import StandIn

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
EPOCHS, STEPS_PER_EPOCH = 3, 9

EXPERIMENT = f"""
name: tiny
seed: 1
save_loc: SAVE_LOC
data:
  source: {{type: synthetic, steps: 60}}
  timestep: 6h
  levels: [1, 2]
  prognostic: {{level: [u, v, height], surface: [column_water]}}
  static: {{surface: [orography]}}
  train: [2000-01-01, 2000-01-10]
  valid: [2000-01-11, 2000-01-12]
  test: [2000-01-13, 2000-01-15]
model:
  type: wxformer
  dim: [16, 32, 64, 128]
  depth: [1, 1, 1, 1]
  dim_head: 16
  cross_embed_kernel_sizes: [[4, 8], [2, 4], [2, 4], [2, 4]]
  global_window_size: [4, 4, 2, 1]
  local_window_size: 2
  padding_conf: {{activate: true, mode: earth, pad_lat: [0, 0], pad_lon: [16, 16]}}
trainer:
  parallelism: {{data: ddp}}
  global_batch_size: 4
  micro_batch_size: 2
  epochs: {EPOCHS}
  valid_batches: 1
  use_ema: true
  checkpoint: {{every: 2, keep: 2}}
inference: {{init: [2000-01-13, 2000-01-14, 12h], lead: 12h}}
evaluation: {{metrics: [rmse, bias]}}
pbs: {{nodes: 2, ngpus: 0, processes: 1, walltime: "00:10:00", environment: {{OMP_NUM_THREADS: "1"}},
      rollout: {{nodes: 2, processes: 1}}}}
"""


def write(folder: Path, name: str, site: str) -> Path:
    file = folder / f"{name}.yml"
    file.write_text(EXPERIMENT.replace("SAVE_LOC", str(folder / name)) + f"site: {site}\n")
    return file


def here(folder: Path) -> str:
    """This Python, with the package of this checkout, for jobs that start with an empty environment."""
    wrapper = folder / "python"
    cache = os.environ.get("CREDIT_LIKE_CACHE") or Path.home() / ".cache" / "credit_like"
    exports = f"export CREDIT_LIKE_CACHE={cache} PYTHONPATH={ROOT}"
    wrapper.write_text(f'#!/bin/bash\n{exports}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return str(wrapper)


def trained(save_loc: Path) -> int:
    """Optimiser steps logged so far."""
    path = save_loc / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


def weights(save_loc: Path) -> dict:
    """Every array of the last checkpoint: model, moving average and optimiser."""
    last = max((save_loc / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    assert last.name == f"step-{EPOCHS * STEPS_PER_EPOCH}"
    arrays = {}
    for path in sorted(last.rglob("*.safetensors")):
        arrays |= {f"{path.relative_to(last)}:{name}": array for name, array in load_file(path).items()}
    assert any("ema" in name for name in arrays)
    return arrays


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    differ = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    assert differ == []


def left_alone(rank, world, port, save_loc, section) -> int:
    """Train as one process of a job that nothing ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return build.train(load_experiment(section["file"]))


@pytest.mark.long
def test_three_jobs_end_as_one(tmp_path, monkeypatch):
    """On two nodes; the first job's walltime ends with SIGTERM, the second is killed in mid-step, the third finishes.

    The walltimes end at steps and not at times, so that the test does not depend on the speed of the machine; clocks are
    in the tests with the trainer in little.
    """
    monkeypatch.setenv("PATH", f"{tmp_path / 'pbs' / 'bin'}:{os.environ['PATH']}")
    python = here(tmp_path)
    whole, chained = tmp_path / "whole", tmp_path / "chained"
    job = harness.Job(whole, {"file": str(write(tmp_path, "whole", "generic-pbs"))}, 2, body=left_alone)
    assert job.wait()
    assert job.end() == [0, 0], whole.with_suffix(".0.out").read_text()
    with StandIn(tmp_path / "pbs", kill_delay=120.0) as pbs:
        ids = [f"{pbs.first + i}.standin" for i in range(3)]
        ends, begun = {ids[0]: "TERM", ids[1]: "KILL"}, {}

        def over(job: str) -> str | None:
            """End a job five steps after those of the jobs before it, of which there may be a few more on a busy machine."""
            return ends.get(job) if trained(chained) >= begun.setdefault(job, trained(chained)) + 5 else None

        pbs.over = over
        assert list(submit(write(tmp_path, "chained", "generic-pbs"), chain=3, python=python).ids) == ids
        jobs = pbs.wait()
    assert [jobs[job]["code"] for job in ids] == [0, -9, 0], pbs.outputs
    assert pbs.killed == [ids[1]]
    assert json.loads((chained / "status.json").read_text())["state"] == "finished"
    assert "to be continued" in pbs.outputs[ids[0]]
    assert_same_weights(whole, chained)


STOPPING = """
import os
import signal
from pathlib import Path
from typing import Literal

from credit_like.schema.base import Section


class Config(Section):
    type: Literal["stopping"] = "stopping"
    once: str


def learning_rate(config, base, step, total_steps):
    if step == 9 and not Path(config.once).exists():
        Path(config.once).touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return base
"""


def test_whole_path_on_this_machine(tmp_path):
    """Train in several jobs, forecast in an array, score: the same scripts, at site local, without a scheduler.

    On one node, since two are in the test above. The first job is asked to stop at a step and not at a time, so that the test
    does not depend on the machine's speed.
    """
    file, python = write(tmp_path, "run", "local"), here(tmp_path)
    (tmp_path / "parts" / "schedulers").mkdir(parents=True)
    (tmp_path / "parts" / "schedulers" / "stopping.py").write_text(STOPPING)
    text = file.read_text().replace("trainer:\n", f"plugins: [{tmp_path / 'parts'}]\ntrainer:\n")
    text = text.replace("pbs: {nodes: 2", "pbs: {nodes: 1")
    file.write_text(text.replace("  use_ema", f"  scheduler: {{type: stopping, once: {tmp_path / 'once'}}}\n  use_ema"))
    submit(file, "preprocess", python=python)
    submit(file, chain="auto", python=python)
    run = status(tmp_path / "run")
    assert (run.state, run.step, run.checkpoint) == ("finished", EPOCHS * STEPS_PER_EPOCH, EPOCHS * STEPS_PER_EPOCH)
    trainings = [row for row in run.jobs if row.mode == "train"]
    assert len(trainings) >= 2
    assert trainings[0].state == "continue, exit status 0"
    forecasts = submit(file, "rollout", python=python)
    assert (len(forecasts.ids), forecasts.shares) == (2, 2)
    submit(file, "evaluate", python=python)
    modes = [(row.mode, row.state) for row in status(tmp_path / "run").jobs if row.mode not in ("train", "preprocess")]
    assert modes == [("rollout", "done, exit status 0")] * 2 + [("evaluate", "done, exit status 0")]
    with pytest.raises(ValueError, match="finished at step"):
        submit(file, options=Options(nodes=1), overrides=["trainer.parallelism.data=none"], python=python)
