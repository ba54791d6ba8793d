"""Cancelling a chain, or one of its jobs, at stand-ins for PBS and Slurm: what is deleted, in which order, and what stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from credit_like import cli
from credit_like.launch import cancel as cancel_module
from credit_like.launch.chain import history, record, run_status
from credit_like.launch.plan import Plan
from credit_like.launch.resources import Options
from credit_like.launch.status import status
from credit_like.launch.submit import submit
from tests.launch.standin import StandIn
from tests.launch.stub.stub_trainer import uninterrupted
from tests.launch.test_chain_standin import python, run_folder_says, write_experiment

SITES = ("generic-pbs", "generic-slurm")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A batch system with one node, which keeps to a job for minutes after SIGTERM."""
    with StandIn(tmp_path / "server", hosts=("localhost",), kill_delay=300.0) as standin:
        monkeypatch.setenv("PATH", standin.path)
        yield standin


def begun(folder: Path, site: str, chain, **settings: str) -> tuple[Path, Plan]:
    """A training without end, and its plan; returns when it has made a step."""
    file = write_experiment(folder, steps=1_000_000, seconds=0.02, site=site)
    plan = submit(
        file, options=Options(nodes=1), overrides=["pbs.processes=1"], chain=chain, python=python(folder), **settings
    )
    until(lambda: (folder / "run" / "log.jsonl").exists())
    return folder / "run", plan


def until(condition, timeout: float = 300.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def call(capsys, *arguments: object) -> tuple[int, list[list[str]], str]:
    """Exit status, cells of the table's rows (without its head), and what went to stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main(["cancel", *map(str, arguments)])
    out, err = capsys.readouterr()
    return end.value.code or 0, [line.strip().split(maxsplit=3) for line in out.splitlines()[1:]], err


def deleted(server: StandIn) -> list[str]:
    return (server.spool / "deleted").read_text().splitlines()


def began(run: Path) -> list[str]:
    return [event["job"] for event in history(run) if event["event"] == "begin"]


@pytest.mark.parametrize(("site", "chain"), [("generic-pbs", "auto"), ("generic-slurm", 3)])
def test_chain_ends_with_the_running_job(tmp_path, server, capsys, site, chain):
    run, plan = begun(tmp_path, site, chain)
    until(lambda: len(server.jobs()) > 1 and (chain == 3 or history(run)[-1]["event"] == "extended"))
    ids = list(server.jobs())
    code, rows, _ = call(capsys, run)
    assert code == 0
    assert [row[0] for row in rows] == ids[::-1]
    assert rows[-1][1:] == [
        "train",
        "running",
        "cancelled; the job saves the current step if the site allows enough time",
    ]
    assert all(row[3] == "cancelled" for row in rows[:-1])
    assert deleted(server) == [*(f"{job} H" for job in ids[:0:-1]), f"{ids[0]} R"]
    assert list(server.wait()) == ids  # no job submitted another
    assert server.killed == []
    assert began(run) == [plan.ids[0]]
    state, step, weight = run_folder_says(run)
    assert (state, weight) == ("continue", uninterrupted(step))
    assert [row.state for row in status(run).jobs] == [
        "continue, exit status 0",
        *["cancelled: before it began"] * (len(ids) - 1),
    ]

    _, again = begun(tmp_path, site, "auto")  # which takes the record of the cancellation back
    logged = len((run / "log.jsonl").read_bytes().splitlines())
    until(lambda: len((run / "log.jsonl").read_bytes().splitlines()) > logged)
    assert history(run)[-1]["event"] == "extended"
    assert call(capsys, run)[0] == 0
    assert len(server.wait()) == len(ids) + 2
    assert began(run) == [plan.ids[0], again.ids[0]]
    assert run_status(run)["step"] > step


@pytest.mark.parametrize("site", SITES)
def test_one_job_of_a_chain(tmp_path, server, capsys, site):
    run, plan = begun(tmp_path, site, 4)
    first, second, third, fourth = plan.ids
    code, rows, said = call(capsys, run, "--job", second)
    assert (code, rows) == (2, [])
    assert f"got {second} (" in said
    assert f"with {third}, {fourth} waiting for it: " in said
    assert not (server.spool / "deleted").exists()

    assert call(capsys, run, "--job", fourth.split(".")[0])[:2] == (
        0,
        [[fourth, "train", "waiting" if site == "generic-pbs" else "queued", "cancelled"]],
    )
    code, rows, _ = call(capsys, run, "--job", first)
    assert code == 0
    assert rows[0][3].endswith(f"; {second} begins after it")
    until(lambda: second in began(run))  # from where the first stopped
    assert deleted(server) == [f"{fourth} H", f"{first} R"]
    code, rows, said = call(capsys, run, "--job", first)
    assert (code, rows) == (2, [])
    assert f"the scheduler does not have {first} any more" in said
    call(capsys, run)
    jobs = server.wait()
    assert len(jobs) == 4
    assert began(run) == [first, second]


@pytest.mark.parametrize("site", SITES)
def test_job_that_the_scheduler_keeps_stops_when_it_begins(tmp_path, server, capsys, site):
    run, plan = begun(tmp_path, site, 3)
    first, second, third = plan.ids
    (server.spool / "keep").write_text(second)
    code, rows, _ = call(capsys, run)
    assert code == 1
    assert [row[0] for row in rows] == [third, second, first]
    assert rows[1][3].startswith("not cancelled: ")
    assert f"Unauthorized Request {second}" in rows[1][3]
    jobs = server.wait()
    assert jobs[second]["code"] == 1
    assert "the run's jobs were cancelled, submit again to go on; the chain stops" in server.outputs[second]
    assert began(run) == [first]


@pytest.mark.parametrize("site", SITES)
def test_nothing_to_cancel(tmp_path, server, capsys, site):
    file = write_experiment(tmp_path, steps=1, seconds=0, site=site)
    run = tmp_path / "run"
    plan = submit(file, options=Options(nodes=1), overrides=["pbs.processes=1"], python=python(tmp_path))
    server.wait()
    before = history(run)
    for arguments in ((run,), (run, "--job", plan.ids[0])):
        code, rows, said = call(capsys, *arguments)
        assert (code, rows) == (2, [])
        assert f"nothing to cancel: the scheduler does not have {plan.ids[0]} any more" in said
    assert "expected a job of this run" in call(capsys, run, "--job", "99")[2]
    server.forget()
    assert call(capsys, run)[0] == 2
    assert history(run) == before


def test_a_job_that_begins_and_stops_during_the_cancellation_is_told(tmp_path, monkeypatch, capsys):
    server = StandIn(tmp_path / "server")  # takes jobs, runs none
    monkeypatch.setenv("PATH", server.path)
    file = write_experiment(tmp_path, steps=1, seconds=0)
    first, second = submit(file, chain=2, python=python(tmp_path)).ids

    def begins_then(*arguments, **values):
        record(*arguments, **values)
        server._set(server.jobs()[first], state="F", code=1)

    monkeypatch.setattr(cancel_module, "record", begins_then)
    code, rows, _ = call(capsys, tmp_path / "run")
    assert (code, [row[0] for row in rows]) == (0, [second, first])
    assert [row[3] for row in rows] == ["cancelled", "ended by itself"]


def test_run_without_jobs_to_cancel(tmp_path, monkeypatch, capsys):
    code, _, said = call(capsys, tmp_path)
    assert code == 2
    assert "nothing to cancel: expected a run with submitted jobs" in said
    record(tmp_path, "submission", mode="train", site="local", scheduler="local", chain=1)
    assert "press Ctrl-C there" in call(capsys, tmp_path)[2]
    record(tmp_path, "submission", mode="train", site="derecho", scheduler="pbs", chain=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, said = call(capsys, tmp_path)
    assert code == 2
    assert "expected qdel on the PATH" in said
