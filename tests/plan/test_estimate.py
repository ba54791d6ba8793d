"""The table: order, what fits, what is recommended, and what is printed, from ranks that are given."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
import yaml

from credit_like.plan.estimate import PlanReport, PlanRow, estimate, in_order
from credit_like.plan.events import Run
from credit_like.plan.layouts import Candidate, Illegal
from credit_like.plan.machine import PRESETS, RANGES, Machine
from credit_like.plan.memory_plot import plot_memory
from credit_like.plan.show import advice, block, line, print_report, why_whole
from credit_like.plan.simulate import Rank
from credit_like.schema.trainer import TrainerSection
from credit_like.terminal import plain_console

MACHINE = Machine(
    "plain", 10, 2.0, 1.0, 100, 10, 1, 4, latency=0, hop_intra=0, hop_inter=0, links=1.0, reached=1.0, launch=0.0, floor=0.0,
    fused=0.5, moved=1.0, spread=0.0, reserve=0.1,
)  # fmt: skip


def rank(peak, seconds=1.0):
    """`seconds` of computing on MACHINE."""
    return Rank(
        rank=0, place="only", peak=peak, parts={"parameters": peak // 4, "activations": peak - peak // 4},
        flops=int(seconds * 2e12), traffic=1, messages={}, events=[Run(0, Counter({("half", int(seconds * 2e12), 1): 1}))],
        checkpoint=1, read=1, parameters=1, accumulation=1,
    )  # fmt: skip


def row(layout, *ranks):
    return PlanRow(layout, ranks, MACHINE, samples=8)


def test_an_estimate_is_within_its_range_and_the_range_follows_from_the_assumptions():
    """Computing alone: `reached` may be 1.4 times larger, but not above 1, or smaller, and memory traffic plays no part."""
    half = replace(MACHINE, reached=0.5)
    found = estimate(half, [rank(1, 2.0)])
    assert (found.low, found.total, found.high) == pytest.approx((4.0 / 1.4, 4.0, 4.0 * 1.4))
    sure = estimate(replace(half, doubt=0.0), [rank(1, 2.0)])
    assert (sure.low, sure.total, sure.high) == pytest.approx((4.0, 4.0, 4.0))
    assert estimate(MACHINE, [rank(1, 2.0)]).low == pytest.approx(2.0)


def test_every_figure_of_a_range_makes_a_fast_machine_faster():
    machine = replace(PRESETS["h100"], unit=1.0, packed=1.0, copied=1.0)  # which a preset does not know
    fast, slow = (machine.bound(speed) for speed in (True, False))
    for figure, (_, larger) in RANGES.items():
        ends = getattr(slow, figure), getattr(machine, figure), getattr(fast, figure)
        assert ends == tuple(sorted(ends, reverse=not larger))
        assert ends[0] != ends[2]


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
    print_report(report, plain_console(file=text, width=200))
    said = text.getvalue()
    assert "+2.0 GB" in said
    assert "not possible: tensor 3: expected a divisor" in said
    assert "Times are estimates" in said
    assert f"{quick.estimate.low:.2g}–{quick.estimate.high:.2g}" in said
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
