"""Entering the process group, also after a restart: ranks meet those of their own start and of none before it."""

from __future__ import annotations

import datetime as dt
import time
import uuid

import torch
import torch.distributed as dist

from credit_like.parallel import blame
from credit_like.parallel.environment import Environment

_POLL = 0.01  # seconds


def join(place: Environment, device: torch.device, timeout: dt.timedelta) -> None:
    """Enter the default process group: gloo on CPU; NCCL on GPUs, and gloo for what lives on the CPU.

    Raises TimeoutError on rank 0, torch's DistStoreError on others, if not all ranks come within `timeout`.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # As torch tells it too: the agent that started this process has a store, otherwise rank 0 makes one.
    of_agent = blame.of_agent()
    ours = place.rank == 0 and not of_agent
    store: dist.Store = dist.TCPStore(
        place.address, place.port, place.world, is_master=ours, timeout=timeout, multi_tenant=not of_agent
    )
    causes = blame.watch(place, timeout)
    if of_agent:
        name = name_of_start(store, place.rank, place.world, timeout)
        causes.name_start(name)
        store = dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)


def name_of_start(store: dist.Store, rank: int, world: int, timeout: dt.timedelta) -> str:
    """A name that all ranks of this start have in common and no other start has.

    torchrun's agent keeps its store when it starts the workers again, and in it the addresses of those that died: a rank
    could connect to one of them. The number of restarts, which the agent tells, differs between nodes. So every rank greets
    with a word of its own, and rank 0 answers each, also those of former starts, until all ranks of this one have heard it.
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
