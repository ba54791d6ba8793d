import itertools
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like.bands import Level, bands, degree_problem, merge
from credit_like.parallel.domain.manager import Axis
from credit_like.parallel.domain.rows import ZERO, fetch_rows, make_plan
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism
from tests.largest import largest


@pytest.mark.parametrize("height", [7, 40, 181, 721])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_bands_cover_all_rows_once(height, parts):
    found = bands(height, 1, parts)
    assert [row for band in found for row in range(*band)] == list(range(height))
    sizes = [stop - start for start, stop in found]
    assert max(sizes) - min(sizes) <= 1


def test_bands_are_whole_windows():
    assert bands(50, 10, 4) == [(0, 20), (20, 30), (30, 40), (40, 50)]


def test_levels_merge_to_the_strictest():
    levels = merge([Level(24), Level(24, 2, why="a"), Level(24, 3, why="b"), Level(12, pieces=5, why="long")])
    assert (levels[24].unit, levels[24].most, levels[12].most) == (6, 4, 5)
    assert degree_problem(levels, 4) == ""
    assert re.search(r"got 5: at 24 rows \(b\) there are only 4 pieces .* work: 1, 2, 3, 4", degree_problem(levels, 5))


def test_a_row_that_nobody_has_is_an_error():
    with pytest.raises(ValueError, match="got 5"):
        make_plan([[0, 1], [2]], [[0, 5], [1]], 0)


@st.composite
def _lists(draw):
    """Rows of each rank in any order, and the rows that it wants: any, in any order, with repeats and zeros."""
    height, ranks = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=height, max_size=height))
    order = draw(st.permutations(range(height)))
    have = [[row for row in order if owners[row] == rank] for rank in range(ranks)]
    want = [draw(st.lists(st.integers(ZERO, height - 1), max_size=25)) for _ in range(ranks)]
    return have, want


@given(_lists())
def test_plans_of_all_ranks_fit_together(lists):
    have, want = lists
    plans = [make_plan(have, want, rank) for rank in range(len(have))]
    sent = [[[have[s][a + i] for a, n in runs for i in range(n)] for runs in plans[s].sends] for s in range(len(have))]
    assert {plan.travels for plan in plans} == {any(len(rows) for of_rank in sent for rows in of_rank)}
    for rank, plan in enumerate(plans):
        parts = [have[rank] if s == rank else sent[s][rank] for s in range(len(have))]
        assert [len(part) for s, part in enumerate(parts) if s != rank] == [
            n for s, n in enumerate(plan.receives) if s != rank
        ]
        assert all(len(set(part)) == len(part) for part in parts)  # nothing is sent twice
        got: list[int | None] = [None] * plan.rows_out
        for runs in (*plan.here, *plan.there):
            at = runs[0].out
            for run in runs:
                rows = (
                    [ZERO] * run.length if run.source == ZERO else parts[run.source][run.start : run.start + run.length]
                )
                got[at : at + run.length] = rows
                at += run.length
        assert got == want[rank]
        assert all(run.source in (rank, ZERO) for runs in plan.here for run in runs)


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 60))
def test_bands_of_chunks_are_whole_chunks_of_all_rows(length, ranks, chunk):
    axis = Axis(None, 0, ranks, length)
    found = axis.of_chunks(chunk)
    assert [row for band in found for row in range(*band)] == list(range(length))
    assert all(start % chunk == 0 or start == length for start, _ in found)


@given(st.integers(1, 200), st.integers(1, 9))
def test_few_rows_lie_between_bands_and_chunks_of_equal_parts(length, ranks):
    ranks = min(ranks, length)
    plans = [Axis(None, rank, ranks, length).plan_to_chunks(-(-length // ranks)) for rank in range(ranks)]
    # band i begins at most i rows before chunk i
    assert sum(sum(plan.receives) for plan in plans) <= ranks * (ranks - 1) / 2


def _random_lists(seed, ranks):
    """Uneven bands, and want-lists with repeats, any order, zeros; some ranks want nothing."""
    rng = random.Random(seed)
    height = rng.randint(ranks, 30)
    cuts = sorted(rng.sample(range(1, height), ranks - 1)) if rng.random() < 0.7 else [0] * (ranks - 1)
    starts = [0, *cuts, height]
    have = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    want = [[rng.choice([ZERO, *range(height)]) for _ in range(rng.randint(0, 25))] for _ in range(ranks)]
    return height, have, want


def _exchanges(rank, ranks, seeds):
    Runtime.start(Parallelism(data="none", domain=ranks), torch.device("cpu"))
    group = torch.distributed.group.WORLD
    errors = []
    for seed in seeds:
        height, have, want = _random_lists(seed, ranks)
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(2, height, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        scale = [torch.randn(2, len(w), 3, 4, generator=generator, dtype=torch.float64) for w in want]
        padded = torch.cat([whole, torch.zeros(2, 1, 3, 4, dtype=torch.float64)], 1)
        expected = [padded[:, [height if row == ZERO else row for row in rows]] for rows in want]
        sum((e * s).sum() for e, s in zip(expected, scale, strict=True)).backward()
        for dim in (1, 2):  # rows first and rows inside
            x = whole.detach()[:, have[rank]].movedim(1, dim).contiguous().requires_grad_()
            plan = make_plan(have, want, rank)
            y = fetch_rows(x, plan, group, dim)
            (y * scale[rank].movedim(1, dim)).sum().backward()
            assert torch.equal(y.movedim(dim, 1), expected[rank])
            errors.append((x.grad.movedim(dim, 1) - whole.grad[:, have[rank]]).abs().sum())
    return largest(errors)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_rows_arrive_and_their_gradients_return(run_ranks, ranks):
    assert largest(run_ranks(ranks, _exchanges, ranks, range(25))) < 1e-12


def _convolutions(rank, ranks):
    """Output bands independent of input bands, kernels wider than a band, any padding: as the serial convolution."""
    from credit_like.parallel.domain.conv import window_rows

    Runtime.start(Parallelism(data="none", domain=ranks), torch.device("cpu"))
    errors, wide = [], 0
    for kernel, stride in [(4, 2), (8, 2), (16, 2), (32, 4), (3, 1), (5, 1), (2, 2)]:
        for height in (40, 43):
            before = (kernel - stride) // 2
            after = kernel - stride - before
            rows_out = (height + before + after - kernel) // stride + 1
            torch.manual_seed(height + kernel)
            whole = torch.randn(1, 2, height, 5, dtype=torch.float64, requires_grad=True)
            weight = torch.randn(3, 2, kernel, 1, dtype=torch.float64)
            reference = nn.functional.conv2d(
                nn.functional.pad(whole, (0, 0, before, after)), weight, stride=(stride, 1)
            )
            signal = torch.randn_like(reference)
            (reference * signal).sum().backward()
            ins, outs = bands(height, 1, ranks), bands(rows_out, 1, ranks)
            want = [window_rows(a, b, height, kernel, stride, before) for a, b in outs]
            plan = make_plan([list(range(*band)) for band in ins], want, rank)
            wide += sum(1 for n in plan.receives if n) > 2
            x = whole.detach()[:, :, slice(*ins[rank])].clone().requires_grad_()
            fetched = fetch_rows(x, plan, torch.distributed.group.WORLD, 2)
            y = nn.functional.conv2d(fetched, weight, stride=(stride, 1))
            (y * signal[:, :, slice(*outs[rank])]).sum().backward()
            errors.append((y - reference[:, :, slice(*outs[rank])]).abs().max().detach())
            errors.append((x.grad - whole.grad[:, :, slice(*ins[rank])]).abs().max())
    return largest(errors), wide


def test_halos_wider_than_a_band(run_ranks):
    results = run_ranks(5, _convolutions, 5)
    assert largest(worst for worst, _ in results) < 1e-12
    assert max(wide for _, wide in results) > 0  # some rank needed rows of more than two others


def test_one_rank_needs_no_exchange():
    plan = make_plan([list(range(5))], [list(range(5))], 0)
    x = torch.randn(2, 5, 3)
    assert plan.identity
    assert fetch_rows(x, plan, None, 1) is x
    turned = make_plan([list(range(5))], [[4, 3, ZERO]], 0)
    assert torch.equal(fetch_rows(x, turned, None, 1), torch.stack([x[:, 4], x[:, 3], 0 * x[:, 0]], 1))


class _Trace(TorchDispatchMode):
    """What is written while a message is under way: for each message, the elements of its operations in place."""

    def __init__(self):
        super().__init__()
        self.flying, self.written = None, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("_c10d_functional::all_to_all_single"):
            assert self.flying is None
            self.flying = 0
        out = func(*args, **(kwargs or {}))
        if self.flying is not None and name in ("aten::copy_", "aten::add_.Tensor", "aten::zero_"):
            assert torch._C._distributed_c10d._get_work_registry_size() == 1  # begun and not waited for
            self.flying += args[0].numel()
        if name.startswith("_c10d_functional::wait_tensor"):
            self.written.append(self.flying)
            self.flying = None
        return out


def _own_rows_during_the_exchange(rank):
    """A halo of two rows of 4 numbers: elements written while messages of forward and backward are under way."""
    Runtime.start(Parallelism(data="none", domain=3), torch.device("cpu"))
    have = [list(range(10 * r, 10 * r + 10)) for r in range(3)]
    want = [[row if 0 <= row < 30 else ZERO for row in range(10 * r - 2, 10 * r + 12)] for r in range(3)]
    x = torch.randn(10, 4, requires_grad=True)
    with _Trace() as trace:
        fetch_rows(x, make_plan(have, want, rank), torch.distributed.group.WORLD, 0).sum().backward()
    return trace.written


def test_own_rows_are_copied_while_others_travel(run_ranks):
    for rank, written in enumerate(run_ranks(3, _own_rows_during_the_exchange)):
        zeros = 2 * 4 * (rank != 1)
        assert written == [10 * 4 + zeros, 10 * 4]


def _compiled(rank):
    """The largest differences of rows and of gradients to those of the function that is not compiled."""
    Runtime.start(Parallelism(data="none", domain=3), torch.device("cpu"))
    have = [list(range(10 * r, 10 * r + 10)) for r in range(3)]
    want = [[row if 0 <= row < 30 else ZERO for row in range(10 * r - 2, 10 * r + 12)] for r in range(3)]
    plan, group = make_plan(have, want, rank), torch.distributed.group.WORLD
    x, signal = torch.randn(10, 4, requires_grad=True), torch.randn(14, 4)
    expected = fetch_rows(x, plan, group, 0)
    (gradient,) = torch.autograd.grad(expected, x, signal)
    y = torch.compile(fetch_rows, backend="aot_eager", fullgraph=True, dynamic=False)(x, plan, group, 0)
    (again,) = torch.autograd.grad(y, x, signal)
    return float((y - expected).detach().abs().max()), float((again - gradient).abs().max())


@pytest.mark.slow
def test_a_compiled_exchange_is_the_same(run_ranks):
    assert run_ranks(3, _compiled) == [(0.0, 0.0)] * 3
