"""A model with noise on bands of rows, recomputed or compiled: outputs and gradients of the whole model in one process."""

import pytest
import torch

from credit_like.nn.noise import Noise
from credit_like.parallel.domain.apply import apply_domain_parallel
from credit_like.parallel.domain.gradients import sync_domain_gradients
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.domain.spatial import shard_spatial
from credit_like.parallel.fsdp2 import _apply_activation_checkpointing, shard_units
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.trainer import Parallelism
from tests.largest import largest

KEYS = torch.tensor([11, -12])


DECODER = {"channels": 3}
NORMS = {"channels": 3, "type": "conditional-norm", "correlation": 0.3}


def with_noise(model):
    """Return a model whose layers of noise, which are the identity at first, have weights."""
    for module in model.modules():
        if isinstance(module, Noise):
            module.weight.data.normal_(std=0.2, generator=torch.Generator().manual_seed(module.level))
    return model


def _model(tiny, noise, width=24):
    return with_noise(tiny.model(width=width, noise=noise))


def _run(tiny, model, x, target, rows=slice(None), columns=slice(None)):
    y = model(x, key_B=KEYS)
    loss = tiny.loss(y, target, rows, columns)
    loss.backward()
    return y.detach(), {canonical_name(n): p.grad for n, p in get_raw_model(model).named_parameters()}


def _errors(tiny, model, y, grads, reference, rows=slice(None), columns=slice(None)):
    y_ref, grads_ref = reference
    assert set(grads) == set(grads_ref)
    whole = torch.cat([g.flatten() for g in grads_ref.values()]).norm()
    worst = largest((grads[n] - g).norm() / max(g.norm(), 1e-4 * whole) for n, g in grads_ref.items())
    return float((y - y_ref[..., rows, columns]).abs().max() / y_ref.abs().max()), worst


def _sharded(rank, shape, width, tiny, noise, reference):
    runtime = Runtime.start(Parallelism(data="none", domain=shape), torch.device("cpu"))
    model = apply_domain_parallel(_model(tiny, noise, width), runtime.submeshes["domain"], shape)
    manager = get_domain_manager(model)
    x, target = tiny.batch(2, width=width)
    part = (manager.rows, manager.columns)
    y, _ = _run(tiny, model, shard_spatial(x, manager), target, *part)
    for parameter in model.parameters():
        parameter.grad *= runtime.gradient_scale
    sync_domain_gradients(model, manager)
    return _errors(tiny, model, y, {n: p.grad for n, p in model.named_parameters()}, reference, *part)


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((2, 1), 24),
        pytest.param((3, 1), 24, marks=pytest.mark.long),
        ((1, 2), 56),
        pytest.param((2, 2), 56, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("noise", [DECODER, NORMS], ids=["decoder", "norms"])
def test_parts_have_the_noise_of_the_whole(run_ranks, tiny, shape, width, noise):
    reference = _run(tiny, _model(tiny, noise, width), *tiny.batch(2, width=width))
    for output, gradient in run_ranks(shape[0] * shape[1], _sharded, shape, width, tiny, noise, reference):
        assert output < 1e-12
        assert gradient < 1e-10


# The compiler itself looks whether a tensor has a gradient.
@pytest.mark.parametrize(
    ("noise", "compiled"),
    [
        pytest.param(DECODER, False, id="decoder"),
        pytest.param(NORMS, False, id="norms"),
        pytest.param(DECODER, True, id="decoder-compiled", marks=pytest.mark.slow),
        pytest.param(NORMS, True, id="norms-compiled", marks=pytest.mark.long),
    ],
)
def test_recomputed_layers_have_the_same_noise(tiny, compiled, noise):
    reference = _run(tiny, _model(tiny, noise), *tiny.batch(2))
    model = _model(tiny, noise)
    _apply_activation_checkpointing(model)
    if compiled:
        noisy = [unit for unit in shard_units(model) if any(isinstance(module, Noise) for module in unit.modules())]
        for unit in {tuple(map(type, unit.modules())): unit for unit in noisy}.values():  # one of each kind
            unit.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    output, gradient = _errors(tiny, model, *_run(tiny, model, *tiny.batch(2)), reference)
    assert output < 1e-12
    assert gradient < 1e-10
