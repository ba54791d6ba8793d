"""A small run that is replayed on more GPUs is what the large run would have been."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import plan_scaling
from credit_like.plan.estimate import Estimate
from credit_like.plan.events import Start, Times, Trace
from credit_like.plan.layouts import Candidate
from credit_like.plan.simulate import simulate
from tests.plan.conftest import GRID, experiment


def _simulated(_, layout, micro_batches):
    return simulate(experiment(global_batch_size=micro_batches * layout.dp), layout, 0, GRID)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1)])
def test_more_copies_change_only_the_ranks_of_what_crosses_them(run_ranks, shape):
    layout = plan_scaling.layout_of(shape)
    more = replace(layout, dp=2 * layout.dp, replicate=2 * layout.replicate)
    (small,) = run_ranks(1, _simulated, layout, 2, timeout=900)
    (large,) = run_ranks(1, _simulated, more, 1, timeout=900)
    replayed = plan_scaling.on(small, shape, more.world, 1)
    assert [e for e in replayed.events if isinstance(e, Start)] == [e for e in large.events if isinstance(e, Start)]
    one, other = Trace(replayed.events), Trace(large.events)
    assert one.flops == other.flops
    # Of two recorded micro-batches the last adds its gradients to those of the first: a few passes over them in float32.
    assert 0 <= one.traffic - other.traffic <= 24 * small.parameters


def test_layouts_of_a_node_and_of_larger_samples():
    assert plan_scaling.layout_of((1, 1, 1)) == Candidate(32, replicate=4)
    assert plan_scaling.layout_of((4, 2, 1)) == Candidate(4, domain=8, columns=2, replicate=4)
    assert plan_scaling.layout_of((4, 8, 1)) == Candidate(4, domain=32, columns=8, replicate=4)
    assert plan_scaling.layout_of((4, 8, 2)) == Candidate(4, 2, 32, columns=8, replicate=4)
    assert plan_scaling.fullest(plan_scaling.layout_of((4, 2, 1))) == [2]


def test_efficiency_and_what_takes_most_have_ranges():
    def point(gpus, computing, waiting):
        times = [Times(compute=c, waited=w) for c, w in zip(computing, waiting, strict=True)]
        estimate = Estimate(times[0], times[1].total, times[2].total)
        return plan_scaling.Point("0.25°", gpus, 32, (4, 8, 2), 1, 0.0, estimate, (times[1], times[2]))

    base, more = point(128, (8, 4, 16), (0, 0, 0)), point(256, (4, 2, 8), (1, 0, 8))
    assert more.speeds(base) == [0.8, 1.0, 0.5]
    assert plan_scaling.percent(more.speeds(base)) == "80% (50–100%)"
    assert plan_scaling.percent(base.speeds(base)) == "100%"
    assert more.limit == "computing 80% (50–100%)"
    assert more.layout == "4 × 8, tensor 2"
