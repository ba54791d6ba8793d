"""Times follow the stated formulas, and impossible machines are refused."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from credit_like.errors import UserError
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.trials import trials
from credit_like.plan import calibrate
from credit_like.plan.calibrate import (
    _as_in_steps,
    _beyond,
    _network,
    _of_fsdp2,
    _of_gpu,
    _products,
    _Step,
    bench,
    measure,
)
from credit_like.plan.events import Run, Simulated, Start, Trace, play
from credit_like.plan.machine import PRESETS, Machine, compute_seconds, machine_of, transfer, transfer_seconds
from credit_like.plan.meter import Meter
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
    assert compute_seconds(PLAIN, {("half", 2 * 10**12, 1): 3}) == pytest.approx(3.0)
    assert compute_seconds(PLAIN, {("wide", 2 * 10**12, 1): 3}) == pytest.approx(6.0)
    assert compute_seconds(PLAIN, {("wide", 1, 10**11): 2}) == pytest.approx(2.0)
    assert compute_seconds(PLAIN, {("wide", 10**12, 10**11): 1, ("half", 1, 10**11): 1}) == pytest.approx(2.0)


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


SEEN = replace(
    PLAIN,
    latency=1e6,
    collectives=(
        ("all-gather", 2, 100, 10.0),
        ("all-gather", 2, 300, 30.0),
        ("all-gather", 2, 1000, 30.0),
        ("all-gather", 2, 2000, 50.0),
        ("all-gather", 8, 100, 200.0),
        ("broadcast", 2, 100, 7.0),
        ("all-to-all", 4, 100, 30.0),
        ("all-to-all", 4, 300, 60.0),
    ),
)


@pytest.mark.parametrize(
    ("kind", "ranks", "size", "micros"),
    [
        ("all-gather", (0, 1), 100, 10),
        ("all-gather", (0, 1), 10, 10),  # the latency of the smallest
        ("all-gather", (2, 3), 200, 20),
        ("all-gather", (0, 1), 700, 30),
        ("all-gather", (0, 1), 4000, 90),  # 20 µs for each 1,000 bytes, as between the largest two
        ("all-gather", range(3), 300, 5 / 6 * 30 + 1 / 6 * 200),  # a sixth of the way from two to eight
        ("all-gather", range(6), 4000, 1 / 3 * 90 + 2 / 3 * 200),  # of eight, one size was measured
        ("all-gather", range(15), 4000, 2 * 200),  # twice the hops of eight
        ("all-to-all", range(7), 300, 2 * 30 + 30 * 6 / 7 * 4 / 3),  # 6/7 instead of 3/4 of it sent
        ("all-to-all", range(3), 300, 2 / 3 * 30 + 30 * 2 / 3 * 4 / 3),
        ("all-gather", (0,), 100, 0),
        ("broadcast", (0, 1), 10**6, 7),
        ("all-reduce", (0, 1), 0, 1e6),  # not measured
    ],
)
def test_a_measured_collective_takes_what_was_measured(kind, ranks, size, micros):
    assert 1e6 * transfer_seconds(SEEN, kind, ranks, size) == pytest.approx(micros)


def test_what_a_measured_collective_sends_occupies_the_link():
    assert transfer(SEEN, "all-gather", (0, 1), 300) == (pytest.approx(1e-5), {"node": pytest.approx(2e-5)})
    assert transfer(SEEN, "all-gather", (3, 4), 300)[1] == {"network": pytest.approx(2e-5)}


@given(st.integers(0, 10**7), st.integers(2, 64))
def test_a_larger_collective_takes_no_less_and_its_range_contains_it(size, n):
    took = transfer_seconds(SEEN, "all-gather", range(n), size)
    assert transfer_seconds(SEEN, "all-gather", range(n), size + 100) >= took
    fast, slow = (transfer_seconds(SEEN.bound(fast), "all-gather", range(n), size) for fast in (True, False))
    assert (fast, slow) == (pytest.approx(took / 2), pytest.approx(2 * took))


def test_an_operation_has_a_fixed_cost_and_a_compiled_model_fewer_of_them():
    machine = replace(PLAIN, floor=1e6, fused=0.5, moved=0.25)
    assert compute_seconds(machine, {("wide", 1, 10**11): 2}) == pytest.approx(2.0 + 2.0)
    assert compute_seconds(machine, {("wide", 1, 10**11): 2}, compiled=True) == pytest.approx(0.5 + 1.0)


def test_products_in_tensorfloat_32_have_a_peak_of_their_own():
    """Where there is none, as on a CPU, that of float32 applies."""
    work = {("tf32", 2 * 10**12, 1): 1}
    assert compute_seconds(replace(PLAIN, tf32_peak=4.0), work) == pytest.approx(0.5)
    assert compute_seconds(PLAIN, work) == compute_seconds(PLAIN, {("wide", 2 * 10**12, 1): 1})


def test_presets_have_the_peaks_of_the_data_sheets():
    """Dense, of https://www.nvidia.com: half of what is stated with sparsity."""
    peaks = {name: (machine.peak, machine.tf32_peak) for name, machine in PRESETS.items()}
    assert peaks["a100-40gb"] == peaks["a100-80gb"] == (312.0, 156.0)
    assert peaks["h100"] == peaks["h200"] == (989.0, 494.7)
    assert peaks["v100-32gb"][1] == peaks["mi250x"][1] == 0


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
        ("h100", {"packed": -1.0}, "expected packed"),
        ("h100", {"fused": 0.0}, "expected fused"),
        ("h100", {"reserve": 1.0}, "expected reserve"),
    ],
)
def test_what_cannot_be_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        machine_of(name, changes)


@pytest.mark.slow
def test_a_measured_machine_plans_as_it_was_measured(tmp_path):
    measured = bench(tmp_path / "here.yml")
    assert machine_of(str(tmp_path / "here.yml"), {}) == measured
    assert machine_of(str(tmp_path / "here.yml"), {"node": 16}).node == 16
    assert 0.01 <= measured.reached <= 1


def test_the_peak_is_that_of_products():
    measured = _products(torch.device("cpu"), torch.float32, time.process_time)
    n = 512
    a = torch.ones(n, n)
    began = time.process_time()  # which other programs do not change
    for _ in range(20):
        a @ a
    seen = 20 * 2 * n**3 / (time.process_time() - began) / 1e12
    assert seen / 10 < measured < 10 * seen


def _on_nodes(runtime, hosts):
    """What is measured where the ranks are on these hosts, with all-reduces that take what PLAIN says."""
    calibrate.socket.gethostname = lambda: hosts[runtime.rank]
    truth = replace(PLAIN, node=2, hop_inter=3.0)

    def all_reduce(parts, device, clock):
        (own,) = (tuple(part) for part in parts if runtime.rank in part)
        latency, links = transfer(truth, "all-reduce", own, calibrate._REDUCED)
        return max(links.values(), default=1e-9), 1e6 * latency

    calibrate._all_reduce = all_reduce
    return _network(runtime)


def _on_two_nodes(rank):
    """Two ranks on each, one on each of four, and in no order."""
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    try:
        two, four = _on_nodes(runtime, "aabb"), _on_nodes(runtime, "abcd")
        with pytest.raises(UserError, match=r"expected consecutive ranks on each node, got a, b, a, b"):
            _on_nodes(runtime, "abab")
        return two, four
    finally:
        runtime.close()


def test_a_network_of_several_nodes_is_planned_as_it_was_measured(run_ranks):
    """Between nodes a rank has its share of what comes into its node; what it can send within one is measured there alone."""
    for two, four in run_ranks(4, _on_two_nodes):
        assert (two.node, two.intra, two.inter) == (2, pytest.approx(PLAIN.intra), pytest.approx(PLAIN.inter))
        assert two.small == pytest.approx(2 * 3.0)
        assert (four.node, four.intra) == (1, None)


def _between_ranks(rank, hosts):
    calibrate.socket.gethostname = lambda: hosts[rank]
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    try:
        return _network(runtime)
    finally:
        runtime.close()


@pytest.mark.parametrize("hosts", ["aa", "aabb", "aaab"])
def test_the_network_is_measured_between_ranks(run_ranks, hosts):
    for host, found in zip(hosts, run_ranks(len(hosts), _between_ranks, hosts), strict=True):
        assert found.node == hosts.count("a")
        assert 0.001 < found.inter < 1000
        if hosts.count(host) > 1:
            assert 0.001 < found.intra < 1000
        else:
            assert found.intra is None
        assert 1 < found.small < 1e6


def _seen_by_trials(rank):
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    try:
        found = []
        for key, issue in trials((2**8, 2**12)):
            with Meter() as meter:
                issue()
            found.append((key, [(m.kind, len(m.ranks), m.bytes) for m in meter.messages.elements()]))
        return found
    finally:
        runtime.close()


def test_what_is_timed_is_what_a_plan_counts(run_ranks):
    """By kind, number of ranks and bytes; of four ranks, in pairs too."""
    (found, *_) = run_ranks(4, _seen_by_trials)
    assert [messages for _, messages in found] == [[key] for key, _ in found]
    assert {key for key, _ in found} == {
        (kind, n, size)
        for kind in ("all-reduce", "all-to-all", "all-gather", "reduce-scatter")
        for n in (2, 4)
        for size in (2**8, 2**12)
    }


def _replayed(machine, operations, ideal):
    """What a plan makes of so many operations that take `ideal` seconds at full speed together."""
    each = int(ideal / operations * machine.wide_peak * 1e12)
    events = [Run(0, Counter({("wide", each, 1): part})) for part in (100,) * (operations // 100)]
    return _Step(operations, ideal, play(machine, [Simulated(0, events)]).total)


@pytest.mark.parametrize("launch", [6.0, 36.0])
def test_a_step_on_a_gpu_is_planned_as_it_was_measured(launch, caplog):
    """Whether the device computes or waits for launches; where it always waits, how fast it is stays assumed."""
    bare = replace(PLAIN, floor=2.0, spread=0.0)
    truth = replace(bare, reached=0.4, launch=launch)
    found = replace(bare, **_of_gpu(bare, _replayed(truth, 1000, 1e-5), _replayed(truth, 1000, 0.01)))
    assert found.launch == pytest.approx(launch, rel=0.01)
    assert found.reached == pytest.approx(0.4 if launch == 6 else Machine.reached, rel=0.01)
    assert ("the speed of the device cannot be determined" in caplog.text) is (launch > 6)
    for operations, ideal in ((1000, 1e-5), (1000, 0.01)):
        assert _replayed(found, operations, ideal).took == pytest.approx(
            _replayed(truth, operations, ideal).took, rel=0.01
        )


def test_collectives_share_what_steps_that_send_take_longer():
    """Two all-reduces of 1 ms and four gathers of 2 ms in each of five steps; and one of a larger size, in as many."""
    taken = {
        ("all-reduce", 2, 4): [1e-3] * 10,
        ("all-gather", 2, 4): [1e-3, 2e-3, 2e-3, 7e-3] * 5,
        ("all-gather", 2, 8): [4e-3] * 5,
    }
    found = _as_in_steps(taken, {4: 5 * 15e-3, 8: 5 * 6e-3})
    assert [time for *_, time in found] == pytest.approx([1500, 3000, 6000])
    assert [tuple(key) for *key, _ in found] == list(taken)
    # Some that take long belong to what a step takes, though half of all take less.
    rare = {("all-reduce", 2, 4): [1e-3, 1e-3, 10e-3] * 5}
    assert _as_in_steps(rare, {4: 5 * 12e-3}) == (("all-reduce", 2, 4, pytest.approx(4000)),)
    # Where ranks share cores, one computes while others wait: a step is then shorter than its computing and its waiting.
    assert _as_in_steps(rare, {4: 5 * 4.5e-3}) == (("all-reduce", 2, 4, pytest.approx(1500)),)
    assert _as_in_steps(rare, {4: -1.0}) == (("all-reduce", 2, 4, pytest.approx(1000)),)  # by chance


def test_what_fsdp2_costs_is_told_by_units_parameters_and_bytes():
    """100 µs for each of 30 and of 3 collectives, 10 µs for each of 90 parameters, 7 µs for each MB; and what these take."""
    machine = replace(PLAIN, floor=5.0, latency=50.0)

    def beyond(units, size, quicker=0.0):
        trace = Trace([Start("all-gather", range(2), size // units, waits=False, packed=30 // units)] * (3 * units))
        trace.append(Start("all-reduce", range(2), 0, waits=False))  # of no unit
        for _ in range(7):
            trace.add("wide", 0, 0)
        sent = sum(transfer_seconds(machine, one.kind, one.ranks, one.bytes) for one in trace.events[: 3 * units + 1])
        took = 1e-6 * (3 * units * 100 + 90 * 10 + 3 * size * 7e-6 + 7 * 5) + sent
        return _beyond(machine, took - quicker, Trace(), trace)

    made = [(10, 10**6), (1, 10**6), (10, 10**7)]
    wanted = {"unit": pytest.approx(100), "packed": pytest.approx(10), "copied": pytest.approx(7)}
    assert _of_fsdp2(*(beyond(*one) for one in made)) == wanted
    by_chance = [beyond(*one, quicker) for one, quicker in zip(made, (1.0, 0.1, 2.0), strict=True)]
    assert _of_fsdp2(*by_chance) == {"unit": 0, "packed": 0, "copied": 0}


def _measured_by_ranks(rank, path):
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    try:
        return measure(runtime)
    finally:
        runtime.close()


def test_those_that_take_ten_times_as_long_are_part_of_what_is_sent(monkeypatch):
    """Time stands still but for what is sent: a second, and eleven for every tenth. A step sends some forty times."""
    now, sent = [0.0], [0]

    def send():
        sent[0] += 1
        now[0] += 11.0 if sent[0] % 10 == 0 else 1.0

    kinds = ("all-reduce", "all-gather")
    monkeypatch.setattr(calibrate, "_TURNS", 1)
    monkeypatch.setattr(calibrate, "trials", lambda sizes: [((kind, 2, n), send) for n in sizes for kind in kinds])
    found = calibrate._amid_steps(torch.device("cpu"), lambda: now[0])
    assert len(found) == 8
    assert all(1.9e6 < took < 2.3e6 for *_, took in found)


@pytest.mark.long
def test_ranks_measure_their_collectives(run_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "_TURNS", 2)
    machine, _ = run_ranks(2, _measured_by_ranks, tmp_path)
    assert {kind for kind, _, _, _ in machine.collectives} == {
        "all-reduce",
        "all-to-all",
        "all-gather",
        "reduce-scatter",
    }
    assert all(n == 2 and 1 < took < 1e7 for _, n, _, took in machine.collectives)
    path = tmp_path / "here.yml"
    path.write_text(yaml.safe_dump(machine.assumptions()))
    assert machine_of(str(path), {}) == machine


@pytest.mark.parametrize("seen", [7, [7], [["all-gather", 1, 4, 1.0]], [["all-gather", 2, 4, 0.0]], [["x", 2, 4]]])
def test_collectives_that_cannot_have_been_measured_are_refused(tmp_path, seen):
    path = tmp_path / "x.yml"
    path.write_text(yaml.safe_dump(PRESETS["h100"].assumptions() | {"collectives": seen}))
    with pytest.raises(ValueError, match="let `credit-like bench` write it"):
        machine_of(str(path), {})


@pytest.mark.parametrize("content", ["", "[1]", "name: x", "\x00"])
def test_what_bench_has_not_written_is_refused(tmp_path, content):
    (tmp_path / "x.yml").write_text(content)
    with pytest.raises(ValueError, match=r"x\.yml"):
        machine_of(str(tmp_path / "x.yml"), {})
    with pytest.raises(ValueError, match="absent"):
        machine_of(str(tmp_path / "absent.yml"), {})
