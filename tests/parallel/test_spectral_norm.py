"""The kernels that one iteration of the spectral norms of the 1° model launches, and its values where ranks hold uneven parts."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.nn.conv import ConvTranspose2d
from credit_like.nn.init import initialise
from credit_like.nn.linear import Linear
from credit_like.parallel.fsdp2 import apply_fsdp2
from credit_like.parallel.observe import fake_group
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.spectral_norm import shard_spectral_norms
from credit_like.schema.trainer import Parallelism

MODEL = Path(__file__).parents[2] / "models/wxformer-1deg/model.yml"


class _Kernels(TorchDispatchMode):
    """Counts the operations that are neither views nor allocations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("empty", "detach", "_unsafe_view"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _one_degree():
    options = {k: v for k, v in yaml.safe_load(MODEL.read_text())["model"].items() if k != "type"}
    with torch.device("meta"):
        return wxformer.build(
            wxformer.Config.model_validate(options), in_channels=80, out_channels=77, frames=2, height=181, width=360
        )


def _kernels(work, model):
    with _Kernels() as kernels:
        work(model)
    return kernels.counts.total()


@pytest.mark.parametrize("world", [1, 8])
def test_few_kernels_for_each_shape_of_the_1_degree_model(world):
    model = _one_degree()
    normalised = [layer for _, layer in spectral_norm.layers(model)]
    shapes = {(layer.weight.shape, layer.spectral.output_dim) for layer in normalised}
    assert len(normalised) > 4 * len(shapes)
    with fake_group(0, world):
        if world > 1:
            apply_fsdp2(model, init_device_mesh("cpu", (world,)), {"trainer": {}})
            shard_spectral_norms(model)
        assert _kernels(spectral_norm.before_step, model) <= 10 * len(shapes)
        assert _kernels(spectral_norm.refresh, model) <= 5 * len(shapes)
        for layer in normalised:
            layer.spectral.in_backward = False
            layer.weight.grad = torch.zeros_like(layer.weight)
        assert _kernels(spectral_norm.correct_gradients, model) <= 10 * len(shapes)


def _layers():
    """Seven rows do not divide by three ranks, and two rows leave one of them without any."""
    layers = [Linear(12, rows, spectral_norm=True) for rows in (7, 7, 2)]
    return initialise(torch.nn.Sequential(*layers, ConvTranspose2d(5, 6, 2, spectral_norm=True)), 4).double()


def _uneven(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2"), torch.device("cpu"))
    model, whole = _layers(), _layers()
    fully_shard(model, mesh=runtime.mesh["dp"])
    shard_spectral_norms(model)
    for _ in range(3):
        spectral_norm.before_step(model)
    for _, layer in spectral_norm.layers(whole):
        for _ in range(3):
            matrix, state = spectral_norm.as_matrix(layer.weight.detach(), layer.spectral.output_dim), layer.spectral
            state.v = torch.nn.functional.normalize(matrix.T @ state.u, dim=0)
            state.u = torch.nn.functional.normalize(matrix @ state.v, dim=0)
            state.inv_sigma = 1 / (state.u @ matrix @ state.v)
    for got, expected in zip(model.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    once = [buffer.clone() for buffer in model.buffers()]
    spectral_norm.refresh(model)
    for got, expected in zip(model.buffers(), once, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    runtime.close()


def test_uneven_parts_give_the_definition(run_ranks):
    run_ranks(3, _uneven)
