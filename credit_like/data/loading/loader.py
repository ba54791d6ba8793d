"""Batches of windows: the micro-batches of this rank, in an order that depends only on (seed, epoch)."""

from __future__ import annotations

import gc
import os
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from credit_like.data.loading.arena import Allocate, Arena, Handed, hand_over, plain, size_of
from credit_like.data.loading.windows import Windows
from credit_like.data.store import ReadError
from credit_like.data.times import from_seconds, to_text
from credit_like.errors import DEAD_WORKER, RunError, UserError, known_message
from credit_like.layout import accumulation
from credit_like.processes import signals_held, work_for
from credit_like.schema.checks import epoch_samples
from credit_like.state import Sample

FILL = -1
"""Index of a fill window, which does not count."""


def sample_order(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Return a permutation of n samples: the ranks of raw 64-bit words of Philox with key (seed, epoch).

    Raw words of a bit generator are stable across versions of numpy, which a `Generator`'s shuffles are not.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)


class Loader:
    """Micro-batches of one data-parallel rank.

    Global batch g is samples [g·G, (g + 1)·G) of the epoch's order in every layout. Micro-batch k of rank r of R is
    samples [(k·R + r)·m, (k·R + r + 1)·m), so that G / (R·m) micro-batches make up this rank's share. Shuffled epochs
    drop the last incomplete global batch. Unshuffled epochs (validation) use every sample and end with smaller
    micro-batches; a rank without samples left gets one with index −1, so that all ranks have the same number of
    micro-batches.

    Ranks that differ only in their tensor or domain coordinate get the same samples. `num_workers` processes (or one
    thread, if 0) read ahead `prefetch_factor` micro-batches each; the order does not depend on their number. Raises
    UserError if the batch sizes do not divide, or if a global batch needs more samples than there are.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        seed: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        shuffle: bool = True,
        batches_per_epoch: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.windows = windows
        self.seed, self.shuffle = seed, shuffle
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self.accumulation = accumulation(global_batch_size, micro_batch_size, dp_size)
        self.samples = self._epoch_samples(len(windows), global_batch_size, batches_per_epoch)
        self._sampler = _Fixed()
        self._num_workers, self._ahead, self._pin_memory = num_workers, prefetch_factor, pin_memory
        self._loader: _Loader | None = None

    def _with_workers(self) -> _Loader:
        # Besides the batches read ahead and the one being read, the main process holds the current batch and the
        # previous one.
        size = size_of(self.windows.shapes(self.micro_batch_size))
        arena = Arena(self._num_workers, self._ahead + 3, size)
        return _Loader(
            _Batches(self.windows, arena),
            batch_size=None,
            sampler=self._sampler,
            # The loader has its own generator: a start in mid-epoch, which draws a seed for the workers, must not
            # advance the run's random numbers.
            generator=torch.Generator(),
            num_workers=self._num_workers,
            collate_fn=_same,
            worker_init_fn=partial(_begin_work, os.getpid()),
            pin_memory=self._pin_memory,
            prefetch_factor=self._ahead,
            persistent_workers=True,
        )

    def _epoch_samples(self, n: int, global_batch_size: int, batches_per_epoch: int) -> int:
        """Return how many samples of the order are used."""
        if self.shuffle:
            return epoch_samples(n, global_batch_size, batches_per_epoch)
        return min(n, batches_per_epoch * global_batch_size) if batches_per_epoch else n

    @property
    def windows_ahead(self) -> int:
        """Return how many micro-batches may have been read ahead."""
        return self._ahead * max(1, self._num_workers)

    def close(self) -> None:
        """Stop the workers; the next `batches` starts new ones."""
        if self._loader is not None:
            self._loader.close()
        self._loader = None

    def __len__(self) -> int:
        """Return the micro-batches of this rank in an epoch."""
        return -(-self.samples // (self.micro_batch_size * self.dp_size))

    def indices(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return the windows of each of this rank's micro-batches; `FILL` alone if only other ranks have samples left."""
        n = len(self.windows)
        order = sample_order(self.seed, epoch, n) if self.shuffle else np.arange(n)
        step = self.micro_batch_size * self.dp_size
        rounds = [order[i : min(i + step, self.samples)] for i in range(0, self.samples, step)]
        parts = [np.array_split(part, self.dp_size)[self.dp_rank] for part in rounds]
        return [part if len(part) else np.array([FILL]) for part in parts]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Sample]:
        """Yield the micro-batches of an epoch from number `start` on.

        Raises ReadError that names variable, time and file if data cannot be read, or the micro-batch and its times if
        a worker dies.
        """
        wanted = self.indices(epoch)[start:]
        source = self._from_workers(wanted, epoch, start) if self._num_workers else self._from_thread(wanted)
        for sample in source:
            if isinstance(sample, _Failure):
                self.close()
                raise sample.error
            yield sample

    def again(self, epoch: int, start: int, count: int) -> list[Sample]:
        """Return micro-batches `start` to `start + count` of an epoch, read at once and independently of `batches`.

        Raises ReadError if data cannot be read.
        """
        samples = [self._read(indices.tolist()) for indices in self.indices(epoch)[start : start + count]]
        if failed := next((sample for sample in samples if isinstance(sample, _Failure)), None):
            raise failed.error
        return samples

    def _from_thread(self, wanted: list[NDArray[np.int64]]) -> Iterator[Any]:
        """Read ahead in a thread of this process while the caller computes with the previous batch."""
        reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        coming: deque[Future[Any]] = deque()
        try:
            for indices in wanted:
                coming.append(reader.submit(self._read, indices.tolist()))
                if len(coming) > self._ahead:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            reader.shutdown(cancel_futures=True)

    def _read(self, indices: list[int]) -> Any:
        sample = _Batches(self.windows)[indices]
        return sample.pin_memory() if self._pin_memory and isinstance(sample, Sample) else sample

    def _from_workers(self, wanted: list[NDArray[np.int64]], epoch: int, start: int) -> Iterator[Any]:
        self._loader = self._loader or self._with_workers()
        self._sampler.batches = wanted
        with signals_held():
            source = iter(self._loader)
        for number, indices in enumerate(wanted, start):
            try:
                yield next(source)
            except RuntimeError as error:
                self.close()
                if DEAD_WORKER not in str(error):  # it raised an error, which may be any
                    raise
                at = self.windows.store.time_seconds(self.windows.starts[np.maximum(indices, 0)])
                times = ", ".join(map(to_text, from_seconds(at, self.windows.store.calendar)))
                raise ReadError(
                    f"a loader worker died near micro-batch {number} of epoch {epoch} ({times}): {error}"
                ) from error


class _Loader(DataLoader[Any]):
    """torch's loader, which ends quietly where not all workers could be started."""

    def _get_iterator(self) -> _MultiProcessingDataLoaderIter:
        self.check_worker_number_rationality()
        return _Workers(self)

    def close(self) -> None:
        """End the workers.

        After an error, whose traceback refers to them, they would otherwise be left to the garbage collector. That takes down
        their queues first, so that torch cannot tell them to end and waits 5 s for each.
        """
        if isinstance(self._iterator, _Workers):
            self._iterator.close()


class _Workers(_MultiProcessingDataLoaderIter):
    def close(self) -> None:
        self._shutdown_workers()

    def __del__(self) -> None:
        # Without some of its attributes, where `__init__` failed, torch's method would print a traceback after the message.
        with suppress(AttributeError):
            super().__del__()


class _Failure:
    """An error on its way from a worker to the main process, with its full message.

    Its traceback goes along as a note, which is shown where a traceback is.
    """

    def __init__(self, error: RunError | UserError, raised: BaseException) -> None:
        self.error = error
        error.add_note("In a loader worker:\n" + "".join(traceback.format_exception(raised)))


class _Fixed(Sampler[Any]):
    """Sampler of the batches assigned to `batches`. It outlives epochs, as the workers do."""

    def __init__(self) -> None:
        self.batches: Sequence[NDArray[np.int64]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch.tolist() for batch in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


class _Batches(Dataset[Any]):
    """Dataset that maps the window numbers of a micro-batch to its Sample, in a block of the arena if there is one."""

    def __init__(self, windows: Windows, arena: Arena | None = None) -> None:
        self.windows, self.arena = windows, arena

    def __getitem__(self, indices: Any) -> Sample | Handed | _Failure:
        try:
            if self.arena is None:
                return self._make(indices, plain)
            return hand_over(self.arena, partial(self._make, indices))
        except (ReadError, UserError) as error:
            return _Failure(error, error)
        except (OSError, RuntimeError, MemoryError) as error:
            message = known_message(error) if self.arena is not None else None
            if message is None:
                raise
            return _Failure(RunError(message), error)  # torch would pass on its text and traceback alone

    def _make(self, indices: list[int], allocate: Allocate) -> Sample:
        if indices == [FILL]:
            fill = self.windows.batch([0], allocate)
            return replace(fill, index=torch.full_like(fill.index, FILL))
        return self.windows.batch(indices, allocate)


def _same(item: Any) -> Any:
    return item


def _begin_work(parent: int, _worker: int) -> None:
    """Leave signals to the parent, and prevent this worker from finalising inherited objects such as files."""
    work_for(parent)
    gc.freeze()
    gc.enable()  # the parent collects between its steps
