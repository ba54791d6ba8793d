"""What is repeated from memory is what torch would have done, and what cannot be told is never repeated."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from credit_like.plan import replay as module
from credit_like.plan.layouts import Candidate
from credit_like.plan.meter import Meter
from credit_like.plan.replay import Recipes, Replay, cached

COMPARED = ("messages", "events", "parts", "peak", "flops", "traffic", "checkpoint", "read", "parameters", "place")


def described(value, arguments):
    """A result as one sees it from outside: its kind, or which argument it is, and whose memory it is in."""
    if isinstance(value, list | tuple):
        return type(value), [described(x, arguments) for x in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    shares = [i for i, x in enumerate(arguments) if x.untyped_storage()._cdata == storage._cdata]
    same = [i for i, x in enumerate(arguments) if x is value]
    where = (value.storage_offset(), storage.nbytes(), value.device.type, value.layout)
    return tuple(value.shape), value.stride(), value.dtype, where, shares, same


OPERATIONS = {
    "new": lambda x, y: x + y,
    "broadcast": lambda x, y: x + y[:1],
    "scalars of three types": lambda x, y: [x * 2, x * 2.0, x * True],
    "product": lambda x, y: x @ y.t(),
    "view": lambda x, y: x.view(-1),
    "part": lambda x, y: x[1:, ::2],
    "expanded": lambda x, y: x[:1].expand(4, 6),
    "halves": lambda x, y: list(x.split(2)),
    "several": lambda x, y: list(torch.max(x, 0)),
    "itself": lambda x, y: x.add_(y),
    "another": lambda x, y: torch.mul(x, 2.0, out=y),
    "wider": lambda x, y: x.double(),
    "order": lambda x, y: torch.empty_like(x.t()),
    "memory": lambda x, y: x.t().contiguous(),
    "pieces": lambda x, y: torch._foreach_mul([x, y], 2.0),
    "whole": lambda x, y: torch.cat([x, y, x]),
    "factory": lambda x, y: torch.zeros(3, 5, dtype=torch.bfloat16),
    "seen as": lambda x, y: x.view(torch.int32),
    "normed": lambda x, y: torch.nn.functional.layer_norm(x, (6,)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_repeated_as_torch_does_it(name):
    with FakeTensorMode() as mode:
        replay = Replay(mode)
        truth, seen = None, []
        for meter in (None, Meter(replay), Meter(replay)):
            x, y = torch.empty(4, 6), torch.empty(4, 6)
            before = len(replay.recipes.known)
            if meter is None:
                truth = described(OPERATIONS[name](x, y), [x, y])
            else:
                with meter:
                    seen.append(described(OPERATIONS[name](x, y), [x, y]))
        assert before > 0
        assert len(replay.recipes.known) == before  # the second time nothing is found out
        assert seen == [truth, truth]
        again = Meter()
        with again:
            OPERATIONS[name](torch.empty(4, 6), torch.empty(4, 6))
        assert again.work.pieces == meter.work.pieces


def test_operations_that_change_their_arguments_shape_or_answer_with_values_are_done_each_time():
    with FakeTensorMode() as mode:
        replay = Replay(mode)
        for _ in range(2):
            with Meter(replay):
                x = torch.empty(4, 6)
                x.t_()
                assert x.shape == (6, 4)
                x.resize_(12, 4)
                assert x.shape == (12, 4)
                y = torch.tensor(3.0)
                assert float(y) == 3.0
                assert bool(torch.empty(2, 2).sum() > 0) is True
        assert not any(
            key[0] in ("aten::t_", "aten::resize_", "aten::_local_scalar_dense") for key in replay.recipes.known
        )


def test_arguments_that_differ_in_anything_are_told_apart():
    with FakeTensorMode() as mode:
        replay = Replay(mode)
        with Meter(replay):
            kinds = [(torch.empty(4, 6) * other).dtype for other in (2, 2.5, torch.empty((), dtype=torch.float64))]
            small = [(torch.empty(4, 6, dtype=torch.int32) * other).dtype for other in (True, 2, 2.0)]
        assert kinds == [torch.float32] * 3
        assert small == [torch.int32, torch.int32, torch.float32]


def test_an_argument_given_twice_is_not_taken_for_two():
    with FakeTensorMode() as mode, Meter(Replay(mode)):
        for second in (True, False, True):
            x, y = torch.empty(3), torch.empty(3)
            assert described(x.add_(x if second else y), [x, y])[-1] == [0]


def with_recipes(rank, small, experiment, layout, which, known):
    recipes = Recipes(dict(known))
    plan = small.simulated(rank, experiment, layout, which, recipes)
    return {name: getattr(plan, name) for name in COMPARED}, recipes.known, len(recipes.learnt)


def without_recipes(rank, small, experiment, layout, which):
    module.TESTED = "0.0"  # as with another release of torch
    recipes = Recipes()
    plan = small.simulated(rank, experiment, layout, which, recipes)
    assert not recipes.known
    return {name: getattr(plan, name) for name in COMPARED}


def test_other_internals_of_torch_mean_no_cache(monkeypatch):
    """Each is a way in which a release may differ: in its number, a missing function, attributes, and what is built."""
    with FakeTensorMode() as mode:
        assert cached(mode) is not None
        with monkeypatch.context() as patch:
            patch.setattr(module, "TESTED", "0.0")
            assert cached(mode) is None
        for name in ("_set_throw_on_mutable_data_ptr", "_DisableTorchDispatch"):
            with monkeypatch.context() as patch:
                patch.delattr(torch._C, name)
                assert cached(mode) is None
        with monkeypatch.context() as patch:
            patch.setattr(Replay, "rebuilt", lambda *_: torch.empty(3, 2))
            assert cached(mode) is None


LAYOUTS = {
    "FSDP2 over 4": Candidate(4),
    "FSDP2 over 4, in pairs": Candidate(4, replicate=2),
    "FSDP2 over 2 x domain 2": Candidate(2, domain=2),
    "tensor 2 x domain 2": Candidate(1, 2, 2),
    "FSDP2 over 2 x tensor 2": Candidate(2, 2),
    "DDP over 4": Candidate(4, data="ddp"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_simulation_is_the_same_with_and_without_what_others_found_out(run_ranks, small, name):
    # What one layout found out serves the next run of it; recomputation repeats operations of its own.
    experiment = small.experiment(global_batch_size=4, activation_checkpoint=True)
    layout = LAYOUTS[name]
    (plain,) = run_ranks(1, without_recipes, small, experiment, layout, 0, timeout=900)
    ((found, known, learnt),) = run_ranks(1, with_recipes, small, experiment, layout, 0, {}, timeout=900)
    assert learnt
    ((again, _, more),) = run_ranks(1, with_recipes, small, experiment, layout, 0, known, timeout=900)
    assert not more
    assert plain == found == again


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, {"activation_checkpoint": True}], ids=["plain", "recomputed"])
def test_what_one_layout_found_out_is_true_for_the_next(run_ranks, small, others):
    experiment = small.experiment(global_batch_size=8, **others)
    known = {}
    for layout in LAYOUTS.values():
        (plain,) = run_ranks(1, without_recipes, small, experiment, layout, 0, timeout=900)
        ((found, known, learnt),) = run_ranks(1, with_recipes, small, experiment, layout, 0, known, timeout=900)
        assert learnt
        assert plain == found
