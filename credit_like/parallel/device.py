"""The device that a process computes on."""

from __future__ import annotations

import torch

from credit_like.errors import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU of this process if there is one.

    Raises UserError where CUDA is asked for and absent.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.device: expected a CUDA device, got none; change to auto or cpu")
    return torch.device(name)
