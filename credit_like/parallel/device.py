"""Selection of the device that a process computes on."""

from __future__ import annotations

import torch

from credit_like.errors import UserError


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
