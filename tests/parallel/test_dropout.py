"""A model with dropout and stochastic depth on bands of rows and on heads: the numbers of the whole model in one process."""

import pytest
import torch

from credit_like.nn import spectral_norm
from credit_like.parallel.apply import parallelise
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, slice_like
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.trainer import TrainerSection
from tests.largest import largest

KEYS = torch.tensor([11, -12])
DROPS = {"attn_dropout": 0.2, "ff_dropout": 0.1, "drop_path": 0.4}


def _run(tiny, model, x, target, rows=slice(None), scale=1.0):
    spectral_norm.before_step(model)
    y = model(x[..., rows, :], key_B=KEYS)
    (tiny.loss(y, target, rows) * scale).backward()
    spectral_norm.correct_gradients(model)
    return y.detach(), {canonical_name(n): p.grad for n, p in get_raw_model(model).named_parameters()}


def _sharded(rank, tiny, layout, reference):
    section = TrainerSection.model_validate({"parallelism": layout, "activation_checkpoint": True})
    runtime = Runtime.start(section.parallelism, torch.device("cpu"))
    model = parallelise(tiny.model(**DROPS), section, runtime)
    manager = get_domain_manager(model)
    rows = slice(None) if manager is None else manager.rows
    y, gradients = _run(tiny, model, *tiny.batch(2), rows, runtime.gradient_scale)
    y_ref, expected = reference
    assert set(gradients) == set(expected)
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    worst = largest(
        (local(gradients[n]) - slice_like(g, gradients[n])).norm() / max(g.norm(), 1e-4 * whole)
        for n, g in expected.items()
    )
    return float((y - y_ref[..., rows, :]).abs().max() / y_ref.abs().max()), worst


LAYOUTS = [{"domain": 2}, {"tensor": 2}, {"domain": 3}, {"tensor": 2, "domain": 2}]


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS[1:])], ids=str
)
def test_bands_and_heads_drop_what_the_whole_model_drops(run_ranks, tiny, layout):
    reference = _run(tiny, tiny.model(**DROPS), *tiny.batch(2))
    ranks = layout.get("tensor", 1) * layout.get("domain", 1)
    for output, gradient in run_ranks(ranks, _sharded, tiny, {"data": "none", **layout}, reference):
        assert output < 1e-12
        assert gradient < 1e-10
