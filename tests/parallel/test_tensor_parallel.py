import re

import numpy as np
import pytest
import torch
from torch import nn

from credit_like.errors import UserError
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.mesh import build_device_mesh
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, slice_like
from credit_like.parallel.tensor_parallel import apply_tensor_parallel
from credit_like.parallel.tensor_verify import verify
from credit_like.schema.trainer import Parallelism, TrainerSection
from tests.largest import largest

CPU = torch.device("cpu")


class Mlp(nn.Module):
    """Dotted paths into a Sequential; biases on or off; linear or 1 × 1 convolutions."""

    _tp_col, _tp_row = "layers.0", "layers.2"

    def __init__(self, bias=True, conv=False):
        super().__init__()
        make = (lambda i, o: nn.Conv2d(i, o, 1, bias=bias)) if conv else (lambda i, o: nn.Linear(i, o, bias=bias))
        self.norm = nn.Identity() if conv else nn.LayerNorm(6)
        self.layers = nn.Sequential(make(6, 8), nn.GELU(), make(8, 6))

    def forward(self, x):
        return x + self.layers(self.norm(x))


def _model(bias, conv):
    torch.manual_seed(0)
    return nn.Sequential(Mlp(bias, conv), Mlp(bias, conv)).double()


def _input(conv):
    torch.manual_seed(1)
    return torch.randn(2, 6, 5, 6, dtype=torch.float64)


def _split(rank, bias, conv, y_ref, grads):
    runtime = Runtime.start(Parallelism(tensor=2), CPU)
    model = apply_tensor_parallel(_model(bias, conv), runtime.submeshes["tp"])
    assert list(dict(model.named_parameters())) == list(grads)
    assert local(model[0].layers[0].weight).shape[0] == 4
    assert local(model[0].layers[2].weight).shape[1] == 4
    y = model(_input(conv))
    (y**3).sum().backward()
    errors = [
        float((local(p.grad) - slice_like(grads[n], p)).norm() / grads[n].norm()) for n, p in model.named_parameters()
    ]
    return float((y - y_ref).abs().max().detach()), largest(errors)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv"])
def test_pairs_of_layers(run_ranks, bias, conv):
    model = _model(bias, conv)
    y = model(_input(conv))
    (y**3).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for output, gradient in run_ranks(2, _split, bias, conv, y.detach(), grads):
        assert output < 1e-13
        assert gradient < 1e-13


def _refused(rank, make, degree):
    runtime = Runtime.start(Parallelism(tensor=degree), CPU)
    apply_tensor_parallel(make(), runtime.submeshes["tp"])


class Wrong(nn.Module):
    _tp_col, _tp_row = "one", "two"

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3), nn.Linear(4, 4)


def test_a_layer_that_cannot_be_split_is_named(launch_ranks):
    for answer in launch_ranks(2, _refused, lambda: nn.Sequential(Wrong()), 2):
        assert "0 (Wrong): expected nn.Linear or a 1 × 1 nn.Conv2d at one, got Conv2d" in answer[1]


def test_heads_that_do_not_divide(launch_ranks, tiny):
    """8 / 2 = 4 heads at the first stage with 3 ranks."""
    for answer in launch_ranks(3, _refused, tiny.blank, 3):
        assert (
            "stages.0.layers.0.short (ShortAttention): expected a degree that divides its number of heads, 2, got 3"
            in answer[1]
        )
        assert "degrees that work: 1, 2" in answer[1]


def _mesh(rank):
    Runtime.start(Parallelism(data="fsdp2", tensor=2, domain=2), CPU)
    mesh, submeshes = build_device_mesh({"data": "fsdp2", "tensor": 2, "domain": 2}, "cpu")
    return mesh.mesh_dim_names, {name: sub.size() for name, sub in submeshes.items()}, mesh.get_coordinate()


def test_the_mesh_is_data_ensemble_tensor_domain(run_ranks):
    results = run_ranks(4, _mesh)
    assert all(names == ("dp", "ensemble", "tp", "domain") for names, _, _ in results)
    assert all(sizes == {"tp": 2, "domain": 2} for _, sizes, _ in results)
    assert [list(place) for *_, place in results] == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_one_process_has_no_mesh():
    assert build_device_mesh({"data": "fsdp2"}, "cpu") == (None, {})


class Block(nn.Module):
    """Two split layers and what is between them; x (B, H, W, 8)."""

    shard_unit = True
    tensor_columns, tensor_rows = ("up",), ("down",)

    def __init__(self, between, hidden=24, out=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(out or hidden, 8)
        self.gate, self.norm, self.slope = nn.Linear(8, 1), nn.LayerNorm(hidden), nn.PReLU(1)
        self.register_buffer("signs", torch.from_numpy(np.array([-1.0, 1.0, 1.0], "float32")), persistent=False)
        self.register_buffer("again", self.signs)
        self.between = between

    def forward(self, x):
        return x + self.down(self.between(self, self.up(x), x))


class Image(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.in_channels, self.frames, self.height, self.width = 8, 1, 6, 4
        self.block = block

    def forward(self, x):
        return self.block(x[:, :, 0].movedim(1, -1)).movedim(-1, 1)[:, :, None]


def by_head(self, y, x):
    q, k, v = y.unflatten(-1, (-1, 3, 4)).permute(4, 0, 1, 3, 2, 5)
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)


def by_kind(self, y, x):
    q, k, v = (t.unflatten(-1, (-1, 4)).transpose(2, 3) for t in y.chunk(3, -1))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)


def whole_heads(self, y, x):
    q, k, v = y.reshape(*y.shape[:3], 2, 3, 4).permute(4, 0, 1, 3, 2, 5)
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)


BETWEEN = {
    "activation": (lambda self, y, x: nn.functional.gelu(y), {}, ""),
    "by head": (by_head, {"out": 8}, ""),
    "pairs": (lambda self, y, x: y.unflatten(-1, (-1, 2)).prod(-1), {"out": 12}, ""),
    "buffer": (lambda self, y, x: y.unflatten(-1, (-1, 3)).mul(self.signs).flatten(3), {}, ""),
    "buffer of two names": (lambda self, y, x: y.unflatten(-1, (-1, 3)).mul(self.again).flatten(3), {}, ""),
    "mean of columns": (lambda self, y, x: y - y.mean(2, keepdim=True) / y.shape[2], {}, ""),
    "by kind": (by_kind, {"out": 8}, "split"),
    "halves": (lambda self, y, x: y[..., :12] * y[..., 12:], {"out": 12}, "slice"),
    "softmax": (lambda self, y, x: y.softmax(-1), {}, "_softmax"),
    "norm": (lambda self, y, x: self.norm(y), {}, "native_layer_norm"),
    "slope": (lambda self, y, x: self.slope(y), {}, "not split and has a gradient"),
    "gate": (lambda self, y, x: y * self.gate(x), {}, "not split and has a gradient"),
    "size": (lambda self, y, x: y / y.shape[-1], {}, "calls div with"),
    "heads": (whole_heads, {"out": 8}, r"test_tensor_parallel\.py:\d+ fails on a part"),
    "interleaved": (lambda self, y, x: y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), {}, "in their order"),
    "not split": (lambda self, y, x: torch.cat([x, x, x], -1), {}, "in their order"),
    "moved": (lambda self, y, x: y.roll(1, -1), {}, "roll"),
}


def _between(rank):
    """Of each block: the refusal, and whether both ranks give the output and the gradients of one process."""
    section = TrainerSection.model_validate({"parallelism": {"data": "fsdp2", "tensor": 2}})
    runtime, alone = Runtime.start(section.parallelism, CPU), Runtime()
    found = {}
    x = torch.randn(2, 8, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    for name, (between, sizes, _) in BETWEEN.items():
        with torch.device("meta"):
            serial, model = Image(Block(between, **sizes)), Image(Block(between, **sizes))
        try:
            model = materialise(parallelise(model, section, runtime), runtime, 0)
        except UserError as error:
            found[name] = str(error), None
            continue
        serial = materialise(serial, alone, 0)
        y, expected = model(x), serial(x)
        for each in (y, expected):
            each.square().sum().backward()
        of_one = {n: p.grad for n, p in serial.named_parameters()}
        found[name] = (
            "",
            torch.allclose(y, expected, atol=1e-5)
            and all(
                torch.allclose(local(p.grad), slice_like(of_one[n], p), rtol=1e-4, atol=1e-4)
                for n, p in model.named_parameters()
                if p.grad is not None
            ),
        )
    return found


def test_blocks_that_do_not_keep_split_features_apart_are_named(run_ranks):
    for found in run_ranks(2, _between):
        for name, (_, _, expected) in BETWEEN.items():
            message, same = found[name]
            assert re.search(expected, message) if expected else message == "", (name, message)
            assert same is (None if expected else True), name


class Flow(Block):
    """A block that is `flow` of itself and x, with further declarations."""

    def __init__(self, flow, columns=("up",), copies=()):
        super().__init__(None)
        self.more, self.flow = nn.Linear(24, 24), flow
        self.tensor_columns, self.tensor_copies = columns, copies

    def forward(self, x):
        return self.flow(self, x)


FLOWS = {
    "copy": (lambda self, x: self.down(self.up(x) * self.gate(x)), {"copies": ("gate",)}, ""),
    "kept": (lambda self, x: (self.down(self.up(x)), self.up(x))[1], {}, "returns features that are split"),
    "twice": (
        lambda self, x: self.down(self.more(self.up(x))),
        {"columns": ("up", "more")},
        "passes features that are split over the ranks to a layer in tensor_columns",
    ),
}


@pytest.mark.parametrize("name", FLOWS)
def test_where_split_features_may_go(name):
    flow, declared, expected = FLOWS[name]
    with torch.device("meta"):
        model = Image(Flow(flow, **declared))
    if not expected:
        assert verify(model, 2)
        return
    with pytest.raises(UserError, match=expected):
        verify(model, 2)
