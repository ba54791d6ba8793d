"""SIGKILL of ranks and of torchrun's agent in the midst of training: all processes end in time, and the run goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.faults import harness
from tests.integration import test_restart

SETTINGS = ["trainer.parallelism={data: ddp}", "inference.init=null", "inference.lead=12h"]
WHAT = ("agent", "rank", "all ranks")
PATIENCE = harness.HANG
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
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=section["ranks"], run_id="killed", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=section.get("restarts", 0), monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    try:
        elastic_launch(config, section.get("rank", rank))(save_loc)
    except ChildFailedError:
        return 1
    return 0


def workers(agent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class Kill:
    """What was killed after the first step of a start, and the seconds until no process of the start was left."""

    what: str
    seconds: float


def wait_for_steps(run: Path, job: harness.Job, count: int) -> None:
    """Until this start has logged `count` steps, so that there are new checkpoints on a busy machine too, or has ended."""
    path, goal = run / "log.jsonl", max(harness.steps(run / "checkpoints"), default=0) + count
    before = path.read_text() if path.exists() else ""
    while not job.wait(0.01):
        text = path.read_text() if path.exists() else ""
        *_, newest = ["", *text.rpartition("\n")[0].splitlines()]
        if (
            text != before and newest and json.loads(newest)["step"] >= goal
        ):  # the rows of steps to be repeated go first
            return


def end(agent_pid: int, ranks: list[int], what: str, rng: random.Random) -> None:
    victims = {"agent": [agent_pid], "rank": [rng.choice(ranks)], "all ranks": ranks}[what]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def wait_for_the_end(job: harness.Job, ranks: list[int], said: Path) -> int:
    """Return the exit code of the agent when it and all ranks have ended."""
    assert job.wait(PATIENCE), f"the agent did not end\n{said.read_text()[-3000:]}"
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in ranks if is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} did not end\n{said.read_text()[-3000:]}"
        time.sleep(0.01)
    (code,) = job.end()
    assert code in (0, 1, -signal.SIGKILL), said.read_text()[-3000:]
    return code


def killed(tmp_path: Path, ranks: int, kills: int) -> list[Kill]:
    """Kill ranks and agents in turn, each in a new start; then let the run end, and compare it with a whole one."""
    test_restart.whole(tmp_path / "whole", SETTINGS, ranks)
    seed = int(os.environ.get("CREDIT_LIKE_SEED", "0"))
    rng, done, runs = random.Random(seed + ranks), list[Kill](), 0
    while len(done) < kills:
        run = tmp_path / f"run-{runs}"
        runs += 1
        for _ in range(kills + 1):
            job = harness.Job(run, {"ranks": ranks}, body=agent)
            pid, what = job.processes[0].pid, WHAT[len(done) % len(WHAT)]
            if len(done) < kills:
                wait_for_steps(run, job, rng.randint(1, 5))
                time.sleep(rng.uniform(0, 0.2))
            began, victims = time.monotonic(), workers(pid)
            is_kill = len(done) < kills and len(victims) == ranks
            if is_kill:
                end(pid, victims, what, rng)
            said = run.with_suffix(".0.out")
            code = wait_for_the_end(job, victims, said)
            assert is_kill or code == 0, said.read_text()[-3000:]
            if is_kill and code:  # else the run had just ended
                done.append(Kill(what, time.monotonic() - began))
                print(f"kill {len(done)}, {ranks} ranks, {what}: {done[-1].seconds:.1f} s", flush=True)
            if code == 0:
                break
        harness.assert_same(run, tmp_path / "whole")
        shutil.rmtree(run)
    report(ranks, done, runs)
    return done


def report(ranks: int, done: list[Kill], runs: int) -> None:
    for what in WHAT:
        seconds = sorted(kill.seconds for kill in done if kill.what == what)
        if seconds:
            median, longest = seconds[len(seconds) // 2], seconds[-1]
            print(
                f"{ranks} ranks, {what} killed: {len(seconds)} times; all ended after {median:.1f} s (at most {longest:.1f} s)"
            )
    print(f"{ranks} ranks: {len(done)} kills in {runs} runs, each as never interrupted; no process left")


@pytest.mark.slow
def test_a_few_kills_of_ranks_and_agents(tmp_path) -> None:
    killed(tmp_path, 2, 2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_kills_of_ranks_and_agents(tmp_path, ranks) -> None:
    """CREDIT_LIKE_KILLS of them, 100 if that is not set, at instants of CREDIT_LIKE_SEED.

    `-s` shows how many there were of each kind.
    """
    killed(tmp_path, ranks, int(os.environ.get("CREDIT_LIKE_KILLS", "100")))
