"""State of all random generators of this process, as tensors of fixed shapes."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _bits(number: float | None) -> tuple[int, int]:
    """Return (1, bits of the float64), or (0, 0) for None."""
    return (0, 0) if number is None else (1, struct.unpack("<q", struct.pack("<d", number))[0])


def _number(there: int, bits: int) -> float | None:
    return struct.unpack("<d", struct.pack("<q", bits))[0] if there else None


def random_state() -> dict[str, Tensor]:
    """Return the states of the generators of torch (CPU, and CUDA if in use), Python and numpy."""
    _, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = legacy
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*words, *_bits(gauss)], dtype=torch.int64),
        "numpy": torch.tensor([*map(int, keys), position, *_bits(cached if has_gauss else None)], dtype=torch.int64),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restore the states returned by `random_state`."""
    torch.set_rng_state(state["torch"])
    *words, there, bits = state["python"].tolist()
    random.setstate((3, tuple(words), _number(there, bits)))
    *keys, position, there, bits = state["numpy"].tolist()
    gauss = _number(there, bits)
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(gauss is not None), gauss or 0.0))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(*parts: int) -> None:
    """Seed all generators from these numbers."""
    (seed,) = np.random.SeedSequence((len(parts), *parts)).generate_state(1)
    torch.manual_seed(int(seed))
    random.seed(int(seed))
    np.random.seed(int(seed))
