"""SIGKILL of ranks and of torchrun's agent in the midst of training: all processes end in time, and the run goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults import harness
from tests.faults.test_peers import workers
from tests.integration import test_restart

SETTINGS = ["trainer.parallelism={data: ddp}", "inference.init=null", "inference.lead=12h"]
PATIENCE = 200
"""Seconds until the last process has ended: a limit for hangs on a busy machine."""


def rank(save_loc: str) -> None:
    """Train as one process of a launch."""
    from credit_like import cli

    values = [*test_restart.TINY, *SETTINGS, f"save_loc={save_loc}"]
    status: object = 0
    try:
        cli.main(["train", str(test_restart.DEMO), *(part for value in values for part in ("--set", value))])
    except SystemExit as end:
        status = end.code
    if status:  # else the agent waits for what this function returns
        os._exit(status if isinstance(status, int) else 1)


def agent(number, world, port, save_loc, section) -> int:
    """Be torchrun's agent: the same code, with ranks that are forked instead of started from a command."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=section["ranks"], run_id="killed", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    try:
        elastic_launch(config, rank)(save_loc)
    except ChildFailedError:
        return 1
    return 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def killed(tmp_path: Path, ranks: int, kills: int) -> None:
    """Kill one process after another, each in a new start; then let the run end, and compare it with a whole one."""
    test_restart.whole(tmp_path / "whole", SETTINGS, ranks)
    rng, done, runs = random.Random(ranks), 0, 0
    while done < kills:
        run = tmp_path / f"run-{runs}"
        runs += 1
        for _ in range(kills + 1):
            job = harness.Job(run, {"ranks": ranks}, body=agent)
            if done < kills:
                test_restart.wait_for_a_step(run, job)
                time.sleep(rng.uniform(0, 0.5))
            victims = workers(job.processes[0].pid)
            if done < kills and len(victims) == ranks:
                # Agent and ranks in turn, so that a few kills have both.
                os.kill(job.processes[0].pid if done % 2 else rng.choice(victims), signal.SIGKILL)
                done += 1
            said = run.with_suffix(".0.out")
            assert job.wait(PATIENCE), f"the agent did not end\n{said.read_text()[-3000:]}"
            deadline = time.monotonic() + PATIENCE
            while left := [pid for pid in victims if is_running(pid)]:
                assert time.monotonic() < deadline, f"{left} did not end\n{said.read_text()[-3000:]}"
                time.sleep(0.05)
            (code,) = job.end()
            assert code in (0, 1, -signal.SIGKILL), said.read_text()[-3000:]
            if code == 0:
                break
        harness.assert_same(run, tmp_path / "whole")


@pytest.mark.slow
def test_a_few_kills_of_ranks_and_agents(tmp_path) -> None:
    killed(tmp_path, 2, 2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_kills_of_ranks_and_agents(tmp_path, ranks) -> None:
    killed(tmp_path, ranks, 100)
