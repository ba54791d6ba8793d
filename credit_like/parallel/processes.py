"""Short-lived ranks on this machine, forked from this process without a launcher."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Literal

import torch
import torch.distributed as dist

from credit_like.errors import UserError
from credit_like.parallel.environment import local_launch

GRACE = 5.0
"""Seconds that the other ranks have to end after one has failed."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a rank: its value, the message of its UserError, or the traceback of another error."""

    state: Literal["done", "refused", "failed"]
    value: Any


def run_ranks(world: int, function: Callable[[], Any], timeout: float) -> list[Answer]:
    """Fork `world` processes with a launcher's environment, call `function` in each, and return their answers.

    `function` joins the process group itself (`Runtime.start`) and sees the memory of this process. This process must
    not have computed with torch before, because threads do not survive a fork. The ranks share the cores, and none has
    more threads than this process. Ranks that are not done after `timeout` seconds, or `GRACE` seconds after another one
    has failed, are killed.
    """
    import torch._dynamo  # the first step needs it: the ranks have it from here instead of importing it each

    context = multiprocessing.get_context("fork")
    # OMP_NUM_THREADS stays the limit: two threads that have less than two cores spin at every barrier of a kernel.
    threads = min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // world))
    pipes: dict[int, Connection] = {}
    processes: dict[int, ForkProcess] = {}
    ports = []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        port, tell = context.Pipe(duplex=False)
        processes[rank] = context.Process(target=_rank, args=(rank, world, threads, port, function, send))
        processes[rank].start()
        send.close()
        pipes[rank] = receive
        ports.append(tell)
    # The store starts after the forks: a lock that its thread holds during a fork would never be released in that rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for tell in ports:
        tell.send(store.port)
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes.values():
            process.join(0.5)
            process.kill()
            process.join()


def _rank(rank: int, world: int, threads: int, port: Connection, function: Callable[[], Any], pipe: Connection) -> None:
    gc.freeze()  # the child must not finalise the garbage of its parent
    os.environ.update(local_launch(rank, world, port.recv()))
    torch.set_num_threads(threads)
    try:
        answer = Answer("done", function())
    except UserError as error:
        answer = Answer("refused", str(error))
    except Exception:  # noqa: BLE001 - the caller shows any exception of a rank
        answer = Answer("failed", traceback.format_exc())
    # bytes, because `send` would share tensors with a process that is about to end
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    os._exit(0)  # skip the finalisers of the parent process


def _collect(pipes: dict[int, Connection], timeout: float) -> list[Answer]:
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in pipes.items() if rank not in answers}
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answer: Answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answer = Answer("failed", "the process ended without an answer")
            answers[waiting[pipe]] = answer
            if answer.state != "done":
                deadline = min(deadline, time.monotonic() + GRACE)
    late = Answer("failed", "the process had not ended in time")
    return [answers.get(rank, late) for rank in pipes]
