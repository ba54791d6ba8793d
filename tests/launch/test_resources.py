"""What a user may get wrong about a machine: one message each, and nothing written or submitted."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from credit_like import registry
from credit_like.check import checked_experiment
from credit_like.check.run import launch_findings
from credit_like.errors import UserError
from credit_like.launch import chain
from credit_like.launch import submit as submit_module
from credit_like.launch.cancel import cancel
from credit_like.launch.chain import history, history_file, record, submissions
from credit_like.launch.plan import initial_times, plan_jobs
from credit_like.launch.resources import Options, options, overrides_of, resources
from credit_like.launch.status import job_rows, status
from credit_like.launch.submit import active_jobs, chain_of, check_sections, mode_of, submit
from credit_like.schema.checks import world_of
from credit_like.schema.errors import ExperimentError
from credit_like.schema.launch import MODES, PbsSection, SiteSection
from credit_like.schema.load import load_experiment
from tests.launch.cases import asking, experiment
from tests.launch.standin import StandIn
from tests.launch.test_chain_standin import python, write_experiment

DEMO = Path(__file__).parents[2] / "config" / "demo.yml"


@pytest.mark.parametrize(
    ("site", "mode", "pbs", "asked", "message"),
    [
        ("derecho", "train", {"account": None}, {}, "expected an account for derecho, got none"),
        ("derecho", "train", {}, {"queue": "mian"}, "did you mean 'main'"),
        ("derecho", "train", {}, {"walltime": dt.timedelta(hours=13)}, "at most 12:00:00 in queue main .*got 13:00:00"),
        ("derecho", "train", {}, {"ngpus": 8}, "at most 4 GPUs on a gpu node of derecho, got 8"),
        (
            "derecho",
            "train",
            {},
            {"queue": "develop", "nodes": 3, "walltime": dt.timedelta(hours=1)},
            "1 to 2 nodes .*got 3",
        ),
        ("derecho", "train", {"processes": 8}, {}, "one process per GPU, got pbs.processes 8 for 4"),
        ("derecho", "train", {}, {"nodes": 3}, "multiple of .*= 1 × 12 = 12, got 64"),
        ("derecho", "train", {"memory_gb": 900}, {}, "at most 480 GB .*got 900"),
        ("derecho", "train", {"fields": {"prioriti": "economy"}}, {}, "did you mean 'priority'"),
        ("derecho", "evaluate", {}, {"nodes": 2}, "expected 1 node for evaluate, got 2"),
        ("derecho", "rollout", {}, {"ngpus": 3}, None),
        ("polaris", "train", {}, {"nodes": 4}, "10 to 496 nodes in queue prod of polaris, got 4"),
        ("gadi", "train", {"fields": {}}, {}, "expected pbs.fields.storage for gadi, got none.*gdata/xy12"),
        (
            "gadi",
            "train",
            {},
            {"queue": "normal"},
            "expected nodes with GPUs for ngpus 4, got none in queue normal of gadi",
        ),
        ("generic-slurm", "train", {}, {"ngpus": 0}, None),
        ("local", "train", {"cpus": 64}, {}, None),
        (
            "polaris",
            "train",
            {"nodes": 24},
            {"walltime": dt.timedelta(hours=4)},
            "most 03:00:00 .* prod .* for 24 nodes",
        ),
        (
            "polaris",
            "train",
            {"nodes": 25},
            {"walltime": dt.timedelta(hours=7)},
            "most 06:00:00 .* prod .* for 25 nodes",
        ),
        ("polaris", "train", {"nodes": 128}, {"walltime": dt.timedelta(hours=25)}, "most 24:00:00 .* for 128 nodes"),
        (
            "polaris",
            "train",
            {"queue": None, "nodes": 600},
            {},
            r"queue of polaris takes, debug \(1 to 2 nodes, at most 01:00:00\), .*, got 600 nodes for 03:00:00",
        ),
        (
            "derecho",
            "evaluate",
            {"evaluate": {"processes": 8}},
            {},
            "pbs.evaluate.processes: expected none.*got 8, remove",
        ),
        ("generic-slurm", "train", {"walltime": "0.5s"}, {}, "at least 00:01:00 at generic-slurm, got 0.5 s"),
        ("perlmutter", "rollout", {}, {"walltime": dt.timedelta(seconds=59)}, "at least 00:01:00"),
        ("generic-pbs", "train", {"walltime": "0.5s"}, {}, "at least 00:00:01"),
        ("generic-pbs", "train", {"walltime": "10s"}, {}, None),
    ],
)
def test_each_rule_of_a_site_has_its_message(site, mode, pbs, asked, message):
    given = asking(experiment(site, pbs=pbs), mode, Options(**asked))
    if message is None:
        assert plan_jobs(given, mode).resources.world
    else:
        with pytest.raises(ValueError, match=message):
            plan_jobs(given, mode)


@pytest.mark.parametrize(
    ("mode", "pbs", "queue"),
    [
        ("train", {"nodes": 1, "walltime": "01:00:00"}, "debug"),
        ("train", {"nodes": 8, "walltime": "01:00:00"}, "debug-scaling"),
        ("train", {"nodes": 16, "walltime": "01:00:00"}, "prod"),
        ("train", {"nodes": 4, "walltime": "7d"}, "capacity"),
        ("train", {"queue": "preemptable", "nodes": 8, "walltime": "12:00:00"}, "preemptable"),
        ("preprocess", {"queue": "prod", "nodes": 16, "walltime": "01:00:00"}, "debug"),
        ("evaluate", {"queue": "prod", "nodes": 16, "walltime": "12:00:00"}, "capacity"),
        ("rollout", {"queue": "prod", "nodes": 16, "walltime": "03:00:00", "rollout": {"nodes": 20}}, "capacity"),
        ("rollout", {"queue": "preemptable", "walltime": "03:00:00"}, "preemptable"),
    ],
)
def test_a_queue_that_is_not_asked_for_takes_the_job(mode, pbs, queue):
    others = {"preprocess": {}, "evaluate": {}, "rollout": {}}
    assert plan_jobs(experiment("polaris", pbs={"queue": None, **others, **pbs}), mode).resources.queue == queue


@pytest.mark.parametrize("site", ["polaris", "derecho", "perlmutter"])
def test_a_queue_whose_jobs_may_be_ended_for_others_is_used_only_where_it_is_asked_for(site):
    assert any(queue.preemptible for queue in SiteSection.model_validate(site).queues.values())
    with pytest.raises(UserError, match=r"expected (a job that a queue of \w+ takes|a walltime)"):
        plan_jobs(experiment(site, pbs={"queue": None, "nodes": 8, "walltime": "50:00:00"}), "train")


def test_a_mode_with_gpus_does_not_inherit_the_processes_of_a_training_without():
    pbs = {"ngpus": 0, "processes": 8, "rollout": {"ngpus": 2}}
    assert plan_jobs(experiment("derecho", pbs=pbs), "rollout").resources.processes == 2


def test_fields_of_a_site_that_is_not_named_are_left_alone():
    """Other commands than `submit` need no site."""
    request = PbsSection.model_validate({"fields": {"storage": "gdata/x"}})
    assert resources(request, SiteSection(), "train").fields == {}
    with pytest.raises(UserError, match=r"expected pbs\.fields that derecho knows"):
        resources(request.model_copy(update={"account": "a"}), SiteSection.model_validate("derecho"), "train")


@pytest.mark.parametrize(("site", "sign", "other"), [("generic-pbs", ":", "%"), ("generic-slurm", "%", ":")])
def test_the_path_of_the_logs_has_no_sign_that_the_scheduler_replaces(site, sign, other):
    with pytest.raises(UserError, match="expected save_loc without"):
        plan_jobs(experiment(site, save_loc=f"/scratch/run{sign}1"), "train")
    assert plan_jobs(experiment(site, save_loc=f"/scratch/run{other}1"), "train")


@pytest.mark.parametrize(
    ("members", "batch_size", "kind", "shares"),
    [
        (64, 1, "zarr", 32),
        (64, 4, "zarr", 16),
        (64, 5, "zarr", 13),
        (64, 1, "netcdf", 1),
        (1, 1, "zarr", 1),
    ],
)
def test_members_are_shared_by_the_gpus_where_the_format_allows_it(members, batch_size, kind, shares):
    inference = {
        "init": "2000-08-01", "batch_size": batch_size, "output": {"type": kind},
        "ensemble": {"members": members, "amplitude": {"column_water": 0.1}},
    }  # fmt: skip
    plan = plan_jobs(experiment("derecho", pbs={"rollout": {"nodes": 8}}, inference=inference), "rollout")
    assert (plan.shares, plan.array) == (shares, -(-shares // 4))
    notes = [
        f"takes {plan.array} node{'s' * (plan.array > 1)} of the 8 that are asked for" in note for note in plan.notes
    ]
    assert notes == [True] * (shares < 32)


def test_initial_times_of_one_batch_are_one_share():
    inference = {"init": ["2000-08-01", "2000-08-10", "1d"], "batch_size": 4}
    plan = plan_jobs(experiment("derecho", pbs={"rollout": {"nodes": 8}}, inference=inference), "rollout")
    assert (plan.initial_times, plan.shares, plan.array) == (10, 3, 1)


def test_formats_say_how_their_writers_share_members():
    for name in registry.names("writer"):
        plugin = registry.module("writer", name)
        private = importlib.import_module(f"credit_like.inference.writers._{name}")
        writer = getattr(private, plugin.open_writer.__annotations__["return"])
        assert getattr(plugin, "by_member", False) == writer.by_member


def test_chain_needs_a_training_and_a_site_that_allows_it():
    with pytest.raises(ValueError, match="jobs at polaris may not submit others"):
        plan_jobs(experiment("polaris"), "train", chain="auto")
    with pytest.raises(ValueError, match="--chain with --mode train only, got --mode rollout"):
        plan_jobs(experiment("derecho"), "rollout", chain=2)
    with pytest.raises(ValueError, match="without blanks"):
        plan_jobs(experiment("derecho", save_loc="/scratch/my runs"), "train")


def test_words_of_the_command_line():
    assert options(walltime="01:30:00", nodes=2) == Options(nodes=2, walltime=dt.timedelta(minutes=90))
    assert (chain_of("auto"), chain_of("3"), mode_of("rollout")) == ("auto", 3, "rollout")
    for wrong in ("0", "-1", "some", "1.5"):
        with pytest.raises(ValueError, match="expected --chain auto or a number"):
            chain_of(wrong)
    with pytest.raises(ValueError, match="did you mean 'rollout'"):
        mode_of("rolout")
    with pytest.raises(ValueError, match="expected a duration"):
        options(walltime="soon")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("derecko", "did you mean 'derecho'"),
        ({"directives": ["-A {acount}"]}, "did you mean 'account'"),
        ({"directives": ["-A {account"]}, "braces in pairs"),
        ({"queues": {"main": {"nodes": ["gpu"]}}}, r"kinds of node of local \(this\) in queue main, got 'gpu'"),
        ({"environment": {"NOT-A-NAME": "1"}}, "environment"),
        ({"lancher": "srun"}, "lancher"),
    ],
)
def test_a_profile_that_is_wrong_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        SiteSection.model_validate(section)


def test_a_profile_in_the_current_folder_goes_first(tmp_path, monkeypatch):
    (tmp_path / "config" / "site").mkdir(parents=True)
    (tmp_path / "config" / "site" / "mine.yml").write_text("site: {name: mine, scheduler: slurm}\n")
    monkeypatch.chdir(tmp_path)
    assert SiteSection.model_validate("mine").scheduler == "slurm"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]\n", "mine.yml:1: expected a mapping of sections, got a list"),
        (b"pbs: {}\n", "expected a mapping under `site:` in .*mine.yml, got nothing"),
        (b"site: {name: mine\n  x: [\n", "mine.yml:.*: expected YAML"),
        (b"site: {name: !foo mine}\n", "mine.yml:1: expected YAML, got the tag '!foo'"),
        (b"site: {name: \xff}\n", "mine.yml: expected UTF-8"),
        (b"site:\n  name: a\n  name: b\n", "mine.yml:3: site.name: expected each key once"),
        (b"site: {setup: [echo $NOT_SET_ANYWHERE]}\n", "mine.yml:1: site.setup.0: .* NOT_SET_ANYWHERE to be set"),
    ],
)
def test_a_profile_is_read_as_an_experiment_is(tmp_path, content, message):
    (tmp_path / "mine.yml").write_bytes(content)
    with pytest.raises(ValidationError, match=message):
        SiteSection.model_validate(str(tmp_path / "mine.yml"))


def test_values_of_a_profile_are_those_of_yaml_1_2(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "/here")
    (tmp_path / "mine.yml").write_text(
        "site: {queues: {on: {nodes: [this], max_walltime: 12:00:00}}, setup: [cd $PLACE, echo $$HOME]}\n"
    )
    site = SiteSection.model_validate(str(tmp_path / "mine.yml"))
    assert site.queues["on"].max_walltime == dt.timedelta(hours=12)
    assert site.setup == ("cd /here", "echo $HOME")


def test_initial_times_are_counted():
    def with_init(init):
        return initial_times(experiment("local", inference={"init": init} if init else {}))

    assert with_init(None) == 31  # August, once a day
    assert with_init("2000-08-01") == 1
    assert with_init(["2000-08-01", "2000-08-02"]) == 2
    assert with_init(["2000-08-01", "2000-08-02", "12h"]) == 3
    assert with_init(["2000-02-28", "2000-02-30", "1d"]) == 2  # a day of another calendar
    assert with_init(["0000-02-28", "0000-03-01", "1d"]) == 3
    assert with_init(["0000-01-01", "9999-12-31", "1d"]) == 3_652_425
    assert with_init(["1999-12-31T18", "2000-01-01T06", "6h"]) == 3


def _everything(folder: Path) -> dict[str, bytes | None]:
    found = {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
    return {path: content for path, content in found.items() if "/spool" not in path}


@pytest.fixture
def pbs(tmp_path, monkeypatch):
    standin = StandIn(tmp_path / "pbs")  # takes jobs, runs none
    monkeypatch.setenv("PATH", standin.path)
    return standin


def test_dry_run_writes_nothing(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    before = _everything(tmp_path)
    plan = submit(file, chain=3, dry_run=True)
    assert plan.ids == ()
    assert plan.scripts["train-1.sh"].startswith("#!/bin/bash\n#PBS -N train-era5-1deg\n")
    assert ("jobs", "3 in a chain (afterany)") in plan.describe()
    assert ("layout", "data 4 × tensor 1 × domain 1") in plan.describe()
    assert ("samples per step", "4, 1 micro-batches each") in plan.describe()
    assert _everything(tmp_path) == before
    assert pbs.jobs() == {}


def _no_qsub(tmp_path, pbs, monkeypatch):
    (pbs.bin / "qsub").unlink()


def _refused_at_once(tmp_path, pbs, monkeypatch):
    (pbs.spool / "refuse").write_text("0")


def _second_refused(tmp_path, pbs, monkeypatch):
    (pbs.spool / "refuse").write_text("1")


def _finished(tmp_path, pbs, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "finished", "step": 7, "reason": null}')


def _unwritable(tmp_path, pbs, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, how: False)  # root may write anywhere


def _file_in_the_way(tmp_path, pbs, monkeypatch):
    (tmp_path / "run").write_text("")


def _stopped_at_the_second(monkeypatch, stop):
    """Submit as ever, but call `stop` in place of the second job."""
    queued, inner = [], submit_module._submit_one

    def one(*arguments):
        if queued:
            stop()
        queued.append(inner(*arguments))
        return queued[-1]

    monkeypatch.setattr(submit_module, "_submit_one", one)


def test_the_jobs_of_a_refused_submission_are_withdrawn(tmp_path, pbs, monkeypatch):
    """Those before it, of another submission, are not; the scheduler may have forgotten all of them."""
    file = write_experiment(tmp_path, steps=1, seconds=0)
    [first] = submit(file, python=python(tmp_path)).ids
    (pbs.spool / "refuse").write_text("2")
    with pytest.raises(ValueError, match="the jobs before it are cancelled"):
        submit(file, chain=3, python=python(tmp_path), overrides=["trainer.epochs=200"], force=True)
    rows = {row.job: row.state for row in job_rows(history(tmp_path / "run"), {})}
    assert rows.pop(first) == "submitted"
    assert list(rows.values()) == ["withdrawn"]


def test_an_interrupted_submission_takes_its_jobs_back(tmp_path, pbs, monkeypatch):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    before = _everything(tmp_path)

    def interrupt():
        raise KeyboardInterrupt

    _stopped_at_the_second(monkeypatch, interrupt)
    with pytest.raises(ValueError, match="interrupted; the jobs before it are cancelled"):
        submit(file, chain=3)
    assert _everything(tmp_path) == before
    assert [job["state"] for job in pbs.jobs().values()] == ["F"]


def test_the_jobs_of_a_killed_submission_are_known(tmp_path, pbs, monkeypatch):
    """Nothing runs at a kill; what was queued before is recorded and can be cancelled."""
    file = write_experiment(tmp_path, steps=1, seconds=60)
    _stopped_at_the_second(monkeypatch, lambda: os._exit(9))
    child = os.fork()
    if child == 0:
        try:
            submit(file, chain=3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    [job] = pbs.jobs()
    assert [outcome.job for outcome in cancel(tmp_path / "run")] == [job]
    assert [each["state"] for each in pbs.jobs().values()] == ["F"]


def test_jobs_that_cannot_be_taken_back_remain_those_of_the_run(tmp_path, pbs, monkeypatch):
    file = write_experiment(tmp_path, steps=1, seconds=60)
    (pbs.spool / "refuse").write_text("1")
    program = (pbs.bin / "qdel").read_text()
    (pbs.bin / "qdel").write_text("#!/bin/sh\necho no server >&2\nexit 1\n")
    with pytest.raises(ValueError, match="could not be cancelled: no server"):
        submit(file, chain=3)
    (pbs.bin / "qdel").write_text(program)
    assert [outcome.job for outcome in cancel(tmp_path / "run")] == list(pbs.jobs())


def test_a_torn_line_of_the_history_takes_no_event_with_it(tmp_path):
    record(tmp_path, "submission", mode="train", submission="train-1", site=None, scheduler="pbs", chain=1)
    with history_file(tmp_path).open("a") as out:
        out.write('{"event": "submitted", "mo')
    record(tmp_path, "cancellation")
    record(tmp_path, "cancellation")
    assert [event["event"] for event in history(tmp_path)] == ["submission", "cancellation", "cancellation"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_no_qsub, "expected qsub on the PATH .*got none, do this on a login node"),
        (_refused_at_once, "expected qsub to take the job, got exit status 38: qsub: Job violates"),
        (_second_refused, "Job violates.*; the jobs before it are cancelled"),
        (_finished, "finished at step 7, add epochs or phases, change save_loc"),
        (_unwritable, "save_loc: expected a folder that may be written to"),
        (_file_in_the_way, "save_loc: expected a folder, got .* is a file"),
    ],
)
def test_what_stops_a_submission_changes_nothing(tmp_path, pbs, monkeypatch, prepare, message):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    prepare(tmp_path, pbs, monkeypatch)
    before = _everything(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        submit(file, chain=3)
    assert "\n" not in str(caught.value)
    assert _everything(tmp_path) == before
    assert all(job["state"] == "F" for job in pbs.jobs().values())  # taken back


def test_a_folder_that_another_submission_creates_at_the_same_time_is_shared(tmp_path, pbs, monkeypatch):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    (pbs.spool / "refuse").write_text("0")
    mkdir = Path.mkdir

    def second(folder, *arguments, **options):
        if folder == tmp_path / "run":
            mkdir(folder)
        mkdir(folder, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", second)
    with pytest.raises(ValueError, match="Job violates"):
        submit(file)
    assert not list((tmp_path / "run").iterdir())


def test_a_refusal_leaves_the_files_of_an_earlier_submission(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    submit(file)
    before = _everything(tmp_path)
    (pbs.spool / "refuse").write_text("1")
    with pytest.raises(ValueError, match="Job violates"):
        submit(file, options=Options(walltime=dt.timedelta(hours=2)), force=True)
    after, record = _everything(tmp_path), str(history_file(tmp_path / "run"))
    assert after.pop(record).startswith(before.pop(record))
    assert after == before


def test_a_refusal_leaves_what_running_jobs_have_recorded(tmp_path, pbs, monkeypatch):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    first = submit(file)
    before = history(tmp_path / "run")

    def refused(*_):
        record(tmp_path / "run", "end", mode="train", job=first.ids[0], code=0)
        raise UserError("expected qsub to take the job")

    monkeypatch.setattr("credit_like.launch.submit._queue", refused)
    with pytest.raises(UserError, match="expected qsub"):
        submit(file, force=True)
    events = history(tmp_path / "run")
    assert events[: len(before)] == before
    assert [event["event"] for event in events[len(before) :]] == ["submission", "end", "withdrawn"]
    assert [event["submission"] for event in submissions(events)] == ["train-1"]
    assert [(row.job, row.state) for row in job_rows(events, {})] == [(first.ids[0], "done, exit status 0")]
    assert active_jobs(tmp_path / "run") == {first.ids[0]: "queued"}


def test_a_chain_whose_later_job_is_refused_says_so_though_its_first_has_run(tmp_path, pbs, monkeypatch):
    """Its first job may begin, log and save before the second one is refused."""
    run = tmp_path / "run"
    file = write_experiment(tmp_path, steps=1, seconds=0)

    def refused(plan, *_):
        chain.begin(run, "train", "7.server", plan.submission)
        (plan.logs / "7.log").write_text("step 1")
        raise UserError("expected qsub to take the job; the jobs before it are cancelled")

    monkeypatch.setattr("credit_like.launch.submit._queue", refused)
    with pytest.raises(UserError, match=r"^expected qsub to take the job; the jobs"):
        submit(file, chain=3)
    assert [event["event"] for event in history(run)] == ["submission", "begin", "withdrawn"]
    assert (run / "jobs" / "logs" / "7.log").exists()
    assert not list((run / "jobs").glob("train-1.*"))
    assert chain.begin(run, "train", "8.server", "train-1") == 1  # one that could not be cancelled
    monkeypatch.undo()
    monkeypatch.setenv("PATH", pbs.path)
    assert submit(file).submission == "train-2"
    assert chain.begin(run, "train", "9.server", "train-2") == 0


def test_jobs_still_in_the_queue_are_not_doubled(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    first = submit(file)
    with pytest.raises(ValueError, match=rf"no job of this run in the queue, got {first.ids[0]} \(queued\)"):
        submit(file)
    assert len(pbs.jobs()) == 1
    forced = submit(file, force=True)
    assert any(first.ids[0] in note for note in forced.notes)


def test_each_job_is_asked_of_the_scheduler_of_its_own_submission(tmp_path, monkeypatch):
    """A training in the queue of Slurm, and later submissions on this machine and at PBS."""
    run, bin_ = tmp_path / "run", tmp_path / "bin"
    bin_.mkdir()
    answers = {
        "squeue": "echo '101|RUNNING'; echo '102|PENDING'",
        "qstat": "printf 'Job Id: 7.s\\n    job_state = Q\\n'",
    }
    for name in ("squeue", "sacct", "scancel", "qstat", "qdel"):
        program = f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/called\n{answers.get(name, "")}\n'
        (bin_ / name).write_text(program)
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    record(run, "submission", mode="train", submission="train-1", site="perlmutter", scheduler="slurm", chain=2)
    record(run, "submission", mode="preprocess", submission="preprocess-1", site="derecho", scheduler="pbs", chain=1)
    record(run, "submitted", mode="preprocess", submission="preprocess-1", ids=["7.s"], after=[])
    record(run, "submitted", mode="train", ids=["101"], after=[])  # of an earlier version
    record(run, "submission", mode="train", submission="train-2", site="local", scheduler="local", chain=1)
    record(run, "begin", mode="train", job="local-1", submission="train-2", checkpoint=-1)
    record(run, "begin", mode="train", job="101", submission="train-1", checkpoint=-1)
    record(run, "extended", mode="train", job="101", next="102")
    active = {"7.s": "queued", "101": "running", "102": "queued"}
    assert active_jobs(run) == active
    states = {row.job: row.state for row in status(run).jobs}
    assert states == {**active, "local-1": "running"}
    with pytest.raises(UserError, match=r"no job of this run in the queue, got 101 \(running\), 102"):
        submit(write_experiment(tmp_path, steps=1, seconds=0, site="local"))
    (tmp_path / "called").unlink()
    assert [one.job for one in cancel(run, "102")] == ["102"]
    assert "scancel 102" in (tmp_path / "called").read_text().splitlines()
    cancel(run)
    called = (tmp_path / "called").read_text().splitlines()
    assert "qdel 7.s" in called
    assert "scancel 101" in called


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("evaluate", Options(walltime=dt.timedelta(hours=2))),
        ("preprocess", Options(account="x")),
        ("rollout", Options(nodes=1, ngpus=2)),
    ],
)
def test_options_of_other_jobs_ask_for_no_training_in_one_process(tmp_path, mode, given):
    """An experiment without `pbs`, of which a training needs two processes."""
    overrides = [
        "trainer.parallelism={data: fsdp2, replicate: 2}",
        "trainer.micro_batch_size=4",
        f"save_loc={tmp_path / 'run'}",
        "site=generic-slurm",
    ]
    overrides += overrides_of(given, mode)
    found, _, world = checked_experiment(DEMO, overrides, mode=mode)
    assert (world, world_of(found, mode), world_of(found, "train")) == (2, 2, found.pbs.nodes * (found.pbs.ngpus or 1))
    check_sections(DEMO, overrides, None, mode)
    with pytest.raises(ExperimentError, match="expected a divisor of the 1 data-parallel replicas"):
        checked_experiment(DEMO, overrides)


def test_a_queue_that_may_end_jobs_is_named_where_it_alone_takes_a_job():
    given = experiment("derecho", pbs={"queue": None, "nodes": 1, "walltime": "50:00:00"})
    message = r"got 1 node for 50:00:00, .* or specify the queue preempt, whose jobs may be ended for others"
    with pytest.raises(UserError, match=message):
        plan_jobs(given, "train")
    asked = experiment("derecho", pbs={"queue": "preempt", "nodes": 1, "walltime": "50:00:00"})
    trainer = {"parallelism": {"data": "fsdp2"}, "global_batch_size": 4}
    asked = asked.model_copy(update={"trainer": type(asked.trainer).model_validate(trainer)})
    assert plan_jobs(asked, "train").resources.queue == "preempt"


@pytest.mark.parametrize(("batch_size", "members", "most"), [(4, 1, 8), (1, 1, 6), (12, 1, 12), (2, 4, 12)])
def test_the_largest_share_is_that_of_whole_batches(batch_size, members, most):
    """12 initial times on 2 GPUs; of members that fill several batches, each GPU computes some of every initial time."""
    ensemble = {"members": members, "amplitude": {"column_water": 0.5}} if members > 1 else {}
    inference = {"init": ["2000-08-01", "2000-08-03T18", "6h"], "batch_size": batch_size, "ensemble": ensemble}
    pbs = {"rollout": {"nodes": 1, "ngpus": 2}}
    plan = plan_jobs(experiment("generic-slurm", pbs=pbs, inference=inference), "rollout")
    assert (plan.initial_times, plan.most_times) == (12, most)


ASKED = Options(nodes=1, ngpus=2, walltime=dt.timedelta(minutes=90), queue="fast", account="mi$ne")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", [False, True])
def test_options_replace_what_the_experiment_asks_for_and_are_in_the_copy_that_jobs_read(tmp_path, pbs, mode, wrong):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    content = json.loads(file.read_text())
    del content["pbs"]["rollout"]
    content["site"] |= {
        "account_required": True,
        "queues": {"fast": {"nodes": ["gpu"], "max_walltime": "2h", "max_nodes": 1}},
    }
    if wrong:
        content["pbs"] |= {"walltime": "1000d", "queue": "slow", "ngpus": 64, "nodes": 5, "processes": None}
    file.write_text(json.dumps(content))
    with pytest.raises(UserError):
        submit(file, mode, after=["1"], dry_run=True)
    worlds = []

    def check(file, overrides, world):
        worlds.append(world)
        found = load_experiment(file, overrides)
        assert resources(found.pbs, found.site, mode).queue == "fast"

    (pbs.spool / "1.json").write_text(json.dumps({"id": "1", "state": "Q", "code": None, "after": []}))
    plan = submit(file, mode, ASKED, after=["1"], check=check)
    assert worlds == [2 if mode == "train" else None]
    assert plan.resources.account == "mi$ne"
    frozen = load_experiment(plan.experiment)
    again = plan_jobs(frozen, mode, after=("1",), workdir=Path.cwd())
    assert again.resources == plan.resources
    assert (again.resources.gpus, again.resources.walltime) == (2, ASKED.walltime)


def test_a_command_is_not_stopped_by_the_resources_of_another():
    """Options are those of one mode; what a file has for others may be for another machine."""
    modes = {
        "evaluate": {"processes": 2, "queue": "debug", "walltime": "1h"},
        "preprocess": {"queue": "debug", "walltime": "1h"},
    }
    given = experiment("polaris", pbs={"queue": "main", **modes})

    def wrong(mode):
        return [path for path, _ in launch_findings(given, False, mode)]

    assert wrong("train") == [("pbs",)]
    assert wrong("evaluate") == [("pbs", "evaluate", "processes")]
    assert wrong("preprocess") == []
    assert wrong(None) == [("pbs",), ("pbs", "evaluate", "processes")]


@pytest.mark.parametrize(
    ("sections", "mode", "made", "refused"),
    [
        ({"inference": {"output": {"path": "elsewhere"}}}, "evaluate", "elsewhere/forecast.zarr", None),
        (
            {"inference": {"output": {"path": "elsewhere"}}},
            "evaluate",
            "run/forecasts/forecast.zarr",
            "forecasts in elsewhere",
        ),
        ({}, "evaluate", "run/forecasts/forecast.zarr", None),
        ({"start_from": "source"}, "rollout", None, None),
        ({"start_from": {"path": "source", "lora": {"rank": 2}}}, "rollout", None, "expected a checkpoint"),
        ({}, "rollout", None, "expected a checkpoint"),
    ],
)
def test_work_is_possible_with_what_the_command_itself_takes(tmp_path, pbs, monkeypatch, sections, mode, made, refused):
    monkeypatch.chdir(tmp_path)
    file = write_experiment(tmp_path, steps=1, seconds=0)
    file.write_text(json.dumps({**json.loads(file.read_text()), **sections}))
    if made:
        (tmp_path / made).mkdir(parents=True)
    if refused:
        with pytest.raises(UserError, match=refused):
            submit(file, mode, dry_run=True)
    else:
        assert submit(file, mode, dry_run=True).mode == mode


@pytest.mark.parametrize(
    ("mode", "message"),
    [("rollout", "expected a checkpoint in .*got none"), ("evaluate", "expected forecasts in .*got none")],
)
def test_work_on_what_is_not_there_yet_needs_a_job_to_wait_for(tmp_path, pbs, mode, message):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    with pytest.raises(ValueError, match=message):
        submit(file, mode)
    training = submit(file, python=python(tmp_path))
    waiting = submit(file, mode, after=training.ids)
    assert pbs.jobs()[waiting.ids[0]]["after"] == list(training.ids)


def test_the_experiments_own_errors_come_before_anything_is_submitted(tmp_path, pbs):
    file = write_experiment(tmp_path, steps=1, seconds=0)
    with pytest.raises(ExperimentError, match=r"trainer.epochs: expected"):
        submit(file, overrides=["trainer.epochs=none"])
    with pytest.raises(ExperimentError, match="did you mean 'derecho'"):
        submit(file, site="derrecho")
    assert pbs.jobs() == {}
    assert not (tmp_path / "run").exists()
