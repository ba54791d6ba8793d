"""Scripts executed by a real Slurm of two nodes on this machine, with a trainer in little."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from credit_like.launch.resources import Options
from credit_like.launch.show import print_cancelled
from credit_like.launch.status import status
from credit_like.launch.submit import submit
from credit_like.schema.base import parse_duration
from tests.launch import slurm as local_slurm
from tests.launch.stub.stub_trainer import uninterrupted
from tests.launch.test_chain_standin import python, run_folder_says, write_experiment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(local_slurm.missing() is not None, reason=str(local_slurm.missing())),
]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    with local_slurm.Slurm(tmp_path / "slurm") as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.config))
        yield cluster


CPUS = ["pbs.cpus=2", "pbs.memory_gb=1", "pbs.rollout.cpus=2", "pbs.rollout.memory_gb=1"]
"""Overrides that let two nodes of four CPUs do."""


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "jobs" / "logs").iterdir()))


def test_chain_stops_before_walltime_and_goes_on(tmp_path, slurm):
    """Two nodes, `srun` between them; Slurm's own signal is for the batch shell, a minute before the end."""
    file = write_experiment(tmp_path, steps=600, seconds=0.1, site="generic-slurm")
    options = Options(walltime=parse_duration("60s"))
    plan = submit(file, options=options, chain="auto", overrides=CPUS, python=python(tmp_path))
    states = slurm.wait()
    assert run_folder_says(tmp_path / "run") == ("finished", 600, uninterrupted(600)), _logs(tmp_path / "run")
    assert set(states.values()) == {"COMPLETED"}
    assert _steps(tmp_path / "run") == list(range(1, 601))
    rows = status(tmp_path / "run").jobs
    assert len(rows) == len(states) >= 2
    assert rows[0].state == "ended, completed" or rows[0].state.startswith("continue")
    for rank in range(4):
        signals = json.loads((tmp_path / "run" / "seen" / f"{plan.ids[0]}-{rank}-signals.json").read_text())
        assert "SIGUSR1" in signals


def test_a_signal_from_outside_reaches_every_worker(tmp_path, slurm):
    """What preemption sends to the batch shell long before any deadline."""
    file = write_experiment(tmp_path, steps=100_000, seconds=0.02, site="generic-slurm")
    plan = submit(file, overrides=CPUS, python=python(tmp_path))
    _until(lambda: (tmp_path / "run" / "log.jsonl").exists(), tmp_path)
    slurm.ask("scancel", "--batch", "--signal=USR1", plan.ids[0])
    assert slurm.wait() == {plan.ids[0]: "COMPLETED"}, _logs(tmp_path / "run")
    state, step, weight = run_folder_says(tmp_path / "run")
    assert (state, weight) == ("continue", uninterrupted(step))
    for rank in range(4):
        assert json.loads((tmp_path / "run" / "seen" / f"{plan.ids[0]}-{rank}-signals.json").read_text())


def test_requeued_job_goes_on(tmp_path, slurm):
    file = write_experiment(tmp_path, steps=150, seconds=0.05, site="generic-slurm", STUB_SAVE_EVERY="10")
    plan = submit(file, chain="auto", overrides=CPUS, python=python(tmp_path))
    _until(lambda: any((tmp_path / "run" / "checkpoints").glob("step-[2-9]?")), tmp_path)
    slurm.ask("scontrol", "requeue", plan.ids[0])
    states = slurm.wait()
    assert run_folder_says(tmp_path / "run") == ("finished", 150, uninterrupted(150)), _logs(tmp_path / "run")
    assert len(states) == 2  # the job has one successor, though it began twice
    began = [e for e in (tmp_path / "run" / "jobs" / "history.jsonl").read_text().splitlines() if '"begin"' in e]
    assert len(began) == 2


def test_array_of_rollouts(tmp_path, slurm):
    file = write_experiment(tmp_path, steps=1, seconds=0, site="generic-slurm")
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    times = "inference.init=[2000-08-01, 2000-08-02, 6h]"
    plan = submit(file, "rollout", overrides=[*CPUS, times], python=python(tmp_path))
    assert set(slurm.wait().values()) == {"COMPLETED"}, _logs(tmp_path / "run")
    made = {path.name for path in (tmp_path / "run" / "forecasts").iterdir()}
    assert made == {f"rollout---share-{i}of5.json" for i in range(1, 6)}
    tasks = {row.job for row in status(tmp_path / "run").jobs}
    assert tasks == {plan.ids[0], *(f"{plan.ids[0]}_{i}" for i in range(3))}


def test_cancelled_chain_ends_with_the_running_job(tmp_path, slurm, capsys):
    file = write_experiment(tmp_path, steps=100_000, seconds=0.02, site="generic-slurm")
    plan = submit(file, chain=3, overrides=CPUS, python=python(tmp_path))
    _until(lambda: (tmp_path / "run" / "log.jsonl").exists(), tmp_path)
    assert print_cancelled(tmp_path / "run") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(plan.ids[::-1])
    assert slurm.wait() == dict.fromkeys(plan.ids, "CANCELLED"), _logs(tmp_path / "run")
    assert (tmp_path / "run" / "jobs" / "history.jsonl").read_text().count('"begin"') == 1


def test_refusal_by_slurm_changes_nothing(tmp_path, slurm):
    file = write_experiment(tmp_path, steps=1, seconds=0, site="generic-slurm")
    with pytest.raises(ValueError, match=r"expected sbatch to take the job, got exit status 1: .*invalid partition"):
        submit(file, options=Options(queue="nowhere"), overrides=CPUS, python=python(tmp_path))
    assert slurm.states() == {}
    assert not (tmp_path / "run").exists()


def _until(condition, folder: Path, timeout: float = 300.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(_logs(folder / "run"))
        time.sleep(0.1)
