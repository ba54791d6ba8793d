"""Copies of samples to a GPU, whose streams are stand-ins here."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from credit_like.state import Sample
from credit_like.training.to_device import ToDevice


@pytest.fixture
def events(monkeypatch):
    """What happens to the two streams of a GPU, in order; each copy with the stream on which it is queued."""
    happened, on = [], ["computing"]

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            happened.append(("waits", self.name, other.name))

    @contextmanager
    def use(stream):
        on.append(stream.name)
        yield
        on.pop()

    def to(self, device, non_blocking):
        happened.append(("copy", on[-1], device.type, non_blocking))
        return self.clone()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: happened.append(("kept for", stream.name)))
    return happened


def _sample():
    return Sample(torch.ones(1, 2, 1, 4, 4), torch.ones(1, 1, 1, 4, 4), torch.ones(1, 2, 1, 4, 4), torch.zeros(1))


def test_a_sample_is_copied_beside_the_computation_and_waited_for(events):
    sample = _sample()
    copied = ToDevice(torch.device("cuda", 0))(sample)
    assert events == [
        *[("copy", "copying", "cuda", True)] * 4,
        ("waits", "computing", "copying"),
        *[("kept for", "computing")] * 4,
    ]
    assert all(torch.equal(a, b) for a, b in zip(copied.tensors(), sample.tensors(), strict=True))


def test_nothing_is_copied_on_the_host():
    sample = _sample()
    same = ToDevice(torch.device("cpu"))(sample)
    assert all(a is b for a, b in zip(same.tensors(), sample.tensors(), strict=True))
