import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like.errors import UserError
from credit_like.parallel import fsdp2
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.fsdp2 import (
    _apply_activation_checkpointing,
    _build_mp_policy,
    _fix_spectral_norm_dtype,
    _has_fsdp2_shard,
    _is_shardable,
    _recomputes,
    apply_fsdp2,
    fsdp2_is_applied,
    fsdp2_load_optimizer_state_dict,
    fsdp2_load_state_dict,
    fsdp2_optimizer_state_dict,
    fsdp2_state_dict,
    full_parameters,
    optimizer_state_to_ids,
    optimizer_state_to_names,
    set_gradient_communication,
)
from credit_like.parallel.observe import kind_of, wraps_others
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import box, copies, local, slice_like, whole
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.trainer import Parallelism, TrainerSection
from tests.experiments import representatives
from tests.largest import largest
from tests.parallel.shards import whole_of_shards

CPU = torch.device("cpu")


def test_precision_policy():
    assert _build_mp_policy({"trainer": {"amp": False}}) is None
    policy = _build_mp_policy({"trainer": {"amp": True}})
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    explicit = {"param_dtype": "float32", "reduce_dtype": "bfloat16", "output_dtype": "float32"}
    policy = _build_mp_policy({"trainer": {"amp": True, "fsdp2_mp_policy": explicit}})
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.float32, torch.bfloat16)


def test_units_are_wrappers_or_blocks_never_both(tiny):
    model = tiny.blank(depth=(1, 2, 1, 1))
    blocks = [m for m in model.modules() if _has_fsdp2_shard(m)]
    assert len(blocks) == 4 + 5 + 4
    assert all(_is_shardable(m, False) for m in blocks)
    assert all(_is_shardable(m, True) != _recomputes(m) for m in blocks)
    names = [n for n, _ in model.named_parameters()]
    _apply_activation_checkpointing(model)
    wrappers = [m for m in model.modules() if isinstance(m, CheckpointWrapper)]
    once = [m for m in blocks if not _recomputes(m)]
    assert len(once) == 4 + 1
    assert len(wrappers) == len(blocks) - len(once)
    assert all(_is_shardable(m, True) and not _is_shardable(m, False) for m in wrappers)
    assert [m for m in blocks if _is_shardable(m, True)] == once
    assert [canonical_name(n) for n, _ in model.named_parameters()] == names


@pytest.mark.parametrize("quick", [True, False])
def test_activation_checkpointing_changes_what_is_kept_and_no_gradient(tiny, quick, monkeypatch):
    """Where blocks make again by themselves what they need, no forward runs twice; elsewhere all of them do."""
    from credit_like.nn import spectral_norm
    from credit_like.ops.cpu import policy

    x, target = tiny.batch(2)
    if not quick:
        monkeypatch.setattr(policy, "_enabled", False)
    found = []
    for recompute in (False, True):
        model = tiny.model()
        if recompute:
            _apply_activation_checkpointing(model)
        spectral_norm.before_step(model)
        calls = []
        for module in model.modules():
            if _has_fsdp2_shard(module):
                module.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(module))
        y = model(x)
        blocks = len(calls)
        tiny.loss(y, target).backward()
        assert (len(calls) == blocks) == (quick or not recompute)
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_an_instance_may_declare_itself_a_unit():
    layer = nn.Linear(2, 2)
    assert not _has_fsdp2_shard(layer)
    layer._fsdp2_shard = True
    assert _has_fsdp2_shard(layer)


def test_spectral_state_stays_in_full_precision(tiny):
    model = tiny.model(dtype=torch.bfloat16)
    _fix_spectral_norm_dtype(model)
    buffers = {n: b.dtype for n, b in model.named_buffers() if ".spectral." in n}
    assert buffers
    assert set(buffers.values()) == {torch.float32}


def test_optimizer_state_by_name_and_by_number():
    model = nn.Linear(3, 2)
    names = [n for n, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain = optimizer.state_dict()
    named = optimizer_state_to_names(plain, names)
    assert set(named["state"]) == {"weight", "bias"}
    assert optimizer_state_to_ids(named, names) == plain


def _trained(model, tiny, steps=1, dtype=torch.float32, rows=slice(None), share=slice(None), unused=()):
    """AdamW steps on the tiny batch; parameters named in `unused` get no gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        x, target = tiny.batch(2, dtype)
        tiny.loss(model(x[share][..., rows, :]), target[share], rows).backward()
        for name, p in model.named_parameters():
            if name in unused:
                p.grad = None
        optimizer.step()
    return optimizer


def test_state_of_one_process_needs_no_group(tiny):
    model = tiny.model(dtype=torch.float32)
    optimizer = _trained(model, tiny)
    state, moments = fsdp2_state_dict(model), fsdp2_optimizer_state_dict(model, optimizer)
    assert set(state) == set(model.state_dict())
    other = tiny.model(seed=5, dtype=torch.float32)
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-2)
    fsdp2_load_state_dict(other, state)
    fsdp2_load_optimizer_state_dict(other, fresh, moments)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], fresh.state[q]["exp_avg_sq"])


def _round_trip(rank, tiny, layout, state, moments):
    """Load whole states into a layout, gather them again; weights at the start do not depend on the layout."""
    _, tensor, domain = layout
    section = TrainerSection(
        parallelism=Parallelism(data="fsdp2", tensor=tensor, domain=domain), activation_checkpoint=True
    )
    runtime = Runtime.start(section.parallelism, CPU)
    with torch.device("meta"):
        model = tiny.blank()
    model = materialise(parallelise(model, section, runtime), runtime, 7)
    start = fsdp2_state_dict(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    before = [local(p).clone() for p in model.parameters()]
    mine = rank == 0
    fsdp2_load_optimizer_state_dict(model, optimizer, moments if mine else {})
    assert all(torch.equal(local(p), b) for p, b in zip(model.parameters(), before, strict=True))
    fsdp2_load_state_dict(model, state if mine else {})
    return start, fsdp2_state_dict(model), fsdp2_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("layout", representatives([(1, 2, 2), (2, 1, 1)], "(1, 2, 2)"), ids=str)
@pytest.mark.slow
def test_whole_states_go_into_any_layout_and_back(run_ranks, tiny, layout):
    with torch.device("meta"):
        serial = tiny.blank()
    serial = materialise(serial, Runtime(), 7)
    initial = {n: t.clone() for n, t in serial.state_dict().items()}
    never = "stages.0.embed.convs.0.bias"
    optimizer = _trained(serial, tiny, unused={never})
    state, moments = fsdp2_state_dict(serial), copy.deepcopy(fsdp2_optimizer_state_dict(serial, optimizer))
    del moments["state"][never]  # as an optimiser without a step for it would have saved
    results = run_ranks(layout[0] * layout[1] * layout[2], _round_trip, tiny, layout, state, moments)
    start, again, again_moments = results[0]
    assert all(r == ({}, {}, {}) for r in results[1:])
    assert list(start) == list(initial)
    assert all(torch.equal(start[n], initial[n]) for n in initial), "initial weights depend on the layout"
    assert all(torch.equal(again[n], state[n]) for n in state)
    assert not again_moments["state"][never]["exp_avg"].any()
    for name, saved in moments["state"].items():
        for key, value in saved.items():
            assert torch.equal(torch.as_tensor(again_moments["state"][name][key]), torch.as_tensor(value)), (name, key)


class _Block(nn.Module):
    _fsdp2_shard = True

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def _options(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2"), CPU)
    mesh = runtime.submeshes["dp"]
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block())
    kept = model[0].one.weight
    apply_fsdp2(model, mesh, {"trainer": {"fsdp2_reshard_after_forward": False}}, ignored_params={kept})
    assert fsdp2_is_applied(model)
    assert isinstance(model[0], FSDPModule)
    assert model[0].one.weight is kept
    sharded = model[1].one.weight
    assert (copies(kept), copies(sharded), box(sharded)) == (2, 1, (slice(3 * rank, 3 * rank + 3), slice(0, 6)))
    full = whole(sharded).detach()
    assert torch.equal(slice_like(full, sharded), local(sharded))
    assert torch.equal(whole_of_shards(local(sharded).detach(), sharded), full)
    one = nn.Linear(2, 2)
    assert not fsdp2_is_applied(apply_fsdp2(one, runtime.mesh["domain"], {}))  # a mesh of one rank: nothing to do
    return float(model(torch.ones(1, 6)).detach().sum())


def test_options_of_sharding(run_ranks):
    a, b = run_ranks(2, _options)
    assert a == b


def _whole_for_a_moment(rank, tiny, initial):
    section = TrainerSection(parallelism=Parallelism(data="fsdp2", tensor=2, domain=2), activation_checkpoint=True)
    runtime = Runtime.start(section.parallelism, CPU)
    with torch.device("meta"):
        model = tiny.blank()
    model = materialise(parallelise(model, section, runtime), runtime, 7)
    with full_parameters(model) as full:
        assert all(torch.equal(full[n], p) for n, p in initial.items())
        for p in full.values():
            p.zero_()
    with full_parameters(model, writeback=True) as full:
        assert all(torch.equal(full[n], p) for n, p in initial.items())  # copies: nothing was changed
        for p in full.values():
            p.mul_(2)
    assert all(
        torch.equal(local(p), 2 * slice_like(initial[canonical_name(n)], p)) for n, p in model.named_parameters()
    )


@pytest.mark.slow
def test_whole_parameters_for_a_moment(run_ranks, tiny):
    with torch.device("meta"):
        serial = tiny.blank()
    serial = materialise(serial, Runtime(), 7)
    run_ranks(4, _whole_for_a_moment, tiny, {n: p.detach() for n, p in serial.named_parameters()})
    with full_parameters(serial) as full:  # one process, no group
        assert all(torch.equal(full[n], p) for n, p in serial.named_parameters())


def _changed_between_forwards(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2"), CPU)
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block())
    apply_fsdp2(model, runtime.submeshes["dp"], {"trainer": {"fsdp2_reshard_after_forward": False}})
    with torch.no_grad():
        assert model(torch.ones(1, 6)).any()
        with full_parameters(model, writeback=True) as full:
            for p in full.values():
                p.zero_()
        changed = float(model(torch.ones(1, 6)).abs().sum())
    return changed, all(not x.any() for x in fsdp2_state_dict(model).values())


def test_what_is_written_after_a_forward_is_in_the_shards(run_ranks):
    """Also where the forward has left the parameters gathered; the next forward takes it."""
    assert run_ranks(2, _changed_between_forwards) == [(0, True)] * 2


def _blocks(count, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*[_Block() for _ in range(count)]).to(dtype)


def _compressed(rank, dtype):
    runtime = Runtime.start(Parallelism(data="fsdp2"), CPU)
    model = apply_fsdp2(_blocks(2, dtype), runtime.submeshes["dp"], {})
    sent = []

    def reduce(shard, gradients, group, op):
        sent.append(gradients.numel())
        torch.distributed.reduce_scatter_single(shard, gradients.bfloat16().to(dtype), op=op, group=group)

    set_gradient_communication(model, reduce)
    model(torch.full((1, 6), 1.0 + rank, dtype=dtype)).square().sum().backward()
    return sent, {n: whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_go_the_way_that_they_are_told(run_ranks, dtype):
    """Here rounded to bfloat16 before they are averaged."""
    grads = []
    for rank in range(2):
        model = _blocks(2, dtype)
        model(torch.full((1, 6), 1.0 + rank, dtype=dtype)).square().sum().backward()
        grads.append({n: p.grad.bfloat16().to(dtype) for n, p in model.named_parameters()})
    for sent, got in run_ranks(2, _compressed, dtype):
        assert sent == [2 * (36 + 6)] * 2
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, (grads[0][name] + grads[1][name]) / 2, msg=name)


class _Gathers(TorchDispatchMode):
    """Counts the all-gathers so far."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if wraps_others(types):
            return NotImplemented
        self.count += kind_of(func) == "all-gather"
        return func(*args, **(kwargs or {}))


def _ahead(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2"), CPU)
    model = apply_fsdp2(_blocks(4), runtime.submeshes["dp"], {})
    forward, backward = [], []
    with _Gathers() as gathers:
        for block in model:
            block.two.register_forward_pre_hook(lambda *_: forward.append(gathers.count))
            block.two.register_full_backward_hook(lambda *_: backward.append(gathers.count))
        model(torch.ones(1, 6)).sum().backward()
    return forward, backward


def test_each_unit_gathers_the_next_one_while_it_computes(run_ranks):
    for forward, backward in run_ranks(2, _ahead):
        assert forward == [2, 3, 4, 4]  # in the middle of a block's forward the next one has been asked for
        assert backward == [6, 7, 8, 8]  # and in backward the one before it


def _offloaded(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2"), CPU)
    results, policies, shard = [], [], fsdp2.fully_shard

    def recorded(module, **options):
        policies.append(type(options["offload_policy"]).__name__)
        return shard(module, **options)

    fsdp2.fully_shard = recorded
    for offload in (False, True):
        model = apply_fsdp2(_blocks(2), runtime.submeshes["dp"], {"trainer": {"fsdp2_cpu_offload": offload}})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(torch.full((1, 6), 1.0 + rank)).sum().backward()
        optimizer.step()
        results.append([local(p).detach() for p in model.parameters()])
    assert policies == ["OffloadPolicy"] * (len(policies) // 2) + ["CPUOffloadPolicy"] * (len(policies) // 2)
    return all(a.device.type == "cpu" and torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_parameters_kept_on_the_host(run_ranks):
    assert run_ranks(2, _offloaded) == [True, True]


def _half(rank, tiny, layout, reference):
    """Error of bf16 gradients to the fp32 ones, relative."""
    data, tensor, domain = layout
    section = TrainerSection.model_validate(
        {"amp": True, "parallelism": {"data": "fsdp2", "tensor": tensor, "domain": domain}}
    )
    runtime = Runtime.start(section.parallelism, CPU)
    with torch.device("meta"):
        model = tiny.blank()
    model = materialise(parallelise(model, section, runtime), runtime, 7)
    from credit_like.nn import spectral_norm
    from credit_like.parallel.apply import own_part

    rows, _, _ = own_part(model, tiny.height)
    spectral_norm.before_step(model)
    x, target = tiny.batch(2, torch.float32)
    share = slice(runtime.dp_rank, runtime.dp_rank + 1) if data == 2 else slice(None)
    y = model(x[share][..., rows, :])
    assert y.dtype == torch.float32
    (tiny.loss(y, target[share], rows) * runtime.gradient_scale).backward()
    spectral_norm.correct_gradients(model)
    assert all(local(p.grad).dtype == torch.float32 for p in model.parameters())
    pairs = [(local(p.grad), slice_like(reference[canonical_name(n)], p.grad)) for n, p in model.named_parameters()]
    square = torch.stack([(a - b).norm() ** 2 / copies(p) for (a, b), p in zip(pairs, model.parameters(), strict=True)])
    total = square.sum()
    torch.distributed.all_reduce(total)
    return float(total.sqrt() / torch.stack([g.norm() for g in reference.values()]).norm())


@pytest.mark.parametrize("layout", [pytest.param((1, 2, 2), marks=pytest.mark.slow), (2, 1, 1)], ids=str)
def test_bfloat16_with_spectral_norm(run_ranks, tiny, layout):
    """Not further from fp32 than one process in bfloat16 is, by more than half."""
    from credit_like.nn import spectral_norm

    with torch.device("meta"):
        model = tiny.blank()
    model = materialise(model, Runtime(), 7)
    spectral_norm.before_step(model)
    x, target = tiny.batch(2, torch.float32)
    tiny.loss(model(x), target).backward()
    reference = {n: p.grad.clone() for n, p in model.named_parameters()}
    rounded = {n: p.detach().bfloat16().requires_grad_() for n, p in model.named_parameters()}
    y = torch.func.functional_call(model, rounded, (x.bfloat16(),)).float()
    tiny.loss(y, target).backward()
    error = torch.stack([(rounded[n].grad.float() - g).norm() for n, g in reference.items()]).norm()
    serial = float(error / torch.stack([g.norm() for g in reference.values()]).norm())
    assert 1e-3 < serial < 0.2
    errors = run_ranks(layout[0] * layout[1] * layout[2], _half, tiny, layout, reference)
    assert largest(errors) < 1.5 * serial


def test_wrappers_come_off(tiny):
    model = tiny.blank()
    assert get_raw_model(torch.compile(model, backend="eager")) is model
    assert canonical_name("_orig_mod.stages.0._checkpoint_wrapped_module.embed.weight") == "stages.0.embed.weight"
    assert canonical_name("module.embed.weight") == "module.embed.weight"  # an attribute of the model


class _Unit(nn.Module):
    shard_unit = True

    def __init__(self):
        super().__init__()
        self.layer, self.extra = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, more):
        return self.layer(x) + (self.extra(x) if more else 0)


class _Pair(nn.Module):
    """Two units, and two layers of one weight outside of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = _Unit(), _Unit()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x, more=True):
        return self.last(self.b(self.a(self.first(x), more), True).tanh())


def _gradients_of_both(rank):
    """The gradients where one of two samples uses layers that the other does not, in one process and sharded."""
    section = TrainerSection.model_validate({"parallelism": {"data": "fsdp2"}})
    runtime = Runtime.start(section.parallelism, CPU)
    found = []
    for sharded in (False, True):
        with torch.device("meta"):
            model = _Pair()
        if sharded:
            parallelise(model, section, runtime)
        model = materialise(model, runtime, 0)
        tied = model.first.weight is model.last.weight
        for sample in [rank] if sharded else [0, 1]:
            x = torch.full((1, 3), 1.0 + sample)
            (model(x, more=sample == 0).sum() / (1 if sharded else 2)).backward()
        found.append({name: whole(p.grad) for name, p in model.named_parameters()})
    return tied, *found


def test_a_weight_of_two_layers_and_layers_that_some_samples_use(run_ranks):
    for tied, expected, found in run_ranks(2, _gradients_of_both):
        assert tied
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)


def _refusals(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2"), CPU)
    shared, number, used = _Pair(), _Pair(), _Pair()
    shared.b.layer.weight = shared.a.layer.weight
    number.a.scale = nn.Parameter(torch.tensor(1.0))
    used.a.layer = used.first
    module = _Pair()
    module.other, module.last = module.a.layer, nn.Linear(3, 3)
    said = []
    for model in (shared, number, used, module):
        try:
            apply_fsdp2(model, runtime.submeshes["dp"], {"trainer": {}})
        except UserError as error:
            said.append(str(error))
    return said


def test_parameters_that_cannot_be_sharded_are_named(run_ranks):
    for shared, number, used, module in run_ranks(2, _refusals):
        assert "got a.layer.weight, which a shares as b.layer.weight with b" in shared
        assert "got the number a.scale" in number
        assert "got a.layer.weight, which a shares as first.weight with the rest" in used
        assert "got a.layer.weight, which a shares as other.weight with the rest" in module
