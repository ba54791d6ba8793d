"""A rank that fails under torchrun, srun or mpiexec: one cause, on the terminal and in `status.json`, and all processes end."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import harness
from tests.faults.planted import ERRORS, MOMENTS
from tests.faults.test_agents import PATIENCE, is_running
from tests.launch import slurm as local_slurm

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m", "tests.faults.planted"]


def torchrun(request) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *PYTHON[1:]], {}


def srun(request) -> tuple[list[str], dict[str, str]]:
    """Two tasks on one node, whose name is no host's."""
    cluster = request.getfixturevalue("cluster")
    return ["srun", "--nodes=1", "--ntasks=2", "--kill-on-bad-exit=1", *PYTHON], {**cluster.environ, **here()}


def mpiexec(request) -> tuple[list[str], dict[str, str]]:
    if shutil.which("mpiexec") is None:
        pytest.skip("mpiexec is not installed (apt-get install openmpi-bin)")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpiexec", *as_root, "--oversubscribe", "-n", "2", *PYTHON], here()


def here() -> dict[str, str]:
    (port,) = local_slurm.free_ports(1)
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


LAUNCHERS = {"torchrun": torchrun, "srun": srun, "mpiexec": mpiexec}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if local_slurm.missing() is not None:
        pytest.skip(str(local_slurm.missing()))
    with local_slurm.Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def launched(folder: Path, command: list[str], environment: dict[str, str]) -> tuple[int, str, float]:
    """Return the exit status of a launcher and what it and its ranks have said, when all of them have ended.

    And the seconds from the planted error to that end in which they did nothing but wait.
    """
    with (folder / "said").open("w+") as said:
        job = subprocess.Popen(
            command, stdout=said, stderr=said, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
        )

        def pids() -> list[int]:
            written = [path.read_text() for path in folder.glob("run.*.pid")]
            return [job.pid, *(int(text) for text in written if text)]

        with harness.Waiting(pids) as waiting:
            try:
                code = job.wait(600)  # three interpreters may start slowly
            finally:
                job.kill()
            deadline = time.monotonic() + PATIENCE
            for path in folder.glob("run.*.pid"):
                while is_running(int(path.read_text())):
                    told = f"{path.name} did not end\n{(folder / 'said').read_text()[-3000:]}"
                    assert time.monotonic() < deadline, told
                    time.sleep(0.05)
    return code, (folder / "said").read_text(), waiting.since(float((folder / "run.planted").read_text()))


CASES = list(itertools.product(LAUNCHERS, MOMENTS, range(2), ERRORS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "moment", "rank", "error"),
    [
        case if case == ("torchrun", "step", 1, "read") else pytest.param(*case, marks=pytest.mark.long)
        for case in CASES
    ],
)
def test_one_cause_under_each_launcher(tmp_path, request, launcher, moment, rank, error) -> None:
    """`-s` shows how long they wait from the error to the end of the last process."""
    command, environment = LAUNCHERS[launcher](request)
    run, words = tmp_path / "run", str(ERRORS[error].args[0])
    code, said, waited = launched(tmp_path, [*command, str(run), str(rank), moment, error], environment)
    print(f"{launcher}, rank {rank}, {moment}, {error}: waited {waited:.1f} s, load {os.getloadavg()[0]:.0f}")
    assert waited < harness.LIMIT
    assert code != 0
    assert len(list(tmp_path.glob("run.*.pid"))) == 2
    assert said.count(words) == 1, said
    assert said.count(f"rank {rank}: ") == 1, said
    assert f"rank {1 - rank}: " not in said, said
    status = run / "status.json"
    if moment == "start" and error == "user":  # a folder is not made for what the user has to correct
        assert not status.exists()
        return
    reason = json.loads(status.read_text())["reason"]
    assert reason.startswith(f"rank {rank}: ")
    assert words in reason


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("moment", ["step", "save", "validation", "forecast"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_is_killed_ends_the_others(tmp_path, request, launcher, moment) -> None:
    """The launcher says so too, and may end the others before they have found out."""
    command, environment = LAUNCHERS[launcher](request)
    run = tmp_path / "run"
    code, said, waited = launched(tmp_path, [*command, str(run), "1", moment, "killed"], environment)
    print(f"{launcher}, {moment}, killed: waited {waited:.1f} s, load {os.getloadavg()[0]:.0f}")
    assert waited < harness.LIMIT
    assert code != 0
    assert re.search('File ".*credit_like', said) is None, (
        said
    )  # torchrun's agent always ends with a traceback of its own
    named = said.count("rank 1 held up the others: rank 1 does not respond: it was stopped or killed")
    assert named == 1 if launcher == "torchrun" else named <= 1, said
