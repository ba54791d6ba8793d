"""Times follow the stated formulas, and impossible machines are refused."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_like.parallel.runtime import Runtime
from credit_like.plan.calibrate import _network, bench
from credit_like.plan.machine import PRESETS, Machine, compute_seconds, machine_of, transfer, transfer_seconds
from credit_like.schema.trainer import Parallelism

PLAIN = Machine(
    "plain",
    10,
    2.0,
    1.0,
    100,
    10,
    1,
    4,
    latency=0,
    hop_intra=0,
    hop_inter=0,
    links=1.0,
    reached=1.0,
    floor=0.0,
    reserve=0.0,
)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all-gather", (0, 1, 2, 3), 0.75),  # 10 GB · 3/4 over 10 GB/s
        ("reduce-scatter", (0, 4), 5.0),  # two nodes: 10 GB · 1/2 over 1 GB/s
        ("all-reduce", (0, 1), 1.0),
        ("all-to-all", (0, 1, 2), 1.0),
        ("all-gather", (3,), 0.0),
        ("all-gather", tuple(range(8)), 8.75 / 4),  # two nodes of four: 10 GB · 7/8, a quarter by each network card
        ("all-to-all", (0, 1, 4, 5), 10 / 1.5),  # two thirds of 10 GB go to the other node
    ],
)
def test_a_ring_sends_its_part_over_the_slowest_link(kind, ranks, seconds):
    assert transfer_seconds(PLAIN, kind, ranks, 10**10) == pytest.approx(seconds)


def test_an_operation_takes_what_its_arithmetic_or_its_memory_takes():
    assert compute_seconds(PLAIN, {(False, 2 * 10**12, 1): 3}) == pytest.approx(3.0)
    assert compute_seconds(PLAIN, {(True, 2 * 10**12, 1): 3}) == pytest.approx(6.0)
    assert compute_seconds(PLAIN, {(True, 1, 10**11): 2}) == pytest.approx(2.0)
    assert compute_seconds(PLAIN, {(True, 10**12, 10**11): 1, (False, 1, 10**11): 1}) == pytest.approx(2.0)


@given(st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 8))
def test_hops_are_those_of_a_ring_or_of_a_tree_over_the_nodes(size, nodes, here):
    """In µs, over what the same costs without latency."""
    quick = replace(PLAIN, node=here)
    slow = replace(quick, latency=7.0, hop_intra=2.0, hop_inter=5.0)
    ranks = range(nodes * here)

    def more(kind):
        return 1e6 * sum(sign * transfer(m, kind, ranks, size)[0] for m, sign in ((slow, 1), (quick, -1)))

    if len(ranks) == 1:
        assert more("all-gather") == 0
        return
    ring = 2.0 * (len(ranks) - nodes) + 5.0 * (nodes - 1)
    assert more("all-gather") == more("reduce-scatter") == pytest.approx(7 + ring)
    tree = 2 * (2.0 * (here - 1) + 5.0 * (nodes - 1).bit_length())
    assert more("all-reduce") <= 7 + 2 * ring
    assert more("all-reduce") == pytest.approx(7 + tree) or tree >= 2 * ring
    assert more("all-to-all") == pytest.approx(7 + 2.0 * (here > 1) + 5.0 * (nodes > 1))


def test_an_operation_has_a_fixed_cost_and_a_compiled_model_fewer_of_them():
    machine = replace(PLAIN, floor=1e6, fused=0.5, moved=0.25)
    assert compute_seconds(machine, {(True, 1, 10**11): 2}) == pytest.approx(2.0 + 2.0)
    assert compute_seconds(machine, {(True, 1, 10**11): 2}, compiled=True) == pytest.approx(0.5 + 1.0)


def test_the_slowest_of_many_sets_the_pace():
    machine = replace(PLAIN, spread=0.1)
    values = np.random.default_rng(0).normal(1, 0.1, (2000, 100)).max(1).mean()
    assert machine.pace(1) == 1
    assert machine.pace(100) == pytest.approx(values, rel=0.005)


def test_figures_replace_those_of_a_preset():
    machine = machine_of("h100", {"memory": 94.0, "peak": None})
    assert (machine.memory, machine.peak) == (94.0, PRESETS["h100"].peak)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("a100", {}, "expected --gpu .* did you mean"),
        ("h100", {"memory": 0.0}, "expected memory above 0, got 0.0"),
        ("h100", {"reached": 1.5}, "expected reached"),
        ("h100", {"links": 0.0}, "expected links"),
        ("h100", {"spread": -0.1}, "expected spread"),
        ("h100", {"reading": 0.0}, "expected reading"),
        ("h100", {"launch": -1.0}, "expected launch"),
        ("h100", {"fused": 0.0}, "expected fused"),
        ("h100", {"reserve": 1.0}, "expected reserve"),
    ],
)
def test_what_cannot_be_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        machine_of(name, changes)


def test_a_measured_machine_plans_as_it_was_measured(tmp_path):
    measured = bench(tmp_path / "here.yml")
    assert machine_of(str(tmp_path / "here.yml"), {}) == measured
    assert machine_of(str(tmp_path / "here.yml"), {"node": 16}).node == 16
    n = 512
    a = torch.ones(n, n)
    began = time.process_time()  # which other programs do not change
    for _ in range(20):
        a @ a
    seen = 20 * 2 * n**3 / (time.process_time() - began) / 1e12
    assert seen / 10 < measured.wide_peak < 10 * seen
    assert 0.01 < measured.reached <= 1


def _between_ranks(rank):
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    try:
        return _network(runtime)
    finally:
        runtime.close()


def test_the_network_is_measured_between_ranks(run_ranks):
    for bandwidth, latency in run_ranks(2, _between_ranks):
        assert 0.01 < bandwidth < 1000
        assert 1 < latency < 1e6


@pytest.mark.parametrize("content", ["", "[1]", "name: x", "\x00"])
def test_what_bench_has_not_written_is_refused(tmp_path, content):
    (tmp_path / "x.yml").write_text(content)
    with pytest.raises(ValueError, match=r"x\.yml"):
        machine_of(str(tmp_path / "x.yml"), {})
    with pytest.raises(ValueError, match="absent"):
        machine_of(str(tmp_path / "absent.yml"), {})
