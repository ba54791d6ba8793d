"""Every layout through the real Runtime and `parallelise`: loss, gradients, norm and weights after clipped AdamW steps.

Reference: one process, fp64, the serial model, torch's own gradient clipping, and the same optimiser.
"""

import pytest
import torch
from torch import nn

from credit_like.layout import domain_shape
from credit_like.nn import spectral_norm
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.collectives import clip_grad_norm_
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, slice_like
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.trainer import TrainerSection
from credit_like.training.optimizers._adamw import AdamW
from credit_like.training.optimizers._muon import Muon
from tests.experiments import representatives
from tests.largest import largest, worst

BATCH, SEED, RATE = 2, 11, 1e-2
ADAMW = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-2}
"""With an eps above the smallest gradients, the update does not amplify their rounding errors, so that weights are compared to
rounding. Drawn experiments (drawn.py) have the default one, and a wider bound."""


class _Options:
    def __init__(self, **values):
        self.__dict__.update(values)


def _optimizer(kind, parameters):
    if kind == "muon":
        return Muon(_Options(momentum=0.9, nesterov=True, **ADAMW), parameters)
    return AdamW(_Options(**ADAMW), parameters)


def _leads(model, x, leads):
    """A rollout: the newest frame's first channels are replaced by the prediction; gradients flow through all leads."""
    for _ in range(leads):
        y = model(x)
        newest = torch.cat([y[:, :, 0], x[:, y.shape[1] :, -1]], dim=1)
        x = torch.stack([x[:, :, -1], newest], dim=2)
        yield y


def _step(model, tiny, x, target, part, leads, scale):
    losses = [tiny.loss(y, target, *part) for y in _leads(model, x, leads)]
    loss = sum(losses) / leads
    (loss * scale).backward()
    return loss.detach()


def _reference(tiny, changes, steps, leads, accumulate, kind, batch, dtype):
    """Loss and norm of each step, the gradients of the first, the final weights."""
    with torch.device("meta"):
        model = tiny.blank(**changes)
    model = materialise(model.to(dtype), Runtime(), SEED)
    width = changes.get("width", tiny.width)
    parameters = dict(model.named_parameters())
    optimizer = _optimizer(kind, parameters)
    x, target = tiny.batch(batch * accumulate, dtype, width=width)
    losses, norms, first = [], [], None
    for _ in range(steps):
        spectral_norm.before_step(model)
        losses.append(_step(model, tiny, x, target, (), leads, 1.0))
        spectral_norm.correct_gradients(model)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in parameters.values()]))
        first = first or {n: p.grad.clone() for n, p in parameters.items()}
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), 0.3, norms[-1])
        optimizer.step(RATE, torch.zeros(()))
        for p in parameters.values():
            p.grad = None
    weights = {n: p.detach() for n, p in parameters.items()}
    return torch.stack(losses), torch.stack(norms), first, weights


def _compare(got, expected):
    """(flat relative error, worst parameter's error and name), from local shards alone."""
    pairs = {n: (local(t).detach(), slice_like(expected[n], t)) for n, t in got.items()}
    everything = torch.stack([e.norm() for e in expected.values()]).norm()
    largest_of_all = worst(
        ((a - b).norm() / max(float(expected[n].norm()), 1e-4 * float(everything)), n) for n, (a, b) in pairs.items()
    )
    flat = torch.stack([(a - b).norm() for a, b in pairs.values()]).norm() / everything
    return float(flat), largest_of_all


def _layout(rank, tiny, section, changes, steps, leads, accumulate, kind, batch, dtype, reference):
    runtime = Runtime.start(section.parallelism, torch.device("cpu"))
    losses, norms, gradients, weights = reference
    with torch.device("meta"):
        model = tiny.blank(**changes).to(dtype)
    model = materialise(parallelise(model, section, runtime), runtime, SEED)
    manager = get_domain_manager(model)
    part = (slice(None), slice(None)) if manager is None else (manager.rows, manager.columns)
    parameters = {canonical_name(n): p for n, p in get_raw_model(model).named_parameters()}
    assert list(parameters) == list(weights)
    optimizer = _optimizer(kind, parameters)
    x, target = tiny.batch(batch * accumulate, dtype, width=changes.get("width", tiny.width))
    share = batch // runtime.dp_size
    result = {"loss": 0.0, "norm": 0.0}
    for step in range(steps):
        spectral_norm.before_step(model)
        total = torch.zeros((), dtype=x.dtype)
        for count in range(accumulate):
            start = count * batch + runtime.dp_rank * share
            mine = slice(start, start + share)
            sync = count == accumulate - 1
            for module in model.modules():
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(sync, recurse=False)
            scale = runtime.gradient_scale / accumulate
            if not sync and hasattr(model, "no_sync"):
                with model.no_sync():
                    loss = _step(model, tiny, x[mine][..., *part], target[mine], part, leads, scale)
            else:
                loss = _step(model, tiny, x[mine][..., *part], target[mine], part, leads, scale)
            total += loss / accumulate
        spectral_norm.correct_gradients(model)
        if step == 0:
            result["flat"], result["worst"] = _compare({n: p.grad for n, p in parameters.items()}, gradients)
        norm = clip_grad_norm_(parameters.values(), 0.3)
        total = runtime.sum_over_data(total)
        result["loss"] = largest([result["loss"], (total - losses[step]).abs() / losses[step]])
        result["norm"] = largest([result["norm"], (norm - norms[step]).abs() / norms[step]])
        optimizer.step(RATE, torch.zeros(()))
        for p in parameters.values():
            p.grad = None
    result["weights"] = _compare(parameters, weights)[0]
    return result


EXACT = {"flat": 1e-12, "worst": 1e-11, "loss": 1e-12, "norm": 1e-12, "weights": 1e-12}
"""The worst is that of a bias before a group norm, whose gradient is a sum of terms that nearly cancel, relative to itself."""
SINGLE = {"flat": 5e-6, "worst": 1e-3, "loss": 5e-7, "norm": 5e-6, "weights": float("inf")}
"""Of the smallest gradients, the signs are noise in single precision."""


def check(
    run_ranks,
    tiny,
    layout,
    data="fsdp2",
    steps=2,
    leads=1,
    accumulate=1,
    kind="adamw",
    changes=None,
    dtype=torch.float64,
    body=_layout,
    **options,
):
    dp, tensor, domain = layout
    changes = changes or {}
    parallelism = {"data": data, "tensor": tensor, "domain": domain, "replicate": options.pop("replicate", 1)}
    section = TrainerSection.model_validate({"parallelism": parallelism, **options})
    batch = max(BATCH, dp)
    common = (changes, steps, leads, accumulate, kind, batch, dtype)
    reference = _reference(tiny, *common)
    bounds = EXACT if dtype == torch.float64 else SINGLE
    rows, columns = domain_shape(domain)
    for result in run_ranks(dp * tensor * rows * columns, body, tiny, section, *common, reference, timeout=900):
        result["worst"], at = result["worst"]
        assert all(result[key] < bound for key, bound in bounds.items()), (result, at)


# (dp, tensor, domain)
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
TRANSPOSE = {"upsample": "transpose", "position_index": "credit", "interp": True}


@pytest.mark.parametrize(
    "layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.long)], ids=str
)
def test_layouts(run_ranks, tiny, layout):
    check(run_ranks, tiny, layout)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 3)], ids=str)
def test_ddp(run_ranks, tiny, layout):
    check(run_ranks, tiny, layout, data="ddp", changes=TRANSPOSE)


WIDE = {"width": 56}
"""As many columns as two ranks can share."""


@pytest.mark.parametrize("layout", [(1, 1, (1, 2)), pytest.param((1, 1, (2, 2)), marks=pytest.mark.slow)], ids=str)
def test_rows_and_columns(run_ranks, tiny, layout):
    check(run_ranks, tiny, layout, changes=WIDE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes", "options"),
    [
        ((1, 1, (1, 4)), TRANSPOSE | {"width": 120}, {"data": "ddp"}),
        pytest.param((1, 1, (3, 2)), WIDE, {"data": "none", "steps": 3}, marks=pytest.mark.long),
        pytest.param(
            (1, 1, (2, 3)), {"width": 88}, {"leads": 3, "activation_checkpoint": True}, marks=pytest.mark.long
        ),
        pytest.param((2, 1, (1, 2)), WIDE, {"accumulate": 2}, marks=pytest.mark.long),
        pytest.param((1, 2, (2, 2)), WIDE | {"upsample": "transpose"}, {"steps": 3}, marks=pytest.mark.long),
        pytest.param((2, 2, (1, 2)), WIDE, {"leads": 2, "kind": "muon"}, marks=pytest.mark.long),
        pytest.param((2, 1, (2, 2)), WIDE, {"replicate": 2, "steps": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_rows_and_columns_with_all_else(run_ranks, tiny, layout, changes, options):
    check(run_ranks, tiny, layout, changes=changes, **options)


@pytest.mark.long
@pytest.mark.parametrize("rest", [(2, 1), (1, 2)], ids=["data 2", "tensor 2"])
@pytest.mark.parametrize(("box", "width"), [((1, 4), 120), ((3, 2), 56), ((2, 3), 88)], ids=str)
def test_every_box_with_data_and_tensor_ranks(run_ranks, tiny, box, width, rest):
    changes = {"width": width, **(TRANSPOSE if rest == (1, 2) else {})}
    check(run_ranks, tiny, (*rest, box), steps=3, leads=3, changes=changes)


def test_domain_alone(run_ranks, tiny):
    check(run_ranks, tiny, (1, 1, 2), data="none")


@pytest.mark.slow
def test_checkpointing_accumulation_rollout_and_muon(run_ranks, tiny):
    check(run_ranks, tiny, (1, 2, 2), leads=2, accumulate=2, kind="muon", activation_checkpoint=True)


@pytest.mark.slow
def test_single_precision(run_ranks, tiny):
    check(run_ranks, tiny, (1, 2, 2), steps=1, dtype=torch.float32)


SLOW = [
    ({"leads": 3}, {}),
    pytest.param({"accumulate": 2, "activation_checkpoint": True}, TRANSPOSE, marks=pytest.mark.long),
    pytest.param({"kind": "muon"}, {}, marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize("data", ["fsdp2", pytest.param("ddp", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", representatives(LAYOUTS, "(2, 2, 2)"), ids=str)
def test_every_layout(run_ranks, tiny, layout, data):
    check(run_ranks, tiny, layout, data=data, steps=3, changes=TRANSPOSE if data == "ddp" else {})


@pytest.mark.slow
@pytest.mark.parametrize("layout", representatives([(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)], "(2, 1, 2)"), ids=str)
@pytest.mark.parametrize(("options", "changes"), SLOW, ids=["rollout", "accumulate", "muon"])
def test_every_way_to_train(run_ranks, tiny, layout, options, changes):
    check(run_ranks, tiny, layout, changes=changes, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((4, 1, 1), {"replicate": 2}),
        pytest.param((2, 2, 2), {"replicate": 2}, marks=pytest.mark.long),
        ((2, 1, 1), {"fsdp2_reshard_after_forward": False, "leads": 2}),
    ],
    ids=["hybrid", "hybrid-3d", "shard-grad-op"],
)
def test_sharding_strategies(run_ranks, tiny, layout, options):
    check(run_ranks, tiny, layout, **options)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_in_single_precision(run_ranks, tiny, layout):
    check(run_ranks, tiny, layout, steps=1, dtype=torch.float32)


def _compiled(rank, *arguments):
    """Every unit compiled as a whole: its graph without breaks, by everything but the code generator."""
    compile_unit = nn.Module.compile

    def whole_graph(module, **options):
        compile_unit(module, backend="aot_eager", fullgraph=True, **options)

    nn.Module.compile = whole_graph
    torch._dynamo.config.recompile_limit = 64
    result = _layout(rank, *arguments)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 4, counters
    assert not counters["graph_break"], counters["graph_break"]
    return result


def _one_of_each_kind_compiled(rank, *arguments):
    """Of units that differ in nothing but their sizes, the first alone."""
    compile_unit, seen = nn.Module.compile, set()

    def first(module, **options):
        kind = tuple(map(type, module.modules()))
        if kind not in seen:
            seen.add(kind)
            compile_unit(module, **options)

    nn.Module.compile = first
    return _compiled(rank, *arguments)


# Both are of the compiler's own making: it makes instances of functions, and looks whether any tensor has a gradient.
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "changes"), [((2, 1, 1), {}), ((1, 2, 1), {}), ((1, 1, 2), {}), ((1, 1, (1, 2)), WIDE)], ids=str
)
def test_compiled_units(run_ranks, tiny, layout, changes):
    check(run_ranks, tiny, layout, changes=changes, steps=1, dtype=torch.float32, body=_compiled, compile=True)


@pytest.mark.long
def test_compiled_units_of_each_kind(run_ranks, tiny):
    body = _one_of_each_kind_compiled
    check(run_ranks, tiny, (1, 1, (1, 2)), changes=WIDE, steps=1, dtype=torch.float32, body=body, compile=True)
