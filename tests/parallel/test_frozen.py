"""What a training step sends with frozen parameters: reductions of the gradients that are taken, and of nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from credit_like import build
from credit_like.nn.lora import add_lora
from credit_like.parallel.runtime import Runtime
from credit_like.plan.meter import Meter
from credit_like.schema.load import load_experiment
from tests.experiments import DEMO, SHORT

SETTINGS = [*SHORT, "model={type: wxformer, dim_head: 8}", "trainer.device=cpu", "trainer.use_ema=true"]
SETTINGS += ["trainer.scheduler.warmup_steps=2", "trainer.global_batch_size=2", "trainer.micro_batch_size=1"]


def _reduced(rank, kind, save_loc, freeze, rank_of_lora):
    """Bytes of each kind of collective of one step, and the numbers of all and of trained parameters on all ranks."""
    experiment = load_experiment(DEMO, [*SETTINGS, f"save_loc={save_loc}", f"trainer.parallelism={{data: {kind}}}"])
    runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
    variables = build.Variables(experiment.data)
    store = build.open_store(experiment.data, variables)
    with torch.device("meta"):
        model = build.build_model(experiment, variables, store.grid.height, store.grid.width)
    if rank_of_lora:
        add_lora(model, rank_of_lora, ["*.qkv", "*.contract"])
    model = build.parallelise(model, experiment.trainer, runtime, freeze=freeze)
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad or whole) for whole in (True, False)]
    statistics = build.load_statistics(experiment, store, variables, runtime)
    context = build.attach_weights(model, experiment, runtime, variables, store, statistics)
    trainer = build.build_trainer(context)
    samples = [next(iter(trainer.stages[0].train_loader.batches(0)))]
    with Meter() as meter:
        trainer.train_step(iter(samples), 1, 1e-3, 1)
    runtime.close()
    sent: Counter = Counter()
    for message, times in meter.messages.items():
        sent[message.kind] += message.bytes * times
    return sent, *sizes


@pytest.fixture(scope="module")
def save_loc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    assert build.preprocess(load_experiment(DEMO, [*SETTINGS, f"save_loc={folder}"])) == 0
    return str(folder)


FREEZE = ("stages.*", "up1.*", "*.bias")
FEW = 4096
"""Bytes: loss, gradient norm, sums per channel, and padding of shards to equal sizes."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_frozen_parameters_are_not_reduced(run_ranks, save_loc, kind):
    reduction = {"ddp": "all-reduce", "fsdp2": "reduce-scatter"}[kind]
    for freeze, lora in (((), 0), (FREEZE, 0), ((), 2)):
        for sent, parameters, trained in run_ranks(2, _reduced, kind, save_loc, freeze, lora):
            assert 4 * trained <= sent[reduction] < 4 * trained + FEW
            if freeze or lora:
                assert trained < 0.7 * parameters
                assert sent[reduction] < 4 * parameters - FEW
