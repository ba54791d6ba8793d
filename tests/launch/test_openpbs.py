"""Scripts executed by the machine's own PBS, where it has one, with a trainer in little; the same with the stand-in.

An OpenPBS needs one node on this machine with two processors, jobs of this user, and a temporary folder that jobs see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from credit_like.errors import UserError
from credit_like.launch.cancel import cancel
from credit_like.launch.resources import Options
from credit_like.launch.status import status
from credit_like.launch.submit import active_jobs, submit
from credit_like.schema.base import parse_duration
from tests.launch.standin import StandIn
from tests.launch.stub.stub_trainer import uninterrupted
from tests.launch.test_chain_standin import python, run_folder_says, write_experiment

pytestmark = pytest.mark.slow
ONE_NODE = ["pbs.nodes=1", "pbs.processes=2", "pbs.cpus=2", "pbs.memory_gb=1"]


def missing() -> str | None:
    """Return why there is no PBS server to ask, or None."""
    if shutil.which("qsub") is None or shutil.which("qstat") is None:
        return "OpenPBS is not installed: no qsub on the PATH"
    answer = subprocess.run(["qstat", "-B"], capture_output=True, text=True, check=False)
    return f"no PBS server answers: {answer.stderr.strip()}" if answer.returncode else None


MISSING = missing()


@pytest.fixture(
    params=[
        pytest.param("stand-in", marks=pytest.mark.long),
        pytest.param("OpenPBS", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING))),
    ]
)
def server(request, tmp_path, monkeypatch) -> Iterator[str]:
    if request.param == "OpenPBS":
        yield request.param
        return
    with StandIn(tmp_path / "pbs") as standin:
        standin.overtime = 120.0  # a job has to stop by itself
        standin.nodefile.write_text("localhost\n")
        monkeypatch.setenv("PATH", standin.path)
        yield request.param


def _ended(run: Path, patience: float = 900.0) -> list[str]:
    """The states of the run's jobs, once the server has none of them."""
    began = time.monotonic()
    while active_jobs(run):
        assert time.monotonic() - began < patience, status(run)
        time.sleep(0.2)
    return [row.state for row in status(run).jobs]


def test_a_chain_ends_with_the_bytes_of_one_job(tmp_path, server):
    file = write_experiment(tmp_path, steps=30, seconds=0.02)
    submit(file, chain=2, overrides=ONE_NODE, python=python(tmp_path))
    states = _ended(tmp_path / "run")
    assert run_folder_says(tmp_path / "run") == ("finished", 30, uninterrupted(30))
    assert states == ["finished, exit status 0", "not needed: finished at step 30"]


def test_a_job_that_reaches_its_walltime_is_continued(tmp_path, server):
    """It stops by itself before that, and its successor begins with its checkpoint."""
    steps, seconds, walltime = {"stand-in": (130, 0.1, "10s"), "OpenPBS": (600, 0.2, "70s")}[server]
    file = write_experiment(tmp_path, steps=steps, seconds=seconds)
    options = Options(walltime=parse_duration(walltime))
    submit(file, options=options, chain="auto", overrides=ONE_NODE, python=python(tmp_path))
    states = _ended(tmp_path / "run")
    assert run_folder_says(tmp_path / "run") == ("finished", steps, uninterrupted(steps))
    assert len(states) >= 2
    assert states[0].startswith("continue")


def test_cancel_leaves_no_job(tmp_path, server):
    file = write_experiment(tmp_path, steps=100_000, seconds=0.05)
    plan = submit(file, chain=3, overrides=ONE_NODE, python=python(tmp_path))
    assert {outcome.job for outcome in cancel(tmp_path / "run")} == set(plan.ids)
    _ended(tmp_path / "run")


def test_a_job_to_wait_for_must_be_known(tmp_path, server):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    with pytest.raises(UserError, match=r"--after: expected jobs that the scheduler knows, got 987654321"):
        submit(file, overrides=ONE_NODE, after=["987654321"], python=python(tmp_path))
    assert not os.path.exists(tmp_path / "run" / "jobs")
