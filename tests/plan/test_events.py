"""A step is as long as its events make it: what overlaps, what waits and for whom, on machines on which everything is simple."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from credit_like.parallel.observe import Message
from credit_like.plan.events import Free, Run, Sample, Simulated, Start, Wait, play
from credit_like.plan.layouts import Candidate
from credit_like.plan.machine import Machine

PLAIN = Machine(
    "plain", 10, 1.0, 1.0, 100, 1, 1, 4, latency=0, hop_intra=0, hop_inter=0, links=1.0, reached=1.0, launch=0.0, floor=0.0,
    fused=0.5, moved=1.0, spread=0.0,
)  # fmt: skip
GROUP = (0, 1)


def run(seconds, behind=0, number=1):
    return Run(behind, Counter({("half", int(seconds * 1e12 / number), 1): number}))


def gather(seconds, ranks=GROUP, **how):
    return Start("all-gather", ranks, int(seconds * 2e9), waits=how.pop("waits", False), **how)


def exchange(seconds, ranks=GROUP):
    return Start("all-to-all", ranks, int(seconds * 1e9), waits=True)


def parts(events, machine=PLAIN, **rank):
    times = play(machine, [Simulated(0, events, **rank)])
    return times.compute, times.launched, times.waited, times.exposed, times.read


def test_a_collective_overlaps_with_what_is_computed_until_its_result_is_needed():
    assert parts([gather(2), run(3), Wait(1, False), run(1)]) == pytest.approx((4, 0, 0, 0, 0))
    assert parts([gather(5), run(3), Wait(1, False), run(1)]) == pytest.approx((4, 0, 0, 2, 0))
    assert parts([run(3), exchange(2), Wait(1, True), run(1)]) == pytest.approx((4, 0, 2, 0, 0))


def test_what_no_stream_overlaps_blocks():
    """A CPU gathers and computes one after the other, but lets DDP reduce meanwhile."""
    cpu = replace(PLAIN, streams=False)
    assert parts([gather(2), run(3), Wait(1, False)], cpu) == pytest.approx((3, 0, 0, 2, 0))
    assert parts([gather(2, blocks=False), run(3), Wait(1, False)], cpu) == pytest.approx((3, 0, 0, 0, 0))


def test_collectives_of_a_group_and_of_a_link_follow_each_other():
    """Two gathers of 2 s, in one group or in two over the same link, take 4 s; over two links they take 2 s."""
    for other in (GROUP, (0, 2)):
        assert parts([gather(2), gather(2, other), Wait(1, False)]) == pytest.approx((0, 0, 0, 4, 0))
    assert parts([gather(2), gather(2, (0, 4)), Wait(1, False)]) == pytest.approx((0, 0, 0, 2, 0))


def test_a_gather_ahead_does_not_wait_for_the_computation_before_it():
    events = [run(1), Free(), run(3), gather(2, ahead=True), Wait(1, False), run(1)]
    assert parts(events) == pytest.approx((5, 0, 0, 0, 0))
    assert parts([e._replace(ahead=False) if isinstance(e, Start) else e for e in events]) == pytest.approx(
        (5, 0, 0, 2, 0)
    )


def test_prefetching_hides_all_gathers_but_the_first():
    """Four units of 2 s; each gathers the next, in 1 s, as FSDP2 does."""
    unit = [gather(1, ahead=True), run(2), Wait(1, False), Free()]
    first = [Free(), gather(1, ahead=True), Wait(1, False), Free()]
    assert parts([*first, *3 * unit, run(2)]) == pytest.approx((8, 0, 0, 1, 0))


def test_what_follows_a_collective_runs_beside_the_computation():
    """A reduce-scatter, the all-reduce of its result, and what stores that: 1 s each beside 2 s of computing."""
    reduce = Start("reduce-scatter", GROUP, int(2e9), waits=False)
    across = Start("all-reduce", (0, 4), int(1e9), waits=False, behind=1)
    assert parts([reduce, across, run(1, behind=1), run(2), Wait(1, False)]) == pytest.approx((2, 0, 0, 1, 0))
    assert parts([reduce, across, run(1, behind=1), run(4), Wait(1, False)]) == pytest.approx((4, 0, 0, 0, 0))


def test_the_host_launches_ahead_of_the_device():
    """1,000 launches of 1 ms each, and as many of the device's operations."""
    slow = replace(PLAIN, launch=1000.0)
    busy, idle = 10 * [run(0.3, number=100)], 10 * [run(0.025, number=100)]
    assert sum(parts(busy, slow)) == pytest.approx(3, rel=2e-3)
    assert parts(idle, slow) == pytest.approx((0.25, 0.75, 0, 0, 0), rel=2e-3)
    assert parts(idle, slow, compiled=True) == pytest.approx((0.25, 0.25, 0, 0, 0), rel=2e-3)
    # While the device is busy, the host launches what comes after; not more than it can queue.
    assert sum(parts([*busy, *idle], slow)) == pytest.approx(3.25, rel=2e-2)
    assert sum(parts([*busy, *4 * idle], slow)) == pytest.approx(6, rel=2e-2)


def test_what_the_host_does_for_a_unit_delays_a_cpu_and_a_gpu_only_where_nothing_hides_it():
    """A gather of 1 s, for which the host handles 3 parameters of 2 GB in 2 + 3 · 0.5 + 2 · 0.75 s; a GPU computes meanwhile."""
    machine = replace(PLAIN, unit=2e6, packed=0.5e6, copied=750)
    events = [run(1), gather(1, packed=3), run(7), Wait(1, False)]
    assert parts(events, replace(machine, streams=False)) == pytest.approx((13, 0, 0, 1, 0))
    assert parts(events, machine) == pytest.approx((8, 0, 0, 0, 0))
    short = [gather(1, packed=3), Wait(1, False), run(1)]
    assert sum(parts(short, machine)) == pytest.approx(5)  # the host sets the pace
    assert parts([gather(1), run(1), Wait(1, False)], replace(machine, streams=False)) == pytest.approx((1, 0, 0, 1, 0))


@pytest.mark.parametrize(("size", "waits"), [(1, 0.0), (3, 1.0)])
def test_samples_are_read_while_others_are_used(size, waits):
    machine = replace(PLAIN, reading=1.0)
    assert parts([Sample(), run(2)], machine, read=size * 10**9) == pytest.approx((2, 0, 0, 0, waits))


def test_a_collective_waits_for_the_last_rank_that_takes_part():
    """The second rank computes 1 s more before the first exchange and 1 s less after; a third takes no part."""
    ends = [Wait(1, True)]
    one = [run(1), exchange(1), *ends, run(3), exchange(1), *ends]
    two = [run(2), exchange(1), *ends, run(1), exchange(1), *ends]
    alone = play(PLAIN, [Simulated(0, one)])
    assert alone.total == pytest.approx(6)
    both = play(PLAIN, [Simulated(0, one), Simulated(1, two)])
    assert both.total == pytest.approx(7)
    three = [run(5), exchange(1, (2, 3)), *ends, exchange(1, (2, 3)), *ends]
    apart = play(PLAIN, [Simulated(0, one), Simulated(2, three)])
    assert apart.total == pytest.approx(7)  # its own
    assert apart.compute == pytest.approx(5)


def test_all_parts_add_up_to_the_step():
    machine = replace(PLAIN, launch=500.0, reading=1.0)
    events = [Sample(), run(1, number=10), exchange(1), run(1), Wait(1, True), gather(3), run(2), Wait(1, False)]
    times = play(machine, [Simulated(0, events, read=10**10)])
    assert times.total == pytest.approx(10, rel=1e-2)  # the reading
    assert times.hidden == pytest.approx(1 + 2, rel=1e-2)


def recorded(rank, chosen, layout, grid):
    from credit_like.plan.simulate import simulate

    return simulate(chosen, layout, 0, grid)


@pytest.mark.slow
def test_the_order_of_events_is_that_of_fsdp2(run_ranks, small):
    """Every unit is gathered before the one before it computes, and what is reduced is waited for a unit later."""
    chosen = small.experiment(global_batch_size=4)
    (rank,) = run_ranks(1, recorded, chosen, Candidate(4), small.grid, timeout=900)
    events = rank.events
    starts = [event for event in events if isinstance(event, Start)]
    assert Counter((Message(s.kind, tuple(s.ranks), s.bytes, s.waits)) for s in starts) == rank.messages
    gathers = [i for i, event in enumerate(events) if isinstance(event, Start) and event.kind == "all-gather"]
    # Every unit has its parameters gathered for forward and for backward, and their gradients reduced.
    packed = Counter((s.kind, s.packed) for s in starts if s.packed)
    reduced = Counter({n: times for (kind, n), times in packed.items() if kind == "reduce-scatter"})
    assert Counter({n: times for (kind, n), times in packed.items() if kind == "all-gather"}) == reduced + reduced
    assert reduced.total() > 5
    waits = [i for i, event in enumerate(events) if isinstance(event, Wait)]
    assert all(events[i].ahead for i in gathers)
    between = [
        sum(sum(e.pieces.values()) for e in events[start : next(w for w in waits if w > start)] if isinstance(e, Run))
        for start in gathers
    ]
    assert sum(count > 5 for count in between) >= 0.8 * len(gathers)  # computing goes on meanwhile
    reductions = [i for i, event in enumerate(events) if isinstance(event, Start) and event.kind == "reduce-scatter"]
    for one, other in pairwise(reductions):
        number = sum(isinstance(event, Start) for event in events[: one + 1])
        waited = [
            i for i, e in enumerate(events)
            if isinstance(e, Wait) and sum(isinstance(x, Start) for x in events[:i]) - e.behind + 1 == number
        ]  # fmt: skip
        computed = sum(sum(e.pieces.values()) for e in events[one : waited[0]] if isinstance(e, Run) and not e.behind)
        assert waited[0] < other
        assert computed > 0
