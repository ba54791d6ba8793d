"""The message and the files of a training that runs out of memory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from credit_like.errors import RunError, is_out_of_memory, known_message
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import dump_experiment

log = logging.getLogger(__name__)

_PATIENCE = 120.0
"""Seconds in which the plan must be made; without it, the message has no figures."""
_HISTORY = 50_000
"""Allocations on a GPU that a snapshot reaches back."""


@contextmanager
def memory_explained(experiment: Experiment, runtime: Runtime, height: int, width: int, folder: Path) -> Iterator[None]:
    """Raise RunError for exhausted memory, with the figures of the plan and what would take less.

    With CUDA, a snapshot of the allocator is written to `folder`, for https://pytorch.org/memory_viz; with the environment
    variable CREDIT_LIKE_MEMORY_STACKS it says where each block was allocated.
    """
    cuda = runtime.device.type == "cuda"
    if cuda:
        # A traceback takes the host about 2 us, for each of the thousands of allocations of a step.
        context = "state" if os.environ.get("CREDIT_LIKE_MEMORY_STACKS") else None
        torch.cuda.memory._record_memory_history(context=context, max_entries=_HISTORY, stacks="python")
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = known_message(error) or type(error).__name__
        if cuda and (snapshot := _snapshot(folder / f"memory-rank-{runtime.rank}.pickle")) is not None:
            message += f"; the allocations are in {snapshot}"
        if planned := _planned(experiment, runtime, f"{height}x{width}"):
            message += f"; {planned}"
        raise RunError(message) from error
    finally:
        if cuda:
            torch.cuda.memory._record_memory_history(enabled=None)


def _snapshot(path: Path) -> Path | None:
    """Write the state and the history of the GPU's memory; return the file, or None where it cannot be written."""
    with suppress(OSError, RuntimeError):
        torch.cuda.memory._dump_snapshot(str(path))
        return path
    return None


def _planned(experiment: Experiment, runtime: Runtime, grid: str) -> str | None:
    """Return the advice of `plan` for this experiment, computed in another process; None if it takes too long."""
    log.warning("out of memory; estimating which changes would reduce the memory")
    with tempfile.TemporaryDirectory() as folder, suppress(OSError, MemoryError, subprocess.SubprocessError):
        file = Path(folder) / "experiment.yml"
        file.write_text(dump_experiment(experiment))
        given = [str(file), str(runtime.world), grid, runtime.device.type]
        command = [sys.executable, "-m", "credit_like.plan.advice", *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
        return done.stdout.strip()
    return None
