"""What PBS answers, as OpenPBS 23.06 words it, and what becomes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from credit_like.launch import pbs
from credit_like.launch.chain import record
from credit_like.launch.plan import plan_jobs
from credit_like.launch.script import directives
from credit_like.launch.status import status
from credit_like.schema.launch import SiteSection
from tests.launch.cases import experiment

RUNNING = "Job Id: 1.pbs1\n    Job_Name = train\n    job_state = R\n    queue = workq\n\n"
STUCK = (
    "Job Id: 2.pbs1\n    job_state = Q\n    comment = Can Never Run: Insufficient amount of resource: mem (R: 128gb A: 48\n"
    "\t210mb T: 48210mb)\n    etime = Sun Nov 22 21:00:00 2026\n\n"
)
ENDED = "Job Id: 3.pbs1\n    job_state = F\n    comment = Job run at Sun Nov 22\n    Exit_status = 271\n\n"


def server(monkeypatch, alive: str, ended: str) -> None:
    """`qstat -f` knows jobs that are not over, `qstat -x -f` the others too, where there is a history."""
    monkeypatch.setattr(pbs, "ask", lambda command: ended if "-x" in command else alive)


def test_without_a_history_running_jobs_are_known(monkeypatch):
    server(monkeypatch, RUNNING, "")
    assert pbs.Pbs().states(["1.pbs1", "9.pbs1"]) == {"1.pbs1": "running"}


def test_why_a_job_waits_and_how_it_ended(monkeypatch):
    server(monkeypatch, STUCK, ENDED)
    why = "Can Never Run: Insufficient amount of resource: mem (R: 128gb A: 48210mb T: 48210mb)"
    assert pbs.Pbs().states(["2.pbs1", "3.pbs1"]) == {"2.pbs1": f"queued: {why}", "3.pbs1": "ended, exit status 271"}


@pytest.mark.parametrize(("asked", "unknown"), [(["1.pbs1"], []), (["1"], []), (["1.pbs1", "999.pbs1"], ["999.pbs1"])])
def test_jobs_to_wait_for_have_to_be_known(monkeypatch, asked, unknown):
    server(monkeypatch, RUNNING, "")
    assert pbs.Pbs().unknown(asked) == unknown


def of_own(folder: Path) -> Path:
    """A profile beside the experiment, as a user writes one."""
    path = folder / "mysite.yml"
    shutil.copy(Path(__file__).parents[2] / "config" / "site" / "generic-pbs.yml", path)
    path.write_text(path.read_text().replace("name: generic-pbs", "name: mine"))
    return path


def test_a_site_may_be_a_file(tmp_path, monkeypatch):
    path = of_own(tmp_path)
    assert SiteSection.model_validate(str(path)).name == "mine"
    monkeypatch.chdir(tmp_path)
    assert SiteSection.model_validate("./mysite.yml").scheduler == "pbs"
    with pytest.raises(ValueError, match=r"or a file, got '\./yoursite\.yml'"):
        SiteSection.model_validate("./yoursite.yml")


def test_status_asks_the_scheduler_of_a_site_that_is_a_file(tmp_path, monkeypatch):
    server(monkeypatch, STUCK, "")
    record(tmp_path, "submission", mode="train", site="mine", scheduler="pbs", chain=1)
    record(tmp_path, "submitted", mode="train", ids=["2.pbs1"])
    assert next(job.state for job in status(tmp_path).jobs).startswith("queued: Can Never Run")


@pytest.mark.parametrize(("memory", "asked"), [(None, "select=2:ncpus=32:ngpus=4"), (64, "ngpus=4:mem=64GB")])
def test_memory_is_asked_for_where_it_is_given(memory, asked):
    request = {} if memory is None else {"memory_gb": memory}
    case = experiment("generic-pbs", pbs=request)
    lines = directives(
        plan_jobs(case, "train", python="/opt/env/bin/python"), SiteSection.model_validate("generic-pbs")
    )
    assert next(line for line in lines if "select" in line).endswith(asked)
