"""A start that fails before its ranks have met: one message, on the terminal and in `status.json`."""

from __future__ import annotations

import datetime as dt
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from credit_like.errors import RunError
from credit_like.parallel import blame
from credit_like.parallel.environment import Environment, local_launch
from credit_like.parallel.rendezvous import join
from tests.experiments import DEMO
from tests.integration.test_restart import TINY
from tests.launch.slurm import free_ports

ROOT = Path(__file__).parents[2]


def rank(folder: Path, number: int, world: int, port: int, monkeypatch) -> subprocess.Popen:
    """Start one rank of a training, as srun or mpiexec does."""
    for key, value in local_launch(number, world, port).items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    values = [*TINY, f"save_loc={folder / 'run'}", "trainer.timeout=5s", "trainer.parallelism={data: ddp}"]
    values += ["inference.init=null", "inference.lead=12h", "trainer.global_batch_size=6", "trainer.micro_batch_size=1"]
    command = [sys.executable, "-m", "credit_like.cli", "train", str(DEMO)]
    command += [part for value in values for part in ("--set", value)]
    with (folder / f"{number}.out").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def said_once(folder: Path, number: int, part: str) -> None:
    said = (folder / f"{number}.out").read_text()
    assert "Traceback" not in said, said
    assert said.count(part) == 1, said
    status = json.loads((folder / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert part in status["reason"]
    assert status["reason"] in said


@pytest.mark.slow
def test_a_rank_that_never_comes(tmp_path, monkeypatch) -> None:
    job = rank(tmp_path, 0, 2, free_ports(1)[0], monkeypatch)
    assert job.wait(900) == 1
    said_once(tmp_path, 0, "expected 2 ranks at 127.0.0.1:")


@pytest.mark.slow
@pytest.mark.long
def test_a_first_rank_that_never_comes(tmp_path, monkeypatch) -> None:
    job = rank(tmp_path, 1, 2, free_ports(1)[0], monkeypatch)
    assert job.wait(900) == 1
    said_once(tmp_path, 1, "expected 2 ranks at 127.0.0.1:")


@pytest.mark.slow
@pytest.mark.long
def test_a_port_that_is_taken(tmp_path, monkeypatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        began = time.monotonic()
        job = rank(tmp_path, 0, 2, other.getsockname()[1], monkeypatch)
        assert job.wait(900) == 1
        said_once(tmp_path, 0, "expected a free port at 127.0.0.1, got ")
        assert time.monotonic() - began < 300


@pytest.mark.parametrize("joining", [True, False])
def test_a_store_that_could_not_be_reached_is_not_sought_again(joining, monkeypatch) -> None:
    """Each attempt takes seconds, before the message is shown."""
    tries = []

    def refuse(*_, **__):
        tries.append(True)
        raise dist.DistNetworkError("timed out while trying to connect")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    monkeypatch.setattr(blame, "_out_of_reach", None)
    place, cause = Environment(1, 2, port=free_ports(1)[0]), blame.Cause(1, "expected 2 ranks")
    if joining:
        with pytest.raises(RunError, match="expected 2 ranks at"):
            join(place, torch.device("cpu"), dt.timedelta(seconds=1))
    for _ in range(2):
        assert blame.claim(cause, place) == (cause, None)
    assert len(tries) == 1
