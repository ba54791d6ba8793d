"""Which layouts there are: all that training accepts, each once, and a reason for every other degree."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_like.plan.layouts import Candidate, divisors, layouts, with_layout
from credit_like.schema.checks import layout_findings


@given(st.integers(1, 96), st.sampled_from([1, 4, 24, 96]), st.integers(1, 3), st.sampled_from([1, 2, 6]))
def test_degrees_multiply_to_the_number_of_ranks_and_none_is_forgotten(small_experiment, world, batch, micro, members):
    ensemble = {"members": members, "model": {"noise": {}}, "loss": {"type": "crps"}} if members > 1 else {}
    experiment = small_experiment(global_batch_size=batch * micro, micro_batch_size=micro, **ensemble)
    legal, illegal = layouts(experiment, world, 64, 128)
    assert all(x.dp * x.ensemble * x.tensor * x.domain == world and x.dp % x.replicate == 0 for x in legal)
    assert len(set(legal)) == len(legal)
    expected = set()
    of_world = [d for d in range(1, world + 1) if world % d == 0]
    of_members = [e for e in range(1, members + 1) if members % e == 0]
    for ensemble, tensor, domain in itertools.product(of_members, of_world, of_world):
        if world % (ensemble * tensor * domain) == 0:
            dp = world // (ensemble * tensor * domain)
            fits = [
                columns
                for columns in of_world
                if domain % columns == 0
                and not experiment.model.check_parallel(
                    64, 128, tensor=tensor, domain=domain // columns, columns=columns
                )
            ]
            if fits and batch % dp == 0:
                copies = [r for r in range(1, dp + 1) if dp % r == 0]
                expected |= {(dp, ensemble, tensor, domain, fits[0], r) for r in copies}
    assert {(x.dp, x.ensemble, x.tensor, x.domain, x.columns, x.replicate) for x in legal} == expected
    used = {(name, getattr(x, name)) for x in legal for name in ("tensor", "domain", "dp")}
    for reason in illegal:
        assert reason.reason
        assert (reason.degree, reason.value) not in used


@given(st.integers(1, 10_000))
def test_divisors(number):
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % d == 0 for d in found)
    assert {number // d for d in found} == set(found)


def test_training_accepts_what_is_listed(small_experiment):
    experiment = small_experiment(global_batch_size=16)
    for layout in layouts(experiment, 16, 64, 128)[0]:
        assert not list(layout_findings(with_layout(experiment, layout).trainer, 16))


def test_one_replica_without_a_data_mode_is_planned_as_fsdp2(small_experiment):
    experiment = small_experiment(parallelism={"data": "none"})
    assert {layout.data for layout in layouts(experiment, 4, 64, 128)[0]} == {"fsdp2"}
    assert {layout.data for layout in layouts(experiment, 1, 64, 128)[0]} == {"none"}


def test_ddp_has_no_copies_to_choose(small_experiment):
    experiment = small_experiment(parallelism={"data": "ddp"})
    assert {layout.replicate for layout in layouts(experiment, 8, 64, 128)[0]} == {1}


@pytest.mark.parametrize(
    ("layout", "shards"),
    [
        (Candidate(8), 8),
        (Candidate(8, domain=2), 16),
        (Candidate(8, 2, 2, replicate=4), 4),
        (Candidate(4, domain=2, data="ddp"), 1),
    ],
)
def test_shards(layout, shards):
    assert layout.shards == shards


def test_columns_are_shared_where_there_are_not_enough_rows(small_experiment):
    """64 × 128 points, 2 × 4 windows at the last stage; 16 ranks have no window each."""
    legal, illegal = layouts(small_experiment(global_batch_size=16), 16, 64, 128)
    shapes = {layout.domain: layout.shape for layout in legal}
    assert shapes == {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (2, 4)}
    assert ("domain", 16) in {(reason.degree, reason.value) for reason in illegal}
