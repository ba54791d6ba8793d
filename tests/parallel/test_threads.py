"""The number of threads is that of the experiment, and more threads than cores are warned of."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from credit_like.parallel.processes import run_ranks
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.threads import excess, set_threads


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("demands", "said"),
    [
        ([("a", 4, (0, 1, 2, 3))], None),
        ([("a", 4, (0, 1))], "1 process with 4 threads on the 2 cores of a: "),
        ([("a", 4, (0, 1, 2, 3))] * 4, "4 processes with 16 threads on the 4 cores of a: "),
        ([("a", 2, (0, 1)), ("a", 2, (2, 3))], None),  # each bound to cores of its own
        ([("a", 2, (0, 1)), ("b", 2, (0, 1)), ("b", 2, (0, 1))], "2 processes with 4 threads on the 2 cores of b: "),
    ],
)
def test_the_cores_of_a_node_are_those_of_its_ranks(demands, said) -> None:
    text = excess(demands)
    assert (text is None) if said is None else text.startswith(said)


def test_what_is_advised_is_not_warned_of() -> None:
    demands = [("a", 16, tuple(range(16)))] * 3
    assert (excess(demands) or "").endswith("set trainer.threads: 5")
    assert excess([(host, 5, cores) for host, _, cores in demands]) is None


def test_the_number_of_threads_is_that_of_the_experiment(caplog) -> None:
    set_threads(1, Runtime())
    assert torch.get_num_threads() == 1
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        set_threads(2 * (os.cpu_count() or 1), Runtime())
    assert torch.get_num_threads() == 2 * (os.cpu_count() or 1)
    assert "set trainer.threads: " in caplog.text
    set_threads(None, Runtime())
    assert torch.get_num_threads() == 2 * (os.cpu_count() or 1)


@pytest.mark.parametrize(("own", "world", "cores", "each"), [(1, 1, 8, 1), (3, 2, 8, 3), (8, 2, 8, 4), (8, 4, 2, 1)])
def test_forked_ranks_share_the_cores_and_have_no_more_threads_than_the_caller(
    own, world, cores, each, monkeypatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    torch.set_num_threads(own)
    assert [answer.value for answer in run_ranks(world, torch.get_num_threads, 900)] == [each] * world
