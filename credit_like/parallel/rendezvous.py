"""Rendezvous of the process group, also after a restart: ranks connect only to ranks of the same start."""

from __future__ import annotations

import datetime as dt
import os
import resource
import time
import uuid
from contextlib import suppress

import torch
import torch.distributed as dist

from credit_like.errors import RunError, reason
from credit_like.parallel import blame
from credit_like.parallel.environment import Environment

_POLL = 0.01  # seconds
_FILES = 65536
_PARTING = dt.timedelta(seconds=60)
_LAZY_FROM = 64
"""Number of ranks from which gloo connects lazily. With fewer, all ranks are connected, and notice at once that one ends."""
_store: dist.Store | None = None
"""The store of the default process group."""


def join(place: Environment, device: torch.device, timeout: dt.timedelta) -> None:
    """Join the default process group: gloo on CPU; NCCL on GPUs, and gloo for CPU tensors.

    From `_LAZY_FROM` ranks on, gloo connects to a rank when it first sends to it, because a connection from each rank to all
    others exceeds the usual number of open files at 1,024 ranks. The first reduction is here, so that whoever waits for a rank
    that dies later notices by the connection. On a GPU, NCCL's communicator of all ranks is made here, and those of the mesh
    are split from it.

    Raises RunError if not all ranks join within `timeout`, or if rank 0 cannot listen at its port.
    """
    try:
        _join(place, device, timeout)
    except (dist.DistError, TimeoutError) as error:
        said = reason(error)
        if "EADDRINUSE" in said:
            told = f"expected a free port at {place.address}, got {place.port}, which another program uses; set MASTER_PORT"
        elif isinstance(error, TimeoutError):
            told = said
        else:
            told = (
                f"expected {place.world} ranks at {place.address}:{place.port} within {timeout}, got fewer; start all, or "
                f"raise trainer.timeout ({said})"
            )
        raise RunError(told) from error


def _join(place: Environment, device: torch.device, timeout: dt.timedelta) -> None:
    """Join, with the errors of torch."""
    if place.world >= _LAZY_FROM:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _allow_many_files()
    gpu = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    # As in torch, the agent that started this process owns the store if there is an agent; otherwise rank 0 creates it.
    of_agent = blame.of_agent()
    ours = place.rank == 0 and not of_agent
    try:
        store: dist.Store = dist.TCPStore(
            place.address, place.port, place.world, is_master=ours, timeout=timeout, multi_tenant=not of_agent
        )
    except dist.DistNetworkError:
        if not ours:
            blame.out_of_reach(place)
        raise
    causes = blame.watch(place, timeout)
    if of_agent:
        name = name_of_start(store, place.rank, place.world, timeout)
        causes.name_start(name)
        store = dist.PrefixStore(name, store)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=device if gpu else None,
    )
    dist.all_reduce(torch.zeros((), dtype=torch.int64))
    global _store
    _store = store


def leave(rank: int, world: int) -> None:
    """Leave the process group; with lazy connections, when all ranks have completed their last collective.

    A rank that sends to another one for the first time reads its address from the store, which may end with rank 0, and
    connects to it. A rank whose own part of a collective is done therefore stays for the others, `_PARTING` at most, and
    rank 0 leaves last.
    """
    global _store
    store, _store = _store, None
    if store is not None and os.environ.get("TORCH_GLOO_LAZY_INIT") == "1":
        with suppress(dist.DistError):  # a rank that has failed does not come
            _meet(store, "parting/done", world)
            _meet(store, "parting/left", world, wait=rank == 0)
    dist.destroy_process_group()


def _meet(store: dist.Store, name: str, world: int, wait: bool = True) -> None:
    """Announce this rank and, with `wait`, wait until all ranks have done so. It needs no connection between ranks."""
    if store.add(name, 1) == world:
        store.set(f"{name}/all", "yes")
    if wait:
        store.wait([f"{name}/all"], _PARTING)


def _allow_many_files() -> None:
    """Raise the soft limit of open files and sockets of this process to `_FILES`, or to the hard limit if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def name_of_start(store: dist.Store, rank: int, world: int, timeout: dt.timedelta) -> str:
    """Return a name that all ranks of this start share and that no other start has.

    torchrun's agent reuses its store when it restarts the workers, with the addresses of the ones that died, to which a
    rank could connect. The number of restarts reported by the agent can differ between nodes. Therefore every rank
    publishes a random token, and rank 0 replies to each token (stale ones included) with the name of this start, until
    all current ranks have read it.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"greeting/{rank}", mine)
        name = store.get(f"answer/{mine}").decode()
        store.add(f"here/{name}", 1)
        return name
    silent, greetings, answered = {f"greeting/{other}" for other in range(1, world)}, list[str](), set[bytes]()
    deadline = time.monotonic() + timeout.total_seconds()
    while (here := 1 + store.add(f"here/{mine}", 0)) < world:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"expected {world} ranks within {timeout}, got {here}; start all, or raise trainer.timeout"
            )
        silent -= (come := {key for key in silent if store.check([key])})
        greetings += come
        for greeting in set(store.multi_get(greetings)) - answered:
            store.set(f"answer/{greeting.decode()}", mine)
            answered.add(greeting)
        time.sleep(_POLL)
    return mine
