"""The kernels that a training step of the 1° experiment launches: a GPU that runs many small ones waits for the host.

Counted on the meta device, without compilation and in float32, as `plan` counts: each operation but views and allocations.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from credit_like.nn import spectral_norm
from credit_like.ops import wide
from credit_like.parallel.runtime import Runtime
from credit_like.plan import simulate
from credit_like.plan.machine import compute_seconds, machine_of
from credit_like.plan.meter import Meter, attention_as_on_gpu
from credit_like.plan.run import grid_of
from credit_like.schema.load import load_located
from credit_like.training import step as module
from credit_like.training.optimizers._muon import is_matrix
from tests.training.without_data import trainer_without_data

EXPERIMENT = Path(__file__).parents[2] / "config" / "era5-1deg.yml"
META = torch.device("meta")
FORWARD = {
    "CrossEmbed": 52,  # the first, whose kernels are wide; the others have 5
    "PositionTables": 52,  # of all layers of a stage
    "TransformerLayer": 42,
    "ShortAttention": 14,
    "LongAttention": 14,
    "FeedForward": 7,
    "UpBlock": 16,
    "UpHead": 6,
}
"""Kernels of one call of a part of the model."""
AROUND = {"before_step": 0, "compare": 21, "clip_grad_norm_": 14, "step": 6, "update": 1}
"""Kernels of spectral norms (by shape, below), loss with checks, clipping, AdamW and the average, of all parameters together."""
TOTAL = 3564
MILLISECONDS = (17.00, 11.09)
"""What `plan` expects an H100 to take for them, one by one and compiled."""


class _Counted:
    """Kernels of what is called while `meter` is active, by name: a list of the number of each call."""

    def __init__(self):
        self.meter, self.calls, self._began = Meter(), {}, []

    @property
    def total(self):
        return sum(self.meter.work.pieces.values())

    def begin(self, *_):
        self._began.append(self.total)

    def end(self, name):
        self.calls.setdefault(name, []).append(self.total - self._began.pop())

    def watch(self, monkeypatch, owner, attribute):
        call = getattr(owner, attribute)

        def counted(*args, **options):
            self.begin()
            result = call(*args, **options)
            self.end(attribute)
            return result

        monkeypatch.setattr(owner, attribute, counted)


def _step(monkeypatch, optimizer):
    """The model of the 1° experiment, and what its second step launches by what launches it."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())  # the meta device has none
    for name in ("SCRATCH", "ERA5"):
        monkeypatch.setenv(name, name.lower())
    found, _ = load_located(EXPERIMENT, [])
    section = found.to_dict()["trainer"] | {
        "optimizer": {"type": optimizer}, "global_batch_size": 1, "micro_batch_size": 1, "compile": False,
        "activation_checkpoint": False, "use_ema": True, "grad_max_norm": 1.0,
    }  # fmt: skip
    experiment = type(found).model_validate(found.to_dict() | {"trainer": section})
    grid, runtime = grid_of("181x360"), Runtime(device=META)
    trainer, sample = trainer_without_data(experiment, grid, runtime, simulate._materialise)
    model, sample, counted = trainer.context.stepper.model, sample.to(META), _Counted()
    monkeypatch.setattr(wide, "applies", lambda _x, weights, stride: wide.suits(weights, stride))
    with attention_as_on_gpu():
        trainer.train_step([sample], 1, 1e-3, 1)
        step = trainer.train_step
        for owner, attribute in (
            (spectral_norm, "before_step"),
            (module, "clip_grad_norm_"),
            (step, "_accumulated"),
            (step, "forward"),
            (step, "compare"),
            (step.optimizer, "step"),
            (step.ema, "update"),
        ):
            counted.watch(monkeypatch, owner, attribute)
        for part in model.modules():
            if (name := type(part).__name__) in FORWARD:
                part.register_forward_pre_hook(counted.begin)
                part.register_forward_hook(lambda *_, name=name: counted.end(name))
        with counted.meter:
            trainer.train_step([sample], 1, 1e-3, 2)
    return model, counted


def test_a_step_of_the_1_degree_experiment_launches_no_more_kernels(monkeypatch):
    model, counted = _step(monkeypatch, "adamw")
    found = {name: max(counted.calls[name]) for name in (*FORWARD, *AROUND)}
    found["backward"] = counted.calls["_accumulated"][0] - counted.calls["forward"][0]
    found["step in all"] = counted.total
    normalised = [layer for _, layer in spectral_norm.layers(model)]
    shapes = {(layer.weight.shape, layer.spectral.output_dim) for layer in normalised}
    assert len(normalised) > 4 * len(shapes)
    most = FORWARD | AROUND | {"before_step": 7 * len(shapes), "backward": 2279, "step in all": TOTAL}
    assert not {name: f"{count}, was {most[name]}" for name, count in found.items() if count > most[name]}
    planned = [
        compute_seconds(machine_of("h100", {}), counted.meter.work.pieces, compiled) for compiled in (False, True)
    ]
    assert [1e3 * seconds for seconds in planned] == pytest.approx(MILLISECONDS, rel=0.01)


@pytest.mark.slow
def test_muon_launches_few_kernels_for_each_shape(monkeypatch):
    model, counted = _step(monkeypatch, "muon")
    shapes = Counter(tuple(p.shape) for p in model.parameters() if is_matrix(p))
    assert counted.calls["step"] <= [19 * len(shapes) + 3 * shapes.total() + 20]
