"""What a training step sends with frozen parameters: reductions of the gradients that are taken, and of nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor

from credit_like import build
from credit_like.nn.lora import add_lora
from credit_like.parallel.apply import freeze_parameters
from credit_like.parallel.runtime import Runtime
from credit_like.plan.meter import Meter
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, SHORT, representatives

SETTINGS = [*SHORT, BANDED_MODEL, "trainer.device=cpu", "trainer.use_ema=true"]
SETTINGS += ["trainer.scheduler.warmup_steps=2", "trainer.global_batch_size=2", "trainer.micro_batch_size=1"]


LAYOUTS = {
    "ddp": ("{data: ddp}", "all-reduce"),
    "fsdp2": ("{data: fsdp2}", "reduce-scatter"),
    "domain": ("{data: none, domain: 2}", "all-reduce"),
    "fsdp2 of a domain": ("{data: fsdp2, domain: 2}", "reduce-scatter"),
    "columns": ("{data: fsdp2, domain: [1, 2]}", "reduce-scatter"),
    "tensor": ("{data: none, tensor: 2}", "all-reduce"),
}
"""The two ranks, and the collective by which they sum gradients."""


def _reduced(rank, kind, save_loc, freeze, rank_of_lora):
    """Bytes of each kind of collective of one step, and the numbers of all, of trained and of trained parameters held alike."""
    experiment = load_experiment(DEMO, [*SETTINGS, f"save_loc={save_loc}", f"trainer.parallelism={LAYOUTS[kind][0]}"])
    runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
    variables = build.Variables(experiment.data)
    store = build.open_store(experiment.data, variables)
    with torch.device("meta"):
        model = build.build_model(experiment, variables, store.grid.height, store.grid.width)
    if rank_of_lora:
        add_lora(model, rank_of_lora, ["*.qkv", "*.contract"])
    freeze_parameters(model, freeze)
    model = build.parallelise(model, experiment.trainer, runtime)
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad or whole) for whole in (True, False)]
    statistics = build.load_statistics(experiment, store, variables, runtime)
    context = build.attach_weights(model, experiment, runtime, variables, store, statistics)
    trainer = build.build_trainer(context)
    alike = sum(p.numel() for p in trainer.state.trained.values() if not isinstance(p, DTensor))
    sent = _sent(trainer)
    runtime.close()
    return sent, *sizes, alike


def _sent(trainer):
    """Bytes of each kind of collective of one step."""
    samples = [next(iter(trainer.stages[0].train_loader.batches(0)))]
    with Meter() as meter:
        trainer.train_step(iter(samples), 1, 1e-3, 1)
    sent: Counter = Counter()
    for message, times in meter.messages.items():
        sent[message.kind] += message.bytes * times
    return sent


def _reduced_in_phases(rank, kind, save_loc, phases, amp):
    """Bytes of each kind of collective of one step of each phase, and the numbers of its trained parameters on this rank."""
    settings = [*SETTINGS, f"save_loc={save_loc}", f"trainer.parallelism={LAYOUTS[kind][0]}", f"trainer.amp={amp}"]
    experiment = load_experiment(DEMO, [*settings, f"trainer.phases={phases}"])
    runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
    trainer = build.build_trainer(build.build_context(experiment, runtime))
    found = []
    for stage in trainer.stages:
        trainer._enter(stage)
        found.append((_sent(trainer), sum(p.numel() for p in trainer.state.trained.values())))
    runtime.close()
    return found


@pytest.fixture(scope="module")
def save_loc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    assert build.preprocess(load_experiment(DEMO, [*SETTINGS, f"save_loc={folder}"])) == 0
    return str(folder)


FREEZE = ("stages.*", "up1.*", "*.bias")
FEW = 4096
"""Bytes: loss, gradient norm, sums per channel, and padding of shards to equal sizes."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", representatives([k for k in LAYOUTS if k != "tensor"], "ddp", "fsdp2"))
def test_frozen_parameters_are_not_reduced(run_ranks, save_loc, kind):
    reduction = LAYOUTS[kind][1]
    for freeze, lora in (((), 0), (FREEZE, 0), ((), 2)):
        for sent, parameters, trained, _ in run_ranks(2, _reduced, kind, save_loc, freeze, lora):
            assert 4 * trained <= sent[reduction] < 4 * trained + FEW
            if freeze or lora:
                assert trained < 0.7 * parameters
                assert sent[reduction] < 4 * parameters - FEW


@pytest.mark.slow
def test_tensor_ranks_align_the_gradients_of_trained_parameters_alone(run_ranks, save_loc):
    """The rest of what they send are sums of activations, of which frozen first stages need no gradients."""
    every, some, changes = (
        run_ranks(2, _reduced, "tensor", save_loc, freeze, lora)[0] for freeze, lora in (((), 0), (FREEZE, 0), ((), 2))
    )
    for sent, _, _, alike in (some, changes):
        assert every[0]["all-reduce"] - sent["all-reduce"] >= 4 * (every[3] - alike) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "amp"), [("ddp", "false"), ("fsdp2", "false"), ("fsdp2", "true")])
def test_parameters_that_a_phase_freezes_are_not_reduced_in_it(run_ranks, save_loc, kind, amp):
    """Whichever the phase before it trained; under FSDP2 some units have no trained parameter in the first forward."""
    reduction = LAYOUTS[kind][1]
    phases = f"[{{freeze: {list(FREEZE)}}}, {{freeze: []}}, {{freeze: {list(FREEZE)}}}]"
    for found in run_ranks(2, _reduced_in_phases, kind, save_loc, phases, amp):
        numbers = [trained for _, trained in found]
        assert numbers[0] == numbers[2] < 0.7 * numbers[1]
        for sent, trained in found:
            assert 4 * trained <= sent[reduction] < 4 * trained + FEW
