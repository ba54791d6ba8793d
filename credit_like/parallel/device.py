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
