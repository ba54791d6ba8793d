"""Random generators come back exactly, in the middle of a pair of normal numbers too."""

from __future__ import annotations

import random

import numpy as np
import torch

from credit_like.checkpoint.rng import random_state, seed_everything, set_random_state


def draw() -> list[float]:
    return [float(torch.rand(())), random.gauss(0, 1), float(np.random.standard_normal())]


def test_every_generator_comes_back() -> None:
    for before in range(3):
        seed_everything(1, before)
        for _ in range(before):
            draw()  # an odd number of Gaussians leaves one in store
        state = {name: x.clone() for name, x in random_state().items()}
        expected = [draw() for _ in range(3)]
        seed_everything(2)
        assert [draw() for _ in range(3)] != expected
        set_random_state(state)
        assert [draw() for _ in range(3)] == expected


def test_shapes_do_not_change() -> None:
    seed_everything(0)
    shapes = {name: x.shape for name, x in random_state().items()}
    draw()
    assert {name: x.shape for name, x in random_state().items()} == shapes


def test_seeds_are_different_for_every_part() -> None:
    seen = set()
    for parts in [(0,), (0, 1), (1, 0), (0, 0, 1), (0, 1, 0)]:
        seed_everything(*parts)
        seen.add(tuple(draw()))
    assert len(seen) == 5
