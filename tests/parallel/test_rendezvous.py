"""What the start of a job costs each rank as the number of ranks grows, and how a GPU's group is made."""

from __future__ import annotations

import datetime as dt
import os
import resource
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from credit_like.parallel import rendezvous
from credit_like.parallel.environment import Environment
from credit_like.parallel.mesh import DIMS
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism
from tests.launch.slurm import free_ports

LAYOUTS = {"data": {"data": "ddp"}, "data-domain": {"data": "fsdp2", "domain": 2}}


class _Counted(dist.Store):
    """A store that counts the requests of one rank."""

    def __init__(self, store):
        super().__init__()
        self.store, self.requests = store, Counter()

    def __getattribute__(self, name):
        if name not in ("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set", "delete_key"):
            return super().__getattribute__(name)

        def request(*args):
            self.requests[name] += len(args[0]) if isinstance(args[0], list) else 1
            return getattr(self.store, name)(*args)

        return request


def _sockets():
    links = (os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
    return sum(link.startswith("socket:") for link in links)


def _start(rank, parallelism):
    made, real = [], dist.TCPStore
    rendezvous._LAZY_FROM = 2

    def store(*args, **options):
        made.append(_Counted(real(*args, **options)))
        return made[-1]

    rendezvous.dist.TCPStore = store
    before = _sockets()
    runtime = Runtime.start(Parallelism(**parallelism), torch.device("cpu"))
    started = _sockets() - before, sum(made[0].requests.values())
    groups = len(dist.distributed_c10d._world.pg_map)
    runtime.barrier()
    return groups, *started, _sockets() - before, sum(made[0].requests.values())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sockets are counted in /proc")
@pytest.mark.parametrize("parallelism", LAYOUTS.values(), ids=LAYOUTS)
def test_a_start_costs_a_rank_the_same_however_many_there_are(run_ranks, parallelism):
    """Groups, sockets and requests of a start, then sockets and requests after the ranks have agreed on a number.

    Gloo's connections from each to all would be 15 for 16 ranks. To agree, a rank connects to 2 · log2(ranks) others at
    most, and asks for their addresses. The first rank is left out: it answers the greetings of all others, as they come.
    """
    few, many = (
        [max(counts) for counts in zip(*run_ranks(world, _start, parallelism)[1:], strict=True)] for world in (4, 16)
    )
    assert many[0] == few[0] <= 1 + len(DIMS)  # all ranks, and each dimension of the mesh
    assert many[1] <= few[1] + 2
    assert many[2] <= few[2] + 2
    assert many[3] - many[1] <= 2 * 4
    assert many[4] - many[2] <= 2 * 2 * 4


def _part(rank, port):
    """Send for the first time in the last collective, and end at once; rank 0 has the store."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    rendezvous._LAZY_FROM = 2
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"), timeout=dt.timedelta(seconds=900))
    x = torch.full((1,), float(rank))
    dist.broadcast(x, 3)
    runtime.close()
    return float(x)


def test_lazily_connected_ranks_may_end_right_after_a_collective(run_ranks):
    (port,) = free_ports(1)
    assert run_ranks(4, _part, port) == [3.0] * 4


def test_a_rank_stays_until_all_have_announced_themselves():
    store, came = dist.HashStore(), threading.Event()

    def meet():
        rendezvous._meet(store, "done", 3)
        came.set()

    others = [threading.Thread(target=meet) for _ in range(2)]
    for other in others:
        other.start()
    assert not came.wait(0.3)
    rendezvous._meet(store, "done", 3, wait=False)
    for other in others:
        other.join(300)
    assert came.is_set()
    assert not any(other.is_alive() for other in others)


class _Joined(Exception):
    pass


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_gpu_is_bound_to_the_group_and_the_host_keeps_gloo(monkeypatch, device):
    def init(backend, **options):
        raise _Joined(backend, options["device_id"])

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: dist.HashStore())
    monkeypatch.setattr(rendezvous.blame, "watch", lambda *args: None)
    monkeypatch.setattr(rendezvous.blame, "of_agent", lambda: False)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with pytest.raises(_Joined) as joined:
        rendezvous.join(Environment(0, 2), torch.device(device), dt.timedelta(seconds=5))
    expected = ("gloo", None) if device == "cpu" else ("cpu:gloo,cuda:nccl", torch.device(device))
    assert joined.value.args == expected


def _limit(rank):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    rendezvous._allow_many_files()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard


def test_a_rank_may_open_as_many_files_as_a_large_job_needs(run_ranks):
    ((soft, hard),) = run_ranks(1, _limit)
    assert soft == (65536 if hard == resource.RLIM_INFINITY else min(65536, hard))
