"""The text of job scripts; `tests/launch/golden/` has examples to read beside this file.

A script runs once as the job, and again on each node as `script node …`, started by the site's launcher. The node's
part starts torchrun's agent with the stop signals ignored, so that neither the agent nor the launcher ends the workers
in the middle of a step. It waits for the deadline, or for a stop file that the job's part creates when the scheduler
sends SIGTERM or SIGUSR1, and then sends SIGUSR1 to the workers of its node. This works however the launcher forwards
signals. A node whose agent fails leaves a file beside the stop file, for the other nodes to end too.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable

from credit_like.errors import UserError
from credit_like.launch import scheduler
from credit_like.launch.chain import FINISHED
from credit_like.launch.plan import Plan
from credit_like.launch.resources import seconds
from credit_like.naming import counted
from credit_like.schema.base import one_line, one_word
from credit_like.schema.launch import SiteSection, placeholders

_ASSIGNED = re.compile(r"(?:^|[\s(])([a-z_]+|CREDIT_LIKE_\w+)=")
MARK = "# Written by `credit-like submit`."
"""A line of every script."""
_OPTIONAL = re.compile(r"\[([^][]*\{\w+\}[^][]*)\]")

PATIENCE = 60
"""Seconds that the other nodes have to end by themselves when the agent of one has failed; torchrun would wait for 10 minutes
for an agent that never started. Ranks that have started end sooner, with a message of their own."""
_PORT = ("digits=${job%%[!0-9]*}", "port=$((20000 + 10#${digits:-$$} % 20000))")
"""Bash commands that derive a port from the job's number, so that two jobs on a node use different ports."""


def render(plan: Plan, site: SiteSection) -> dict[str, str]:
    """Return the scripts of a plan: file name → text.

    Raises UserError for a variable of the user's that is one of the script's own.
    """
    body = {"train": _train, "rollout": _rollout}.get(plan.mode, _single)
    nodes = f"export CREDIT_LIKE_NODES={plan.resources.nodes}  # for the lines below"
    constants, work = _constants(plan), list(body(plan, site))
    _check_names(plan, (nodes, *constants, *itertools.chain(*work)))
    sections = [
        ["#!/bin/bash", *directives(plan, site)],
        [f"# {_title(plan)}", MARK],
        [nodes, *_surroundings(plan, site)],
        constants,  # after the variables of the user and of the modules, whose names may be the same
        *work,
    ]
    return {plan.script.name: "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"}


def _check_names(plan: Plan, lines: Iterable[str]) -> None:
    """Raise UserError for a variable of the user's that these lines set."""
    own = {name for line in lines for name in _ASSIGNED.findall(line)}
    if taken := sorted(own & plan.environment.keys()):
        raise UserError(
            f"pbs.environment: expected names of variables that the job script does not set itself, got {', '.join(taken)}; "
            "change them"
        )


def directives(plan: Plan, site: SiteSection) -> list[str]:
    """Return the scheduler's lines, without a line, or a part of it in square brackets, whose value was not given.

    Raises UserError for a value that is not one word; values from the command line have not been validated by the
    schema.
    """
    dialect = scheduler.of(site)
    values = {**plan.resources.values(), "job": plan.job, "logs": str(plan.logs)}
    if plan.mode != "train":
        values["stop_before"] = None  # only training handles the stop signal
    lines = []

    def has_all(text: str) -> bool:
        return all(values.get(name) is not None for name in placeholders(text))

    for line in (*site.directives, *site.nodes[plan.resources.kind].request):
        line = _OPTIONAL.sub(lambda part: part[1] if has_all(part[1]) else "", line)
        names = placeholders(line)
        if has_all(line):
            lines.append(one_line(line.format(**{name: one_word(str(values[name])) for name in names})))
    if site.arrays:
        lines += dialect.array(plan.array)
    return [f"{dialect.prefix} {line}" for line in lines]


def _title(plan: Plan) -> str:
    r = plan.resources
    size = f"{counted(r.nodes, 'node')} × {plan.each} = {counted(r.world, 'process')}"
    title = f"{plan.mode} of {plan.name} on {plan.site}: {size}"
    if plan.layout is not None:
        title += f" = {plan.layout}"
    if plan.mode == "rollout":
        title += f"; {counted(plan.array, 'job')}, {counted(plan.shares, 'share')}"
    return title


def _constants(plan: Plan) -> list[str]:
    constants: dict[str, object] = {"experiment": plan.experiment, "save_loc": plan.save_loc, "python": plan.python}
    r = plan.resources
    if plan.mode == "train":
        constants |= {"script": plan.script, "nodes": r.nodes, "per_node": r.processes, "walltime": seconds(r.walltime)}
        constants |= {"stop_before": seconds(r.stop_before)}
    if plan.mode == "rollout":
        constants |= {"per_node": r.processes // plan.group, "shares": plan.shares}
    return [f"{name}={_quoted(str(value))}" for name, value in constants.items()]


def _surroundings(plan: Plan, site: SiteSection) -> list[str]:
    """Return the lines that set up the environment: modules, the user's lines and variables, then the folder.

    `set -u` comes after the modules, whose scripts often use unset variables.
    """
    lines = [f"module {arguments}" for arguments in site.modules]
    lines += plan.setup
    lines += [f"export {name}={_quoted(value)}" for name, value in plan.environment.items()]
    return [*map(one_line, lines), "set -uo pipefail", f"cd {_quoted(str(plan.workdir))} || exit 1"]


def _quoted(text: str) -> str:
    """Return the text quoted as one word of bash.

    Raises UserError for text with a line break.
    """
    return shlex.quote(one_line(text))


def _train(plan: Plan, site: SiteSection) -> Iterable[list[str]]:
    dialect = scheduler.of(site)
    r = plan.resources
    yield [
        "# One node: torchrun's agent, and a watch that tells its workers when to stop, and ends them after another node's.",
        "node() {",
        "    local rank=$1 master=$2 port=$3 deadline=$4 stop=$5 agent watch status=0",
        "    trap '' TERM USR1  # for the workers to take at the end of a step, not for the agent or this shell",
        "    [[ $rank == launcher ]] && rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:?}}}",
        *(
            ["    export PATH=$CREDIT_LIKE_PATH LD_LIBRARY_PATH=$CREDIT_LIKE_LD_LIBRARY_PATH  # pbsdsh passes none"]
            if site.launcher == "pbsdsh" and r.nodes > 1
            else []
        ),
        '    "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$per_node" --node-rank="$rank" \\',
        '        --master-addr="$master" --master-port="$port" --signals-to-handle=SIGINT \\',
        '        -m credit_like.cli train "$experiment" &',
        "    agent=$!",
        "    (",
        "        until [[ -e $stop || -e $stop.failed ]] || (( $(date +%s) >= deadline )); do sleep 1; done",
        '        until [[ -e $stop.failed ]]; do pkill -USR1 -P "$agent"; sleep 5; done',
        f'        sleep {PATIENCE}; pkill -KILL -P "$agent"; kill -KILL "$agent"',
        "    ) >/dev/null 2>&1 &",
        "    watch=$!",
        '    wait "$agent" || status=$?',
        '    { kill -KILL "$watch"; wait "$watch"; } 2>/dev/null',
        '    (( status == 0 )) || touch "$stop.failed"',
        '    return "$status"',
        "}",
        'if [[ ${1:-} == node ]]; then node "${@:2}"; exit $?; fi',
    ]
    yield [
        "# The job: is there anything left to do?",
        f'job="{dialect.job}"',
        "started=$(date +%s)",
        f'"$python" -m credit_like.launch.chain begin "$save_loc" train "$job" {plan.submission}',
        f"case $? in 0) ;; {FINISHED}) exit 0 ;; *) exit 1 ;; esac",
    ]
    if plan.chain == "auto" and dialect.extend:
        yield [
            "# The next job waits for the end of this one, however it comes.",
            f'"$python" -m credit_like.launch.chain extend "$save_loc" train "$job" -- {dialect.extend}',
        ]
    yield [
        dialect.hosts,
        *(
            []
            if site.launcher == "fork"
            else [
                "if (( ${#hosts[@]} != nodes )); then",
                '    echo "expected $nodes nodes, got ${#hosts[@]}: ${hosts[*]}" >&2',
                "    exit 1",
                "fi",
            ]
        ),
        *_PORT,
        "deadline=$((started + walltime - stop_before))",
        "stop=$save_loc/jobs/stop.$job",
        'rm -f "$stop" "$stop.failed"',
        "interrupted=no",
        "trap 'interrupted=yes; touch \"$stop\"' TERM USR1",
    ]
    yield [
        "# Wait for a child through any number of signals; its exit status.",
        "await() {",
        "    local status",
        "    while true; do",
        "        interrupted=no status=0",
        '        wait "$1" || status=$?',
        '        [[ $interrupted == yes ]] || return "$status"',
        "    done",
        "}",
    ]
    yield [
        *_launch(site, r.nodes),
        'rm -f "$stop" "$stop.failed"',
        '"$python" -m credit_like.launch.chain end "$save_loc" train "$job" "$status"',
    ]


def _launch(site: SiteSection, nodes: int) -> list[str]:
    """Return bash that runs `script node` on every node and waits; `status` is that of the last one that failed."""
    ignore = "trap '' TERM USR1; exec"
    common = '"${hosts[0]}" "$port" "$deadline" "$stop"'
    if nodes == 1:
        return [f'( {ignore} bash "$script" node 0 {common} ) &', "status=0", "await $! || status=$?"]
    options = " ".join(map(_quoted, site.launcher_options))
    options += " " * bool(options)
    on_all = {
        "mpiexec": f'mpiexec -n "$nodes" {options}',
        "srun": f'srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 {options}',
    }
    if site.launcher in on_all:
        command = f'{on_all[site.launcher]}bash "$script" node launcher {common}'
        return [f"( {ignore} {command} ) &", "status=0", "await $! || status=$?"]
    lines = ["pids=()"]
    if site.launcher == "pbsdsh":
        lines += [
            "for (( rank = 0; rank < nodes; rank++ )); do",
            "    # pbsdsh counts the lines of the node file, of which a node may have several",
            '    slot=$(awk -v host="${hosts[rank]}" \'$0 == host { print NR - 1; exit }\' "$PBS_NODEFILE")',
            f'    ( {ignore} pbsdsh -n "$slot" {options}-- env "CREDIT_LIKE_PATH=$PATH" \\',
            '        "CREDIT_LIKE_LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}" \\',
            f'        bash -l "$script" node "$rank" {common} ) &',
        ]
    else:
        lines += [
            "for (( rank = 0; rank < nodes; rank++ )); do",
            f'    ( {ignore} bash "$script" node "$rank" {common} ) &',
        ]
    return [
        *lines,
        "    pids+=($!)",
        "done",
        "status=0",
        'for pid in "${pids[@]}"; do await "$pid" || status=$?; done',
    ]


def _begin_and_end(plan: Plan, site: SiteSection) -> tuple[list[str], str]:
    dialect = scheduler.of(site)
    command = f'"$python" -m credit_like.launch.chain begin "$save_loc" {plan.mode} "$job" {plan.submission} || exit 1'
    begin = [f'job="{dialect.job}"', command]
    return begin, f'"$python" -m credit_like.launch.chain end "$save_loc" {plan.mode} "$job" "$status"'


def _single(plan: Plan, site: SiteSection) -> Iterable[list[str]]:
    begin, end = _begin_and_end(plan, site)
    workers = f" --workers {plan.resources.processes}" if plan.resources.processes > 1 else ""  # of preprocess alone
    yield [*begin, "status=0", f'"$python" -m credit_like.cli {plan.mode} "$experiment"{workers} || status=$?', end]


def _rollout(plan: Plan, site: SiteSection) -> Iterable[list[str]]:
    """Yield the parts of the body of a rollout: each node runs as many groups of processes as fit, each on its own share.

    A group is one process, or the tensor × domain processes of a split model. Shares of the initial times are numbered
    over all jobs.
    """
    begin, end = _begin_and_end(plan, site)
    devices, command = [], '"$python" -m credit_like.cli rollout'
    if plan.group > 1:
        command = (
            f'"$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node={plan.group} \\\n'
            "        -m credit_like.cli rollout"
        )  # --standalone takes a free port: other jobs may run on the node
    if plan.resources.gpus:
        numbers = ",".join(map(str, range(plan.resources.gpus)))
        devices += [f'IFS=, read -ra devices <<< "${{CUDA_VISIBLE_DEVICES:-{numbers}}}"']
        mine = (
            "${devices[k]:?}" if plan.group == 1 else f'$(IFS=,; echo "${{devices[*]:k * {plan.group}:{plan.group}}}")'
        )
        command = f"CUDA_VISIBLE_DEVICES={mine} {command}"
    index = scheduler.of(site).index
    yield [*begin, f"index={index}", *devices]
    yield [
        "pids=()",
        "for (( k = 0; k < per_node; k++ )); do",
        "    share=$((index * per_node + k + 1))",
        "    (( share <= shares )) || break",
        f'    {command} "$experiment" --share "$share/$shares" &',
        "    pids+=($!)",
        "done",
        "status=0",
        'for pid in "${pids[@]}"; do wait "$pid" || status=$?; done',
        end,
    ]
