"""What the meter counts, on operations of which the bytes are known."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from credit_like import ops
from credit_like.plan.events import LENGTH, Free, Run, Trace
from credit_like.plan.meter import Meter, attention_as_on_gpu
from credit_like.plan.replay import Replay

HEADS, WINDOW, DIM = 4, 8, 16


def _peak(bias_is_trained):
    """The peak of a window attention with a bias, forward and backward, in bytes."""
    with FakeTensorMode(), attention_as_on_gpu(), ops.cpu.policy.disabled():
        qkv = torch.empty(1, 5 * WINDOW, 6 * WINDOW, 3 * HEADS * DIM, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.empty(WINDOW**2, WINDOW**2, dtype=torch.bfloat16, requires_grad=bias_is_trained)
        with Meter() as meter:
            ops.window_attention(qkv, bias, WINDOW, DIM, dilated=False).sum().backward()
    return meter.peak


def test_the_gradient_of_a_position_bias_is_counted_for_every_window_and_head():
    expanded = 5 * 6 * HEADS * WINDOW**4 * 2
    assert _peak(True) - _peak(False) == pytest.approx(expanded, rel=0.02)


def test_a_recomputed_attention_is_that_of_the_forward():
    with FakeTensorMode(), attention_as_on_gpu(), ops.cpu.policy.disabled():
        qkv = torch.empty(1, 2 * WINDOW, WINDOW, 3 * HEADS * DIM, requires_grad=True)
        bias = torch.empty(WINDOW**2, WINDOW**2, requires_grad=True)

        def attend(x):
            return ops.window_attention(x, bias, WINDOW, DIM, dilated=False)

        # torch compares what both have saved, and raises an error if it differs.
        checkpoint(attend, qkv, use_reentrant=False).sum().backward()
        assert qkv.grad.shape == qkv.shape
    assert torch.nn.functional.scaled_dot_product_attention.__module__ != attention_as_on_gpu.__module__


def test_what_only_allocates_or_asks_for_a_type_launches_nothing():
    x = torch.ones(2, 3)
    with Meter() as meter:
        torch.empty_like(x), torch.empty_strided((2, 3), (1, 2)), x.new_empty_strided((2, 3), (1, 2)), x.new_empty(2)
        torch.promote_types(x.dtype, torch.bfloat16)
    assert not meter.work.pieces
    with meter:
        x + x
    assert meter.work.pieces.total() == 1


def test_long_runs_are_cut():
    work = Trace()
    for _ in range(LENGTH + 1):
        work.add("half", 2, 3)
    assert [sum(run.pieces.values()) for run in work.events] == [LENGTH, 1]
    work.append(Free())
    work.add("wide", 1, 1)
    work.add("wide", 1, 1, behind=2)
    assert [run.behind for run in work.events if isinstance(run, Run)] == [0, 0, 0, 2]
    assert work.pieces == {("half", 2, 3): LENGTH + 1, ("wide", 1, 1): 2}
    assert (work.flops, work.traffic) == (2 * LENGTH + 4, 3 * LENGTH + 5)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_and_convolutions_are_told_from_other_arithmetic(cached, dtype):
    """Whether TensorFloat-32 applies is asked at every operation, also where its costs are known from an earlier one."""
    kinds = {torch.float32: ("tf32", "wide"), torch.float64: ("wide", "wide"), torch.bfloat16: ("half", "half")}
    before = torch.get_float32_matmul_precision()
    try:
        with FakeTensorMode() as mode, ops.cpu.policy.disabled():
            replay = Replay(mode) if cached else None
            for precision, products in (("high", kinds[dtype][0]), ("highest", kinds[dtype][1])) * 2:
                torch.set_float32_matmul_precision(precision)
                x, image = torch.empty(4, 4, dtype=dtype), torch.empty(1, 4, 8, 8, dtype=dtype, requires_grad=True)
                with Meter(replay) as meter:
                    x @ x
                    torch.nn.functional.conv2d(image, torch.empty(2, 4, 3, 3, dtype=dtype)).sum().backward()
                    x + x
                found = {(kind, flops > 0) for kind, flops, _ in meter.work.pieces}
                assert found == {(products, True), (kinds[dtype][1], False)}
    finally:
        torch.set_float32_matmul_precision(before)
