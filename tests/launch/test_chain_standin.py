"""Scripts executed as jobs of a stand-in for PBS: chains, walltime, failures, arrays; with a trainer in little."""

from __future__ import annotations

import json
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from credit_like.errors import UserError
from credit_like.launch.chain import newest_checkpoint, record
from credit_like.launch.resources import Options
from credit_like.launch.status import status
from credit_like.launch.submit import submit
from credit_like.schema.base import parse_duration
from tests.launch.cases import experiment
from tests.launch.standin import StandIn
from tests.launch.stub.stub_trainer import uninterrupted

STUB = Path(__file__).parent / "stub"


def python(folder: Path, real_agent: bool = False) -> str:
    """A Python in whose eyes the command line is the trainer in little, and torchrun too unless `real_agent`."""
    wrapper = folder / "python"
    swap = {"credit_like.cli": "stub_trainer"} | ({} if real_agent else {"torch.distributed.run": "stub_agent"})
    cases = "\n".join(f"    {old}) words+=({new}) ;;" for old, new in swap.items())
    root = Path(__file__).parents[2]
    loop = f'for word in "$@"; do case $word in\n{cases}\n    *) words+=("$word") ;;\nesac; done'
    wrapper.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={STUB}:{root} OMP_NUM_THREADS=1\nwords=()\n{loop}\n"
        f'exec {sys.executable} "${{words[@]}}"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return str(wrapper)


def write_experiment(folder: Path, steps: int, seconds: float, site: str = "generic-pbs", **environment: str) -> Path:
    """A training of two CPU processes on each of two nodes."""
    variables = {"STUB_STEPS": str(steps), "STUB_SECONDS": str(seconds), **environment}
    request = {
        "nodes": 2, "ngpus": 0, "processes": 2, "queue": None, "environment": variables, "walltime": "00:10:00",
        "rollout": {"nodes": 3, "ngpus": 0, "processes": 2},
    }  # fmt: skip
    given = experiment(
        site,
        save_loc=str(folder / "run"),
        pbs=request,
        evaluation={"metrics": ["rmse"]},
        trainer={"parallelism": {"data": "ddp"}, "global_batch_size": 4},
    )
    file = folder / "experiment.yml"
    file.write_text(json.dumps(given.to_dict()))
    return file


@pytest.fixture
def pbs(tmp_path, monkeypatch):
    with StandIn(tmp_path / "pbs") as standin:
        monkeypatch.setenv("PATH", standin.path)
        yield standin


def run_folder_says(folder: Path) -> tuple[str, int, str]:
    told = json.loads((folder / "status.json").read_text())
    return told["state"], told["step"], (folder / "checkpoints" / f"step-{told['step']}" / "weight").read_text()


def test_chain_that_finishes_early_lets_the_rest_pass(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=3, seconds=0.01, EXTRA="it's here")
    plan = submit(file, chain=3, python=python(tmp_path))
    jobs = pbs.wait()
    assert [job["code"] for job in jobs.values()] == [0, 0, 0], pbs.outputs
    assert [job["after"] for job in jobs.values()] == [[], [plan.ids[0]], [plan.ids[1]]]
    assert run_folder_says(tmp_path / "run") == ("finished", 3, uninterrupted(3))
    seen = sorted(path.name for path in (tmp_path / "run" / "seen").glob("*-?.json"))
    assert seen == [f"{plan.ids[0]}-{rank}.json" for rank in range(4)]  # 2 nodes × 2 processes, in the first job only
    told = json.loads((tmp_path / "run" / "seen" / f"{plan.ids[0]}-3.json").read_text())
    assert told == {"world": 4, "cwd": str(Path.cwd()), "extra": "it's here"}
    rows = status(tmp_path / "run").jobs
    assert [(row.job, row.mode) for row in rows] == [(job, "train") for job in plan.ids]
    assert [row.state for row in rows] == ["finished, exit status 0"] + ["not needed: finished at step 3"] * 2


@pytest.mark.parametrize("begins", ["later", "before its id is known"])
def test_failure_stops_the_chain_with_its_reason(tmp_path, pbs, begins):
    if begins != "later":
        (pbs.spool / "tardy").touch()
    file = write_experiment(
        tmp_path, steps=9, seconds=0.01, STUB_FAULT="fail", STUB_FAULT_STEP="4", STUB_SAVE_EVERY="2"
    )
    plan = submit(file, chain=2, python=python(tmp_path))
    jobs = pbs.wait()
    assert [job["code"] for job in jobs.values()] == [1, 1], pbs.outputs
    assert f"job {plan.ids[0]} failed at step 4: loss is nan; the chain stops" in pbs.outputs[plan.ids[1]]
    first, second = status(tmp_path / "run").jobs
    assert (first.job, first.state) == (plan.ids[0], "failed, exit status 1")
    assert (second.job, second.state[:12]) == (plan.ids[1], "stopped: job")


def test_job_that_dies_without_a_checkpoint_stops_the_chain(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=9, seconds=0.01, STUB_FAULT="crash", STUB_FAULT_STEP="4")
    plan = submit(file, chain="auto", options=Options(nodes=1), overrides=["pbs.processes=1"], python=python(tmp_path))
    pbs.nodefile.write_text("localhost\n")
    jobs = pbs.wait()
    assert [job["code"] for job in jobs.values()] == [9, 1], (
        pbs.outputs
    )  # the job that died had submitted its successor
    assert f"job {plan.ids[0]} ended with exit status 9 and without a new checkpoint" in list(pbs.outputs.values())[1]


def test_submitting_again_after_a_failure_goes_on(tmp_path, pbs):
    file = write_experiment(
        tmp_path, steps=9, seconds=0.01, STUB_FAULT="fail", STUB_FAULT_STEP="4", STUB_SAVE_EVERY="2"
    )
    submit(file, python=python(tmp_path))
    pbs.wait()
    submit(file, overrides=["pbs.environment.STUB_FAULT=none"], python=python(tmp_path))
    pbs.wait()
    assert run_folder_says(tmp_path / "run") == ("finished", 9, uninterrupted(9))


def checkpoint_says(folder: Path, epoch: int) -> None:
    """Write what the trainer says of its progress in the manifest of the newest checkpoint."""
    step = newest_checkpoint(folder)
    manifest = {"meta": {"progress": {"epoch": epoch}}}
    (folder / "checkpoints" / f"step-{step}" / "manifest.json").write_text(json.dumps(manifest))


def test_a_finished_run_goes_on_where_there_is_more_to_train(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=3, seconds=0.01)
    submit(file, python=python(tmp_path))
    pbs.wait()
    checkpoint_says(tmp_path / "run", epoch=100)
    for more in ([], ["trainer.epochs=100"], ["trainer.phases=[{epochs: 60}, {epochs: 40}]"]):
        with pytest.raises(UserError, match=r"finished at step 3, add epochs or phases"):
            submit(file, overrides=["trainer.epochs=100", *more], python=python(tmp_path))
    longer = ["pbs.environment.STUB_STEPS='6'", "trainer.phases=[{epochs: 100}, {epochs: 1}]"]
    plan = submit(file, overrides=longer, chain=2, python=python(tmp_path))
    assert plan.notes == ("continues at step 3",)
    jobs = pbs.wait()
    assert [job["code"] for job in jobs.values()] == [0, 0, 0], pbs.outputs
    assert run_folder_says(tmp_path / "run") == ("finished", 6, uninterrupted(6))
    assert status(tmp_path / "run").jobs[-1].state == "not needed: finished at step 6"


def test_a_later_submission_leaves_the_files_of_queued_jobs(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=3, seconds=0.01)
    first = submit(file, chain=2, python=python(tmp_path))
    before = {path: path.read_bytes() for path in (first.script, first.experiment)}
    changed = ["pbs.environment.STUB_STEPS='5'", "name=other"]
    second = submit(file, after=first.ids[-1:], force=True, overrides=changed, python=python(tmp_path))
    assert {path: path.read_bytes() for path in before} == before
    assert {second.script, second.experiment}.isdisjoint(before)
    jobs = pbs.wait()
    assert [job["code"] for job in jobs.values()] == [0, 0, 0], pbs.outputs
    assert [row.step for row in status(tmp_path / "run").jobs] == [3, None, 5]
    assert run_folder_says(tmp_path / "run") == ("finished", 5, uninterrupted(5))


def test_wrong_number_of_nodes_is_said(tmp_path, pbs):
    pbs.nodefile.write_text("localhost\n")
    plan = submit(write_experiment(tmp_path, steps=3, seconds=0.01), python=python(tmp_path))
    jobs = pbs.wait()
    assert jobs[plan.ids[0]]["code"] == 1
    assert "expected 2 nodes, got 1: localhost" in pbs.outputs[plan.ids[0]]


@pytest.mark.parametrize("site", ["generic-pbs", "gadi"])
def test_rollout_covers_every_share_once(tmp_path, pbs, site):
    file = write_experiment(tmp_path, steps=3, seconds=0.01, site=site)
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    queue = Options(queue="normal") if site == "gadi" else None
    plan = submit(
        file, "rollout", queue, overrides=["inference.init=[2000-08-01, 2000-08-02, 6h]"], python=python(tmp_path)
    )
    jobs = pbs.wait()
    assert plan.shares == 5  # times, although 3 jobs × 2 processes could do 6
    assert {job["code"] for job in jobs.values()} == {0}, pbs.outputs
    assert len(jobs) == (1 if site == "generic-pbs" else 3)  # one array, or as many jobs
    made = {path.name for path in (tmp_path / "run" / "forecasts").iterdir()}
    assert made == {f"rollout---share-{i}of5.json" for i in range(1, 6)}


@pytest.mark.parametrize("mode", ["rollout", "evaluate"])
def test_a_cancelled_job_of_another_mode_does_nothing(tmp_path, pbs, mode):
    """As where the scheduler could not delete it: the training that it waits for is told to stop by the test."""
    file = write_experiment(tmp_path, steps=1_000_000, seconds=0.02)
    training = submit(file, python=python(tmp_path))
    overrides = ["inference.init=[2000-08-01, 2000-08-02, 6h]"]
    plan = submit(file, mode, after=training.ids, overrides=overrides, python=python(tmp_path))
    end_first_job(pbs, tmp_path / "run", 1, "USR1")
    told = pbs.over

    def cancelled(job: str) -> str | None:
        how = told(job)
        if how:  # the training has begun: a job that finds the cancellation does not
            record(tmp_path / "run", "cancellation")
        return how

    pbs.over = cancelled
    jobs = pbs.wait()
    assert jobs[training.ids[0]]["code"] == 0, pbs.outputs
    assert {jobs[job]["code"] for job in plan.ids} == {1}, pbs.outputs
    assert not (tmp_path / "run" / "forecasts").exists()
    assert {row.state[:8] for row in status(tmp_path / "run").jobs if row.mode == mode} >= {"stopped:"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "chain"),
    [
        ("generic-pbs", "auto"),
        pytest.param("generic-pbs", 5, marks=pytest.mark.long),
        pytest.param("gadi", 5, marks=pytest.mark.long),
    ],
)
def test_walltime_neither_breaks_the_chain_nor_repeats_work(tmp_path, pbs, site, chain):
    if site == "gadi":
        pbs.nodefile.write_text("127.0.0.1\n" * 3 + "localhost\n" * 3)  # a line per CPU, as there
    pbs.overtime = 120.0  # a job that does not stop by itself would go on to the end, which `stopped` would show
    file = write_experiment(tmp_path, steps=130, seconds=0.1, site=site)
    options = Options(walltime=parse_duration("10s"), queue="normal" if site == "gadi" else None)
    plan = submit(file, options=options, chain=chain, python=python(tmp_path))
    jobs = pbs.wait()
    assert run_folder_says(tmp_path / "run") == ("finished", 130, uninterrupted(130)), pbs.outputs
    assert {job["code"] for job in jobs.values()} == {0}
    assert pbs.killed == []
    log = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log == list(range(1, 131))  # each step once
    stopped = [row for row in status(tmp_path / "run").jobs if row.state == "continue, exit status 0"]
    assert stopped
    for rank in range(4):  # every worker of both nodes was told, by the signal meant for it
        assert "SIGUSR1" in json.loads((tmp_path / "run" / "seen" / f"{plan.ids[0]}-{rank}-signals.json").read_text())


@pytest.mark.slow
def test_an_agent_that_cannot_start_ends_the_job(tmp_path, pbs):
    """The other node's agent would wait for the first one's port until its own limit of ten minutes."""
    pbs.overtime = 3600.0  # the job has to end by itself
    with socket.socket() as other:
        other.bind(("", 20000 + pbs.first))
        other.listen()
        began = time.monotonic()
        submit(write_experiment(tmp_path, steps=3, seconds=0.01), python=python(tmp_path, real_agent=True))
        (job,) = pbs.wait().values()
        seconds = time.monotonic() - began
    assert job["code"] != 0, pbs.outputs
    assert pbs.killed == []
    assert "EADDRINUSE" in pbs.outputs[job["id"]]
    assert seconds < 500
    assert not list((tmp_path / "run" / "jobs").glob("stop.*"))


def end_first_job(pbs: StandIn, run: Path, steps: int, how: str = "TERM") -> None:
    """End the first job when it has logged that many steps, however fast this machine is."""
    log = run / "log.jsonl"

    def over(job: str) -> str | None:
        return how if job == f"{pbs.first}.standin" and log.exists() and log.read_text().count("\n") >= steps else None

    pbs.over = over


@pytest.mark.slow
def test_killed_jobs_go_on_from_the_last_checkpoint(tmp_path, pbs):
    end_first_job(pbs, tmp_path / "run", 15)
    file = write_experiment(tmp_path, steps=140, seconds=0.1, STUB_FAULT="deaf", STUB_SAVE_EVERY="10")
    submit(file, chain="auto", python=python(tmp_path))
    jobs = pbs.wait()
    assert run_folder_says(tmp_path / "run") == ("finished", 140, uninterrupted(140)), pbs.outputs
    assert pbs.killed == [f"{pbs.first}.standin"]
    assert len(jobs) >= 2


@pytest.mark.slow
def test_torchrun_leaves_the_signals_to_the_workers(tmp_path, pbs):
    """The script is told alone, and tells the workers; the agents let them stop at the end of a step."""
    end_first_job(pbs, tmp_path / "run", 15, "USR1")
    file = write_experiment(tmp_path, steps=100, seconds=0.1)
    plan = submit(file, chain="auto", python=python(tmp_path, real_agent=True))
    jobs = pbs.wait()
    assert run_folder_says(tmp_path / "run") == ("finished", 100, uninterrupted(100)), pbs.outputs
    assert pbs.killed == []
    assert {job["code"] for job in jobs.values()} == {0}
    log = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log == list(range(1, 101))
    assert len(plan.ids) == 1
    for rank in range(4):
        assert "SIGUSR1" in json.loads((tmp_path / "run" / "seen" / f"{plan.ids[0]}-{rank}-signals.json").read_text())
