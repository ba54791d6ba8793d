"""What the meter counts, on operations of which the bytes are known."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from credit_like import ops
from credit_like.plan.meter import QUEUE, AttentionAsOnGpu, Meter, Work

HEADS, WINDOW, DIM = 4, 8, 16


def _peak(bias_is_trained):
    """The peak of a window attention with a bias, forward and backward, in bytes."""
    with FakeTensorMode(), AttentionAsOnGpu(), ops.cpu.policy.disabled():
        qkv = torch.empty(1, 5 * WINDOW, 6 * WINDOW, 3 * HEADS * DIM, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.empty(WINDOW**2, WINDOW**2, dtype=torch.bfloat16, requires_grad=bias_is_trained)
        with Meter() as meter:
            ops.window_attention(qkv, bias, WINDOW, DIM, dilated=False).sum().backward()
    return meter.peak


def test_the_gradient_of_a_position_bias_is_counted_for_every_window_and_head():
    expanded = 5 * 6 * HEADS * WINDOW**4 * 2
    assert _peak(True) - _peak(False) == pytest.approx(expanded, rel=0.02)


def test_segments_have_room_for_what_a_device_queues():
    work = Work()
    for _ in range(QUEUE + 1):
        work.add(False, 2, 3)
    assert [sum(segment.values()) for segment in work.segments] == [QUEUE, 1]
    assert work.cut() == 2
    work.add(True, 1, 1)
    assert work.pieces == {(False, 2, 3): QUEUE + 1, (True, 1, 1): 1}
    assert (work.flops, work.traffic) == (2 * QUEUE + 3, 3 * QUEUE + 4)
