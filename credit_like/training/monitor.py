"""The reports of a run: log.jsonl, status.json, TensorBoard, a tracker, and a progress bar or plain lines."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import device as Device

from credit_like.checkpoint.files import replace_file, to_json
from credit_like.outputs import folder_problem
from credit_like.terminal import duration, shortened
from credit_like.training.tracking import Tracking

log = logging.getLogger(__name__)

_LINE_EVERY = 8.0
"""Seconds between plain log lines, after which the next step is told."""
_BESIDE = 50
"""Columns of the progress bar without its text and the steps, at most."""


class JsonLines:
    """`log.jsonl`: one object per optimiser step and per validation, in order and each once, over all restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def truncate(self, step: int, validated: bool) -> None:
        """Keep the rows up to a checkpoint at `step`; its validation is kept if it was `validated` before the save.

        Lines that are no rows, as a disk may leave them that lost its power, are left out.
        """
        end = kept = 0
        foreign: list[tuple[int, int]] = []
        with self.path.open("rb") as file:
            for line in file:
                begin, end = end, end + len(line)
                try:
                    row = json.loads(line)
                    seen = line.endswith(b"\n") and row["step"] <= step
                    seen = seen and (validated or "valid_loss" not in row or row["step"] < step)
                except (ValueError, KeyError, TypeError, RecursionError):
                    foreign.append((begin, end))
                    continue
                if not seen:
                    break
                kept = end
        foreign = [(begin, end) for begin, end in foreign if end <= kept]
        if not foreign:
            os.truncate(self.path, kept)
            return
        log.warning("%s: dropped %d lines that are not valid rows of the log", self.path, len(foreign))
        content = self.path.read_bytes()
        bounds = [0, *(at for line in foreign for at in line), kept]
        rows = (content[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True))
        self._file.close()
        replace_file(self.path, b"".join(rows))
        self._file = self.path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object; numbers that are not finite become null. Raises OSError, and then leaves no part of it."""
        left = memoryview(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")
        size = os.fstat(self._file.fileno()).st_size
        try:
            while left:  # a disk with room for a part of it takes that part
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise

    def sync(self) -> None:
        """Flush to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Monitor:
    """Log, curves, progress bar and status of the main process; the other processes have no monitor."""

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        precision: str = "float32",
        track: Callable[[], Tracking] | None = None,
    ) -> None:
        self.folder, self.precision = folder, precision
        self._track = track
        self._tracking: Tracking | None = None
        self._state = "continue"
        self.origin: Mapping[str, Any] | None = None
        self.total_steps = total_steps
        self.rows = JsonLines(folder / "log.jsonl")
        self._tensorboard: Any = None
        self._progress: Any = None
        self._task: Any = None
        self._above = ExitStack()
        self._last_line = -math.inf
        self._started: tuple[float, int] | None = None

    def open(self, step: int, validated: bool) -> None:
        """Continue after `step` (0: begin)."""
        from torch.utils.tensorboard import SummaryWriter

        self.rows.truncate(step, validated)
        folder = str(self.folder / "tensorboard")
        problem = folder_problem(folder)  # the writer's thread would end with a traceback
        try:
            self._tensorboard = None if problem else SummaryWriter(folder, purge_step=step + 1)
        except OSError as error:
            problem = str(error)
        if problem:
            log.warning("no TensorBoard: %s", problem)
        self._tracking = self._track() if self._track is not None else None
        if sys.stderr.isatty():
            from credit_like.terminal import logging_above, plain_console, progress_bar

            self._progress = progress_bar(plain_console(stderr=True), "training")
            self._above.enter_context(logging_above(self._progress))
            self._task = self._progress.add_task("", total=self.total_steps, completed=step, text="")

    def step(self, row: Mapping[str, Any]) -> None:
        """Log one optimiser step."""
        self.rows.write(row)
        step = row["step"]
        keys = ["loss", "grad_norm", "learning_rate", "samples_per_second", "data_wait"]
        keys += [key for key in row if key.startswith("correction/")]
        self._curves({f"train/{key}": row[key] for key in keys}, step)
        phase = [f"phase {row['phase']}"] if "phase" in row else []
        parts = (
            f"loss {row['loss']:.4g}",
            f"{row['samples_per_second']:.3g} samples/s",
            f"data wait {100 * row['data_wait']:.0f}%",
            f"{row['memory_mib']:.0f} MiB",
        )
        text = "  ".join(parts)
        now = time.monotonic()
        self._started = self._started or (now, step)
        if self._progress is not None:
            columns = self._progress.console.width - _BESIDE - 2 * len(str(self.total_steps))
            self._progress.update(self._task, completed=step, text=shortened((*phase, *parts), columns))
        elif now - self._last_line >= _LINE_EVERY or step == self.total_steps:
            self._last_line = now
            since, first = self._started
            if step > first:
                text += f"  {duration((now - since) / (step - first) * (self.total_steps - step))} left"
            which = "  ".join([*phase, f"epoch {row['epoch']}"])
            log.info("step %d/%d  %s  %s", step, self.total_steps, which, text)

    def validation(self, row: Mapping[str, Any]) -> None:
        """Log one validation."""
        self.rows.write(row)
        scores = {f"{score}/{name}": value for score in ("rmse", "acc") for name, value in row[score].items()}
        if forecast := row.get("forecast"):
            hours = forecast["lead_hours"]
            for at in sorted({0, len(hours) // 2, len(hours) - 1}):
                for score in ("rmse", "bias", "acc", "activity"):
                    for name, values in forecast[score].items():
                        scores[f"forecast_{score}_{hours[at]:g}h/{name}"] = values[at]
        self._curves({"valid/loss": row["valid_loss"], **scores}, row["step"])
        phase = f"  phase {row['phase']}" if "phase" in row else ""
        log.info("step %d%s  validation loss %.5g", row["step"], phase, row["valid_loss"])

    def _curves(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars to TensorBoard and the tracker; a run whose files cannot be written continues without them."""
        if self._tracking is not None:
            self._tracking.log(values, step)
        if self._tensorboard is None:
            return
        try:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        except OSError as error:
            log.warning("no TensorBoard from step %d on: %s", step, error)
            self._close_tensorboard()

    def _close_tensorboard(self) -> None:
        if self._tensorboard is not None:
            with suppress(OSError):
                self._tensorboard.close()
            self._tensorboard = None

    def status(self, state: str, step: int, reason: str = "") -> None:
        """Replace status.json."""
        self._state = state
        write_status(self.folder, state, step, reason, self.precision, self.origin)

    def close(self) -> None:
        """Stop drawing and close the files."""
        self._above.close()
        self._close_tensorboard()
        if self._tracking is not None:
            self._tracking.close("failed" if self._state == "running" else self._state)
        self.rows.close()


def write_status(
    folder: Path,
    state: str,
    step: int,
    reason: str = "",
    precision: str | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Replace status.json.

    `precision` is what the model computes in, and `origin` where its first weights came from, where these are known.
    """
    status = {"state": state, "step": step, "reason": reason, "precision": precision, "origin": origin}
    replace_file(folder / "status.json", to_json({key: value for key, value in status.items() if value is not None}))


def memory_mib(device: Device) -> float:
    """Return the peak memory of the GPU's allocator, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
