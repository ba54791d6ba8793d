"""Number of threads of each process, and a warning where the processes of a node have more threads than cores."""

from __future__ import annotations

import logging
import os
import socket

import torch

from credit_like.parallel.runtime import Runtime

log = logging.getLogger(__name__)

Demand = tuple[str, int, tuple[int, ...]]
"""Host of a rank, its threads, and the cores that it may use."""


def set_threads(count: int | None, runtime: Runtime) -> None:
    """Compute with `count` threads in this process, by default as many as PyTorch chooses; all ranks must call it.

    On the CPU, log a warning where the threads of the ranks of a node are more than its cores: they then wait for each
    other.
    """
    if count is not None:
        torch.set_num_threads(count)
    if runtime.device.type != "cpu":
        return
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    demands = runtime.gather((socket.gethostname(), torch.get_num_threads(), tuple(cores)))
    if runtime.is_main and (text := excess(demands)):
        log.warning("%s", text)


def excess(demands: list[Demand]) -> str | None:
    """Return what to change where the threads of the ranks of a node exceed the cores that these ranks may use."""
    for host in dict.fromkeys(demand[0] for demand in demands):
        here = [demand for demand in demands if demand[0] == host]
        threads = sum(demand[1] for demand in here)
        cores = len(set().union(*(demand[2] for demand in here)))
        if threads > cores:
            return (
                f"{len(here)} process{'es' * (len(here) > 1)} with {threads} threads on the {cores} cores of {host}: they wait "
                f"for each other; set trainer.threads: {max(1, cores // len(here))}"
            )
    return None
