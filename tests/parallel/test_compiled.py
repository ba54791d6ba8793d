"""A compiled model through the events of a run: every graph is whole, none is given up, and the numbers are those of eager."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from credit_like.nn import spectral_norm
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.collectives import clip_grad_norm_
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local
from credit_like.parallel.unwrap import get_raw_model
from credit_like.schema.trainer import TrainerSection
from credit_like.training.optimizers._adamw import AdamW
from tests.largest import largest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # minutes of a processor, and more on a busy machine


class _Options:
    # Not 1e-8: AdamW would divide rounding errors by the roots of second moments that are as small.
    weight_decay, betas, eps = 0.1, (0.9, 0.95), 1e-2


class _Run:
    """The events of a run with one model; the results of each as one list of tensors."""

    def __init__(self, tiny, section, runtime):
        # Two ranks that share rows need more columns than the others.
        self.width = 56 if runtime.domain_shape[1] > 1 else tiny.width
        with torch.device("meta"):
            model = tiny.blank(width=self.width).to(torch.float64)
        self.tiny, self.runtime = tiny, runtime
        self.model = materialise(parallelise(model, section, runtime), runtime, 3)
        manager = get_domain_manager(self.model)
        self.part = (slice(None), slice(None)) if manager is None else (manager.rows, manager.columns)
        self.parameters = dict(get_raw_model(self.model).named_parameters())
        self.optimizer = AdamW(_Options(), self.parameters)

    def _leads(self, x, leads):
        x = x[..., *self.part]
        for _ in range(leads):
            y = self.model(x)
            newest = torch.cat([y[:, :, 0], x[:, y.shape[1] :, -1]], dim=1)
            x = torch.stack([x[:, :, -1], newest], dim=2)
            yield y

    def train(self):
        """Two steps of two leads: the input of the second has a gradient."""
        found = []
        for step in range(2):
            x, target = self.tiny.batch(1, seed=step + 10 * self.runtime.dp_rank, width=self.width)
            spectral_norm.before_step(self.model)
            loss = sum(self.tiny.loss(y, target, *self.part) for y in self._leads(x, 2))
            (loss * self.runtime.gradient_scale).backward()
            spectral_norm.correct_gradients(self.model)
            found += [loss.detach(), clip_grad_norm_(self.parameters.values(), 0.3).detach()]
            self.optimizer.step(1e-2, torch.zeros(()))
            for parameter in self.parameters.values():
                parameter.grad = None
        return found

    @torch.no_grad()
    def predict(self, batch, leads):
        """A validation or forecasts, by the number of samples and of leads."""
        self.model.eval()
        x, _ = self.tiny.batch(batch, seed=5, width=self.width)
        found = [y.clone() for y in self._leads(x, leads)]
        self.model.train()
        return found

    def life(self):
        """Train, validate, make forecasts of another batch and train on."""
        found = [*self.train(), *self.predict(1, 1), *self.predict(3, 2), *self.train()]
        return found + [local(parameter).detach().clone() for parameter in self.parameters.values()]


def _life(rank, tiny, section):
    compile_unit = nn.Module.compile

    def whole_graph(module, **options):
        compile_unit(module, backend="aot_eager", fullgraph=True, **options)

    nn.Module.compile = whole_graph
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    runtime = Runtime.start(section.parallelism, torch.device("cpu"))
    with torch.compiler.set_stance("force_eager"):
        expected = _Run(tiny, section, runtime).life()
    run = _Run(tiny, section, runtime)
    got = run.life()
    stats = torch._dynamo.utils.counters["stats"]
    graphs = stats["unique_graphs"]
    run.predict(1, 1), run.predict(3, 2), run.train()  # what was compiled once is used again
    assert stats["unique_graphs"] == graphs >= 8, stats
    assert not torch._dynamo.utils.counters["graph_break"]
    return largest((a - b).norm() / max(float(b.norm()), 1e-6) for a, b in zip(got, expected, strict=True) if b.numel())


ALL = [
    ({}, True),
    ({"data": "fsdp2"}, False),
    *(({split: 2}, checkpointing) for split in ("tensor", "domain") for checkpointing in (False, True)),
    ({"domain": [1, 2]}, True),
    ({"domain": [2, 2]}, False),
]
CI = [({}, True)]


@pytest.mark.parametrize(
    ("parallelism", "checkpointing"),
    [pytest.param(*case, marks=[] if case in CI else pytest.mark.long) for case in ALL],
    ids=str,
)
def test_the_events_of_a_run_never_fall_back_to_eager(run_ranks, tiny, parallelism, checkpointing):
    section = TrainerSection.model_validate(
        {"parallelism": parallelism, "compile": True, "activation_checkpoint": checkpointing}
    )
    world = math.prod(
        math.prod(n) if isinstance(n, list) else n for n in parallelism.values() if not isinstance(n, str)
    )
    for error in run_ranks(max(world, 1 + bool(parallelism)), _life, tiny, section, timeout=3500):
        assert error < 1e-9


def _beyond_the_limit(rank, tiny):
    """The test above can fail: with torch's own limit the graphs of a run do not fit."""
    from credit_like.parallel import apply

    apply._RECOMPILE_LIMIT = 2
    _life(rank, tiny, TrainerSection.model_validate({"compile": True}))


@pytest.mark.long
def test_a_limit_that_is_too_low_is_an_error(launch_ranks, tiny):
    ((kind, message, *_),) = launch_ranks(1, _beyond_the_limit, tiny, timeout=3500)
    assert kind == "error"
    assert "recompile_limit" in message
