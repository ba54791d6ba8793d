"""Selection of the device that a process computes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from credit_like.errors import UserError

_NVIDIA = Path("/dev/nvidiactl")
"""Exists where the driver of NVIDIA GPUs is loaded."""


def pick_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is a GPU if there is one.

    Raises UserError if CUDA is requested but not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.device: expected a CUDA device, got none; change to auto or cpu")
    return torch.device(name)


def set_precision(precision: str) -> None:
    """Set how CUDA multiplies matrices and convolves in float32: `highest` is float32, `high` and `medium` are narrower.

    torch has a switch of its own for convolutions, which is TensorFloat-32 unless it is set.
    """
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def set_deterministic(on: bool) -> None:
    """Set whether CUDA selects algorithms that give the same bits every time, in compiled blocks too.

    It takes effect for all of the process before its first operation on the device. An operation without such an algorithm
    raises RuntimeError where it is called.
    """
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # The compiler selects kernels by measuring them otherwise. It reads the variable when it is imported, in processes
        # of its own too.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        if (compiler := sys.modules.get("torch._inductor.config")) is not None:
            compiler.deterministic = True  # type: ignore[attr-defined]


def unused_gpu(device: torch.device) -> str | None:
    """Return why a GPU of this machine is not used, where torch cannot; None where there is none, or `device` is one."""
    if device.type == "cuda" or not _NVIDIA.exists() or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install the wheel for the driver from pytorch.org"
    return f"torch {torch.__version__} finds no device for CUDA {torch.version.cuda}; look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"


def shown(device: torch.device) -> str:
    """Return the end of the line that says where a run computes: the name of the GPU; nothing on a CPU."""
    return f" on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
