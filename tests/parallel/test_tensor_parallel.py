import pytest
import torch
from torch import nn

from credit_like.parallel.mesh import build_device_mesh
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, slice_like
from credit_like.parallel.tensor_parallel import apply_tensor_parallel
from credit_like.schema.trainer import Parallelism
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
