"""The resources of a job (nodes, GPUs, CPUs, memory, queue, walltime) within the rules of its site."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, replace
from typing import Any

from credit_like.errors import UserError
from credit_like.naming import counted
from credit_like.registry import did_you_mean
from credit_like.schema.base import format_duration, parse_duration
from credit_like.schema.launch import Mode, NodeKind, PbsSection, Queue, Request, SiteSection

_LEAST = {"slurm": dt.timedelta(minutes=1)}
"""Shortest walltime by scheduler: Slurm counts minutes, and takes none for no limit."""

_ASKED = ("nodes", "ngpus", "walltime", "queue")
"""Options that are keys of a request."""


@dataclass(frozen=True)
class Options:
    """Resources given on the command line, which take precedence over the experiment's; None keeps the experiment's."""

    nodes: int | None = None
    ngpus: int | None = None
    walltime: dt.timedelta | None = None
    queue: str | None = None
    account: str | None = None


def options(walltime: str | None = None, **given: Any) -> Options:
    """Return the options given on a command line.

    Raises UserError for an invalid walltime.
    """
    return Options(walltime=None if walltime is None else parse_duration(walltime), **given)


def overrides_of(options: Options, mode: Mode) -> list[str]:
    """Return the options as overrides of the experiment, for its checks and for the copy that the jobs read."""
    asked = {name: value for name in _ASKED if (value := getattr(options, name)) is not None}
    if asked.get("ngpus"):
        asked["processes"] = None  # one per GPU
    own = "pbs" if mode == "train" else f"pbs.{mode}"
    changes: dict[str, Any] = {f"{own}.{name}": value for name, value in asked.items()}
    if options.account is not None:
        changes["pbs.account"] = options.account
    return [f"{key}={_in_yaml(value)}" for key, value in changes.items()]


def _in_yaml(value: dt.timedelta | str | int | None) -> str:
    text = format_duration(value) if isinstance(value, dt.timedelta) else value
    return json.dumps(text).replace("$", "$$")


@dataclass(frozen=True)
class Resources:
    """The resources of one job; `processes`, `gpus`, `cpus` and `memory_gb` are per node."""

    kind: str
    """Kind of node, a key of the site's `nodes`."""
    nodes: int
    processes: int
    gpus: int
    cpus: int
    memory_gb: int | None
    walltime: dt.timedelta
    stop_before: dt.timedelta
    """Time before the walltime at which training is asked to save and stop."""
    queue: str | None
    account: str | None
    fields: dict[str, str]

    @property
    def world(self) -> int:
        """Number of processes of the job."""
        return self.nodes * self.processes

    def values(self) -> dict[str, str | None]:
        """Return the value of every placeholder of a directive; None where no value was given."""
        total_memory = None if self.memory_gb is None else self.memory_gb * self.nodes
        values: dict[str, Any] = {
            "account": self.account,
            "queue": self.queue,
            "walltime": clock(self.walltime),
            "stop_before": seconds(self.stop_before),
            "nodes": self.nodes,
            "processes": self.processes,
            "gpus": self.gpus,
            "cpus": self.cpus,
            "memory_gb": self.memory_gb,
            "total_gpus": self.gpus * self.nodes,
            "total_cpus": self.cpus * self.nodes,
            "total_memory_gb": total_memory,
            **self.fields,
        }
        return {name: None if value is None else str(value) for name, value in values.items()}


def request_of(pbs: PbsSection, mode: Mode) -> Request:
    """Return the request of a mode: the mode's own keys first, then the `pbs` section.

    By default, preprocessing and scoring request one CPU node, and a rollout requests one node like those of training.
    """
    common = Request.model_construct(**{name: getattr(pbs, name) for name in Request.model_fields})
    if mode == "train":
        return common
    alone = {"ngpus": 0, "processes": None, "cpus": None, "memory_gb": None}
    base = common.model_copy(update={"nodes": 1, **({} if mode == "rollout" else alone)})
    asked: Request = getattr(pbs, mode)
    if asked.ngpus:
        base = base.model_copy(update={"processes": None})  # one per GPU
    return base.model_copy(update={k: v for k in Request.model_fields if (v := getattr(asked, k)) is not None})


def resources(pbs: PbsSection, site: SiteSection, mode: Mode) -> Resources:
    """Return the resources of one job, checked against the site's rules.

    Raises UserError for a missing account or field, a queue that does not exist or does not take the job, and nodes that are
    too small.
    """
    request = request_of(pbs, mode)
    assert request.nodes is not None
    assert request.ngpus is not None
    assert request.walltime is not None
    queue_is_asked = mode == "train" or getattr(pbs, mode).queue is not None
    if request.walltime < (least := _LEAST.get(site.scheduler, dt.timedelta(seconds=1))):
        raise UserError(
            f"expected a walltime of at least {clock(least)} at {site.name}, got {request.walltime.total_seconds():g} s, change "
            "pbs.walltime or --walltime"
        )
    queue, kind = _queue_and_kind(site, request, 1 if mode == "rollout" else request.nodes, queue_is_asked)
    node = site.nodes[kind]
    _fits_node(site, node, kind, request)
    account = pbs.account
    if site.account_required and not account:
        raise UserError(f"expected an account for {site.name}, got none, add pbs.account or --account")
    gpus = request.ngpus
    return Resources(
        kind=kind,
        nodes=request.nodes,
        processes=_processes(request, mode),
        gpus=gpus,
        cpus=request.cpus or _share(node.cpus, node, gpus),
        memory_gb=request.memory_gb or (_share(node.memory_gb, node, gpus) if node.memory_gb else None),
        walltime=request.walltime,
        stop_before=min(site.stop_before, dt.timedelta(seconds=max(1, seconds(request.walltime) // 4))),
        queue=queue,
        account=account,
        # Without a site, it is not known which fields there are.
        fields=_fields(pbs, site) if site != SiteSection() else {},
    )


def one_node(request: Resources) -> Resources:
    """Return the same resources for a job of one node."""
    return replace(request, nodes=1)


def clock(duration: dt.timedelta) -> str:
    """Return a duration as HH:MM:SS, the format of schedulers."""
    total = seconds(duration)
    return f"{total // 3600:02d}:{total % 3600 // 60:02d}:{total % 60:02d}"


def seconds(duration: dt.timedelta) -> int:
    """Return a duration in whole seconds."""
    return int(duration.total_seconds())


def _processes(request: Request, mode: Mode) -> int:
    """Return the number of processes of a job on each node.

    Raises UserError where another number is requested.
    """
    if mode == "evaluate":
        if request.processes is not None:
            raise UserError(
                f"pbs.evaluate.processes: expected none, because one process scores, got {request.processes}, remove it"
            )
        return 1
    if mode == "preprocess":
        return request.processes or 1
    if request.ngpus and request.processes not in (None, request.ngpus):
        raise UserError(
            f"expected one process per GPU, got pbs.processes {request.processes} for {request.ngpus} GPUs, remove pbs.processes"
        )
    return request.ngpus or request.processes or 1


def _queue_and_kind(site: SiteSection, request: Request, nodes: int, is_asked: bool) -> tuple[str | None, str]:
    """Return the queue and the kind of its nodes: the one that is asked for, or the first that takes a job of so many nodes.

    An inherited queue is only the first to be tried. Raises UserError if there is none.
    """
    ngpus = request.ngpus or 0
    fitting = [name for name, node in site.nodes.items() if node.gpus is None or bool(node.gpus) == bool(ngpus)]
    wanted = f"nodes {'with' if ngpus else 'without'} GPUs"
    if not site.queues:
        if not fitting:
            raise UserError(f"expected {wanted}, got only {_kinds(site)} at {site.name}, change ngpus {ngpus}")
        return request.queue, fitting[0]
    if request.queue is not None and request.queue not in site.queues:
        known = list(site.queues)
        raise UserError(
            f"expected a queue of {site.name}, one of {', '.join(known)}, got {request.queue!r}, "
            f"change pbs.queue or --queue{did_you_mean(request.queue, known)}"
        )
    candidates = [request.queue] if request.queue else []
    if not (is_asked and request.queue):
        candidates += [name for name, queue in site.queues.items() if name != request.queue and not queue.preemptible]
    kinds = {name: [kind for kind in site.queues[name].nodes if kind in fitting] for name in candidates}
    problems = {}
    for name in candidates:
        if kinds[name]:
            problems[name] = _queue_problem(site, request, name, nodes)
            if problems[name] is None:
                return name, kinds[name][0]
    if len(problems) == 1:
        raise UserError(*problems.values())
    if problems:
        assert request.walltime is not None
        limits = ", ".join(f"{name} ({_limits(site.queues[name], nodes)})" for name in problems)
        others = (name for name, queue in site.queues.items() if queue.preemptible and set(queue.nodes) & set(fitting))
        other = next((name for name in others if _queue_problem(site, request, name, nodes) is None), None)
        hint = f", or specify the queue {other}, whose jobs may be ended for others, with pbs.queue" if other else ""
        raise UserError(
            f"expected a job that a queue of {site.name} takes, {limits}, got {counted(nodes, 'node')} for "
            f"{clock(request.walltime)}, change the nodes or the walltime{hint}"
        )
    where = f"queue {request.queue} of {site.name}" if is_asked and request.queue else site.name
    raise UserError(f"expected {wanted} for ngpus {ngpus}, got none in {where}, change the queue or ngpus")


def _queue_problem(site: SiteSection, request: Request, name: str, nodes: int) -> str | None:
    """Return why a queue does not take a job of so many nodes; None if it does."""
    queue = site.queues[name]
    assert request.walltime is not None
    if nodes < queue.min_nodes or nodes > (queue.max_nodes or nodes):
        return f"expected {_span(queue)} in queue {name} of {site.name}, got {nodes}, change the nodes or the queue"
    longest = queue.longest(nodes)
    if longest is not None and request.walltime > longest:
        size = f" for {counted(nodes, 'node')}" if queue.walltime_up_to else ""
        return (
            f"expected a walltime of at most {clock(longest)} in queue {name} of {site.name}{size}, "
            f"got {clock(request.walltime)}, change it and let --chain run the rest"
        )
    return None


def _limits(queue: Queue, nodes: int) -> str:
    """Return the limits of a queue, with the walltime of jobs of so many nodes."""
    longest = queue.longest(nodes)
    return _span(queue) + (f", at most {clock(longest)}" if longest is not None else "")


def _span(queue: Queue) -> str:
    """Return the numbers of nodes that a queue takes."""
    least = counted(queue.min_nodes, "node")
    return f"{queue.min_nodes} to {counted(queue.max_nodes, 'node')}" if queue.max_nodes else f"at least {least}"


def _fits_node(site: SiteSection, node: NodeKind, kind: str, request: Request) -> None:
    where = f"a {kind} node of {site.name}"
    if node.gpus is not None and (request.ngpus or 0) > node.gpus:
        raise UserError(
            f"expected at most {node.gpus} GPUs on {where}, got {request.ngpus}, change ngpus and take more nodes"
        )
    if request.cpus is not None and site.scheduler != "local" and request.cpus > node.cpus:
        raise UserError(f"expected at most {node.cpus} CPUs on {where}, got {request.cpus}, change pbs.cpus")
    if request.memory_gb is not None and node.memory_gb is not None and request.memory_gb > node.memory_gb:
        raise UserError(
            f"expected at most {node.memory_gb} GB on {where}, got {request.memory_gb}, change pbs.memory_gb"
        )


def _share(whole: int, node: NodeKind, gpus: int) -> int:
    """Return the share of a node's CPUs or memory that comes with some of its GPUs."""
    if node.whole or not node.gpus:
        return whole
    return max(1, whole * gpus // node.gpus)


def _fields(pbs: PbsSection, site: SiteSection) -> dict[str, str]:
    known = list(site.fields)
    for name in pbs.fields:
        if name not in site.fields:
            got = f"got {name!r}{did_you_mean(name, known)}"
            raise UserError(
                f"expected pbs.fields that {site.name} knows ({', '.join(known) or 'none'}), {got}, change or remove it"
            )
    values = {}
    for name, field in site.fields.items():
        value = pbs.fields.get(name, field.default)
        if value is not None:
            values[name] = value
        elif field.required:
            raise UserError(
                f"expected pbs.fields.{name} for {site.name}, got none, add it, such as {name}: {field.example}"
            )
    return values


def _kinds(site: SiteSection) -> str:
    return ", ".join(f"{name} ({node.gpus} GPUs)" for name, node in site.nodes.items())
