"""SIGKILL at random instants: nothing is lost, nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.faults import harness

SECTION = {"epochs": 2, "checkpoint": {"every": 2, "keep": 2}, "micro_batch_size": 1, "global_batch_size": 4}
LAYOUTS = [(1, "none"), (2, "fsdp2"), (4, "fsdp2"), (2, "ddp")]


def many_kills(
    tmp_path, world: int, data: str, kills: int, within: float, one: bool = False, ensemble: int = 1, **more
) -> harness.Counts:
    """Run after run until there were `kills`; each run must end as the uninterrupted one."""
    section = {**SECTION, "parallelism": {"data": data, "ensemble": ensemble}, **more}
    harness.reference(tmp_path / "whole", section, world)
    rng, total, run = random.Random(world), harness.Counts(), 0
    while total.kills < kills:
        killed = tmp_path / f"killed-{run}"
        counts = harness.torment(killed, section, world, rng, kills - total.kills, within, one)
        harness.assert_same(killed, tmp_path / "whole")
        total.kills, total.in_save, run = total.kills + counts.kills, total.in_save + counts.in_save, run + 1
    print(f"{world} ranks, {data}: {total.kills} kills, {total.in_save} of them inside a save, {run} runs, no loss")
    return total


@pytest.mark.parametrize(("world", "data"), [(1, "none"), pytest.param(2, "fsdp2", marks=pytest.mark.slow)])
def test_a_few_kills_leave_the_run_bitwise_as_if_never_interrupted(tmp_path, world, data, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.005")
    many_kills(tmp_path, world, data, kills=4, within=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "data", "kills"),
    [
        (2, "fsdp2", 12),
        *(pytest.param(*case, {1: 60, 2: 25, 4: 20}[case[0]], marks=pytest.mark.long) for case in LAYOUTS),
    ],
)
def test_a_hundred_kills(tmp_path, world, data, kills, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.005")
    total = many_kills(tmp_path, world, data, kills, within=1.0 + 0.5 * world)
    assert total.in_save > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "data", "ensemble"),
    [(2, "fsdp2", 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, "none", 1), (4, "ddp", 2)))],
)
def test_members_are_the_same_after_kills(tmp_path, world, data, ensemble, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.005")
    members = {"members": 4, "loss": {"type": "crps"}, "forecast_len": 2}
    many_kills(tmp_path, world, data, 4, 1.0 + 0.5 * world, ensemble=ensemble, **members)


@pytest.mark.slow
def test_one_rank_killed_ends_the_others_and_the_run_goes_on_after(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.005")
    many_kills(tmp_path, 2, "fsdp2", kills=4, within=2.0, one=True)


@pytest.mark.long
def test_kill_minus_nine_of_a_program_started_from_a_shell(tmp_path) -> None:
    """The same without forks: a fresh interpreter, two kills, the same command each time."""
    environment = {**os.environ, "PAUSE": "0.02", "OMP_NUM_THREADS": "1"}

    def start(folder):
        command = [sys.executable, "-W", "error", "-m", "tests.faults.tiny", str(folder), json.dumps(section)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    section = {"checkpoint": {"every": 2}}
    harness.reference(tmp_path / "whole", section)
    rng = random.Random(5)
    for _ in range(2):
        before = harness.rows(tmp_path / "killed") if (tmp_path / "killed" / "log.jsonl").exists() else []
        process = start(tmp_path / "killed")
        # Wait until it has moved on, so that every kill is in the middle of training.
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            path = tmp_path / "killed" / "log.jsonl"
            if path.exists() and path.stat().st_size and len(path.read_bytes().splitlines()) != len(before):
                break
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "killed").wait(900) == 0
    harness.assert_same(tmp_path / "killed", tmp_path / "whole")
