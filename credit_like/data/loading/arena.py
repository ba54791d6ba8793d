"""Reusable shared memory in which worker processes pass samples to the main process.

A fresh shared page costs more than filling it: its first touch takes the kernel a third of the time that decoding its
contents takes. A block is therefore reused as soon as the main process has released its sample.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from credit_like.state import Sample

Shape = tuple[int, ...]
Allocate = Callable[[Shape], Tensor]

_ALIGN = 64  # bytes
_FIELDS = ("prognostic", "forcing", "target")
_numbers = itertools.count()
_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


def plain(shape: Shape) -> Tensor:
    """Allocate tensors in this process's own memory."""
    return torch.empty(shape, dtype=torch.float32)


def size_of(shapes: list[Shape]) -> int:
    """Return the bytes that float32 tensors of these shapes take in a block."""
    return sum(_ALIGN * -(-4 * math.prod(shape) // _ALIGN) for shape in shapes)


class Arena:
    """`per_worker` shared-memory blocks of `size` bytes for each worker process.

    The process that receives the samples creates the arena. A worker takes a block, and the block is free again when no
    tensor of the main process refers to it. If no block is free, or the sample is too large for one, the sample travels
    in newly allocated memory.
    """

    def __init__(self, workers: int, per_worker: int, size: int) -> None:
        self.number, self.per_worker, self.size = next(_numbers), per_worker, size
        self.taken = torch.zeros(workers * per_worker, dtype=torch.uint8).share_memory_()
        # The kernel allocates pages on first touch only.
        storage = torch.UntypedStorage._new_shared(max(1, workers * per_worker * size))
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        _arenas[self.number] = self

    def block(self) -> int | None:
        """Take a free block of this worker."""
        info = get_worker_info()
        assert info is not None
        own = range(info.id * self.per_worker, (info.id + 1) * self.per_worker)
        found = next((k for k in own if not self.taken[k]), None)
        if found is not None:
            self.taken[found] = 1
        return found

    def carve(self, block: int, shapes: list[Shape]) -> list[Tensor]:
        """Return tensors in a block, which is freed when the last of them and of their views is gone."""
        start = block * self.size
        # Every tensor created here keeps this view alive, so its finaliser runs when the last of them is gone.
        view = self.memory.numpy()[start : start + self.size]
        weakref.finalize(view, _let_go, self.taken, block, os.getpid()).atexit = False
        whole = torch.from_numpy(view)
        return [_cut(whole, size_of(shapes[:i]), shape) for i, shape in enumerate(shapes)]


def _cut(memory: Tensor, start: int, shape: Shape) -> Tensor:
    """Return the float32 tensor that begins at this byte."""
    return memory[start : start + 4 * math.prod(shape)].view(torch.float32).view(shape)


def _let_go(taken: Tensor, block: int, owner: int) -> None:
    # A forked process that inherited the sample must not free the block.
    if os.getpid() == owner:
        taken[block] = 0


class Handed:
    """A sample in a shared block on its way to the main process, where it is unpickled as a Sample."""

    def __init__(self, arena: Arena, block: int, sample: Sample) -> None:
        self.arena, self.block = arena, block
        self.shapes = [tuple(getattr(sample, name).shape) for name in _FIELDS]
        self.index = sample.index.tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.arena.number, self.block, self.shapes, self.index)


def _receive(number: int, block: int, shapes: list[Shape], index: list[int]) -> Sample:
    prognostic, forcing, target = _arenas[number].carve(block, shapes)
    return Sample(prognostic, forcing, target, torch.tensor(index, dtype=torch.int64))


def hand_over(arena: Arena, make: Callable[[Allocate], Sample]) -> Sample | Handed:
    """Run `make` in a worker process with an allocator that uses a shared block if one is free."""
    block = arena.block()
    if block is None:
        return make(plain)
    start, end = block * arena.size, (block + 1) * arena.size
    position = start

    def allocate(shape: Shape) -> Tensor:
        nonlocal position
        first, position = position, position + size_of([shape])
        if position > end:
            return plain(shape)
        return _cut(arena.memory, first, shape)

    try:
        sample = make(allocate)
    except BaseException:
        arena.taken[block] = 0
        raise
    if position > end:
        arena.taken[block] = 0
        return sample
    return Handed(arena, block, sample)
