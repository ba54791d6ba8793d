"""The table: order, what fits, what is recommended, and what is printed, from ranks that are given."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from rich.console import Console

from credit_like.parallel.observe import Message
from credit_like.plan.estimate import PlanReport, PlanRow, estimate, in_order
from credit_like.plan.layouts import Candidate, Illegal
from credit_like.plan.machine import Machine
from credit_like.plan.show import advice, block, line, plot_memory, print_report, why_whole
from credit_like.plan.simulate import Rank
from credit_like.schema.trainer import TrainerSection

MACHINE = Machine("plain", 10, 2.0, 1.0, 100, 10, 1, 4, latency=0, reached=1.0, overlap=0.5, reserve=0.1)


def rank(peak, seconds=1.0, messages=None):
    """`seconds` of computing on MACHINE."""
    return Rank(
        rank=0, place="only", peak=peak, parts={"parameters": peak // 4, "activations": peak - peak // 4},
        flops=int(seconds * 2e12), traffic=1, messages=messages or {}, segments=[Counter({(False, int(seconds * 2e12), 1): 1})],
        checkpoint=1, read=1, parameters=1, accumulation=1,
    )  # fmt: skip


def row(layout, *ranks):
    return PlanRow(layout, ranks, MACHINE, samples=8)


def test_what_is_waited_for_adds_and_the_rest_hides_behind_half_of_the_computing():
    ranks = (0, 1)
    waits = Message("all-to-all", ranks, 10**10, waits=True)  # 1 s
    beside = Message("all-gather", ranks, 10**10, waits=False)  # 0.5 s
    found = estimate(MACHINE, rank(1, 2.0, {waits: 3, beside: 4}))
    assert (found.compute, found.waited, found.hidden, found.exposed) == pytest.approx((2.0, 3.0, 1.0, 1.0))
    assert found.total == pytest.approx(6.0)


@pytest.mark.parametrize(("compiled", "launched"), [(False, 2.0 + 0.0), (True, 0.5)])
def test_a_segment_takes_the_longer_of_device_and_host(compiled, launched):
    """Two segments of one second on the device, of 3 and of half a million launches of 1 µs; half of them if compiled."""
    machine = replace(MACHINE, launch=1.0, fused=0.5)
    many, few = (Counter({(False, 2_000_000_000_000 // n, 1): n}) for n in (3_000_000, 500_000))
    busy = replace(rank(1), segments=[many, few], compiled=compiled)
    found = estimate(machine, busy)
    assert (found.compute, found.launched) == pytest.approx((2.0, launched), rel=1e-5)
    assert found.total == pytest.approx(2.0 + launched, rel=1e-5)


def test_the_fastest_that_fits_comes_first_and_the_nearest_of_the_others():
    slow, quick = row(Candidate(4), rank(10**9, 3.0)), row(Candidate(2, 1, 2), rank(10**9, 2.0), rank(8 * 10**9, 1.0))
    over, far = row(Candidate(1, 1, 4), rank(11 * 10**9, 0.1)), row(Candidate(1, 4), rank(50 * 10**9, 0.1))
    rows = in_order([far, slow, over, quick])
    assert rows == (quick, slow, over, far)
    assert over.excess == pytest.approx(2e9)
    assert quick.fullest.peak == 8 * 10**9
    report = PlanReport("x", 4, MACHINE, rows, (Illegal("tensor", 3, "expected a divisor"),))
    assert report.recommended is quick
    text = io.StringIO()
    print_report(report, Console(file=text, width=200))
    said = text.getvalue()
    assert "+2.0 GB" in said
    assert "not possible: tensor 3: expected a divisor" in said
    assert "Times are estimates" in said
    document = json.loads(json.dumps(report.to_dict()))
    assert [x["fits"] for x in document["layouts"]] == [True, True, False, False]
    assert document["assumptions"]["reached"] == 1.0


def test_the_block_is_the_layout(tmp_path):
    layout = Candidate(8, 2, 4, replicate=2)
    section = TrainerSection.model_validate(yaml.safe_load(block(row(layout, rank(1))))["trainer"])
    assert section.parallelism == layout.parallelism


def test_nothing_fits_is_said_with_what_would_help(tmp_path):
    report = PlanReport("x", 4, MACHINE, (row(Candidate(4), rank(11 * 10**9)),), ())
    assert report.recommended is None
    assert "activation_checkpoint" in advice(report)
    assert "lacks 2.0 GB" in line(report.rows[0])
    plot_memory([report], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_small_model_need_not_be_sharded_over_all_ranks():
    def said(layout, parameters):
        one = rank(10**9)
        one.parameters, one.checkpoint = parameters, 12 * parameters
        return why_whole(row(layout, one))

    assert "1.6 GB" in said(Candidate(8), 10**8)
    assert "replicate" in said(Candidate(8), 10**8)
    assert said(Candidate(8, data="ddp"), 10**8) == ""  # it is not
    assert said(Candidate(8, replicate=8), 10**8) == ""
    assert said(Candidate(8), 10**9) == ""
    assert said(Candidate(8), 6 * 10**8) == ""  # 9.6 GB, more than the 9 GB of the machine that are usable
