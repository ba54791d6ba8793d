"""Copies to the host, from a GPU that is a stand-in here: what is copied arrives only when its event is waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from credit_like.checkpoint import manager as manager_module
from credit_like.checkpoint.manager import CheckpointManager
from credit_like.checkpoint.rng import random_state, set_random_state
from credit_like.host import to_host
from credit_like.parallel.apply import is_compiled


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    @property
    def is_cuda(self):
        return True

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.fixture
def stream(monkeypatch):
    """The copies and events of a stream that does nothing until an event is waited for."""
    queue, pinned = [], []
    copy, empty = torch.Tensor.copy_, torch.empty

    class Event:
        def record(self):
            self.after = len(queue)

        def synchronize(self):
            for work in queue[: self.after]:
                work()

    def later(self, source, non_blocking=False):
        assert non_blocking
        queue.append(lambda: copy(self, source))
        return self

    def pinning(*shape, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(*shape, **options).fill_(-1)

    monkeypatch.setattr(torch.Tensor, "copy_", later)
    monkeypatch.setattr(torch, "empty", pinning)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return SimpleNamespace(queue=queue, pinned=pinned)


def test_a_copy_is_read_after_it_has_arrived(stream):
    copied = to_host(torch.arange(3.0).as_subclass(OnGpu))
    assert copied.tensor.tolist() == [-1, -1, -1]
    assert copied.wait().tolist() == [0, 1, 2]
    assert stream.pinned == [True]


def test_a_tensor_of_the_host_is_not_copied(stream):
    x = torch.arange(3.0)
    assert to_host(x).wait() is x
    assert not stream.queue


def test_a_checkpoint_is_written_after_all_its_copies_have_arrived(stream):
    manager = object.__new__(CheckpointManager)
    manager._plan, manager._buffers = SimpleNamespace(mine=["a", "b"]), {}
    pieces = {
        name: SimpleNamespace(local=torch.full((2,), number).as_subclass(OnGpu))
        for name, number in (("a", 1.0), ("b", 2.0), ("another rank's", 3.0))
    }
    (event,) = manager._stage(pieces)
    assert len(stream.queue) == 2
    event.synchronize()
    assert {name: x.tolist() for name, x in manager._buffers.items()} == {"a": [1, 1], "b": [2, 2]}


def test_buffers_for_a_gpu_are_parts_of_few_blocks(stream, monkeypatch):
    monkeypatch.setattr(manager_module, "_BLOCK", 64)
    sources = {
        "bytes": torch.zeros(3, dtype=torch.uint8),
        "number": torch.zeros((), dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "large": torch.zeros(5, 4),
        "half": torch.zeros(2, 2, dtype=torch.bfloat16),
    }
    buffers = manager_module._buffers_like({name: x.as_subclass(OnGpu) for name, x in sources.items()})
    assert stream.pinned == [False, True, True, True]  # none yet, the first three, the large one, the last
    for number, (name, buffer) in enumerate(buffers.items()):
        assert (buffer.shape, buffer.dtype) == (sources[name].shape, sources[name].dtype)
        assert buffer.is_contiguous()
        assert buffer.data_ptr() % buffer.element_size() == 0
        buffer.fill_(number)
    assert [x.double().sum().item() for x in buffers.values()] == [0, 1, 0, 60, 16]  # none is part of another


def test_the_generator_of_the_gpu_is_saved_and_restored(monkeypatch):
    held = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: held[0].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: held.__setitem__(0, state))
    state = random_state()
    held[0] = torch.tensor([8], dtype=torch.uint8)
    set_random_state(state)
    assert held[0].tolist() == [7]


@pytest.mark.parametrize(
    ("device", "said", "expected"), [("cuda", None, True), ("cpu", None, False), ("cuda", False, False)]
)
def test_blocks_are_compiled_on_a_gpu_unless_said_otherwise(device, said, expected):
    assert is_compiled(SimpleNamespace(compile=said), torch.device(device)) is expected
