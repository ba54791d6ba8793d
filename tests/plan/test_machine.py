"""Times follow the stated formulas, and impossible machines are refused."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_like.parallel.runtime import Runtime
from credit_like.plan.calibrate import _network, bench
from credit_like.plan.machine import PRESETS, Machine, compute_seconds, machine_of, transfer_seconds
from credit_like.schema.trainer import Parallelism

PLAIN = Machine("plain", 10, 2.0, 1.0, 100, 10, 1, 4, latency=0, reached=1.0, overlap=0.0, reserve=0.0)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all-gather", (0, 1, 2, 3), 0.75),  # 10 GB · 3/4 over 10 GB/s
        ("reduce-scatter", (0, 4), 5.0),  # two nodes: 10 GB · 1/2 over 1 GB/s
        ("all-reduce", (0, 1), 1.0),
        ("all-to-all", (0, 1, 2), 1.0),
        ("all-gather", (3,), 0.0),
    ],
)
def test_a_ring_sends_its_part_over_the_slowest_link(kind, ranks, seconds):
    assert transfer_seconds(PLAIN, kind, ranks, 10**10) == pytest.approx(seconds)


def test_an_operation_takes_what_its_arithmetic_or_its_memory_takes():
    assert compute_seconds(PLAIN, {(False, 2 * 10**12, 1): 3}) == pytest.approx(3.0)
    assert compute_seconds(PLAIN, {(True, 2 * 10**12, 1): 3}) == pytest.approx(6.0)
    assert compute_seconds(PLAIN, {(True, 1, 10**11): 2}) == pytest.approx(2.0)
    assert compute_seconds(PLAIN, {(True, 10**12, 10**11): 1, (False, 1, 10**11): 1}) == pytest.approx(2.0)


@given(st.integers(1, 10**12), st.integers(2, 64))
def test_latency_grows_with_doublings(size, n):
    slow = machine_of("a100-40gb", {"latency": 1000.0, "node": 64})
    quick = machine_of("a100-40gb", {"latency": 0.0, "node": 64})
    ranks = tuple(range(n))
    more = transfer_seconds(slow, "all-gather", ranks, size) - transfer_seconds(quick, "all-gather", ranks, size)
    assert more == pytest.approx(1e-3 * (n - 1).bit_length(), rel=1e-3)


def test_figures_replace_those_of_a_preset():
    machine = machine_of("h100", {"memory": 94.0, "peak": None})
    assert (machine.memory, machine.peak) == (94.0, PRESETS["h100"].peak)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("a100", {}, "expected --gpu .* did you mean"),
        ("h100", {"memory": 0.0}, "expected memory above 0, got 0.0"),
        ("h100", {"reached": 1.5}, "expected reached"),
        ("h100", {"overlap": -0.1}, "expected overlap"),
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
