"""Exhausted memory: the message has the figures of the plan, and names what takes less."""

from __future__ import annotations

import json

import pytest
import torch

from credit_like import cli
from credit_like.errors import RunError
from credit_like.parallel.runtime import Runtime
from credit_like.plan import advice as advice_module
from credit_like.plan.advice import advice, changes
from credit_like.plan.run import grid_of
from credit_like.schema.load import load_experiment
from credit_like.training import memory
from credit_like.training.memory import memory_explained
from tests.experiments import DEMO
from tests.integration.test_restart import TINY

EXHAUSTED = {"host": MemoryError(), "allocator": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
             "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")}  # fmt: skip


def experiment(folder, *values):
    return load_experiment(DEMO, [*TINY, "inference.init=null", "inference.lead=12h", f"save_loc={folder}", *values])


@pytest.mark.parametrize("error", EXHAUSTED.values(), ids=EXHAUSTED)
def test_exhausted_memory_is_explained_by_the_plan(tmp_path, monkeypatch, error) -> None:
    monkeypatch.setattr(memory, "_planned", lambda experiment, runtime, grid: f"planned for {runtime.world} on {grid}")
    with pytest.raises(RunError, match=r"^out of memory: .*; planned for 1 on 32x64$"):  # noqa: SIM117
        with memory_explained(experiment(tmp_path), Runtime(), 32, 64, tmp_path):
            raise error


def test_allocations_on_a_gpu_are_recorded_without_tracebacks_unless_asked_for(tmp_path, monkeypatch) -> None:
    recorded = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **options: recorded.append(options))
    for wanted in ("", "1"):
        monkeypatch.setenv("CREDIT_LIKE_MEMORY_STACKS", wanted)
        with memory_explained(experiment(tmp_path), Runtime(device=torch.device("cuda")), 32, 64, tmp_path):
            pass
    assert [options.get("context") for options in recorded[::2]] == [None, "state"]
    assert recorded[1::2] == [{"enabled": None}] * 2  # and it ends with the training


def test_other_errors_stay_what_they_are(tmp_path) -> None:
    for error in (RuntimeError("shape"), KeyError("memory")):
        with pytest.raises(type(error)), memory_explained(experiment(tmp_path), Runtime(), 32, 64, tmp_path):
            raise error


def test_only_what_can_be_changed_is_proposed(tmp_path) -> None:
    small = experiment(tmp_path, "trainer.micro_batch_size=1", "trainer.activation_checkpoint=true")
    assert list(changes(small)) == []
    large = experiment(
        tmp_path, "trainer.global_batch_size=12", "trainer.micro_batch_size=12", "data.forecast_len=3",
        "trainer.parallelism={data: ddp}",
    )  # fmt: skip
    assert [text for text, _ in changes(large)] == [
        "trainer.micro_batch_size: 6", "trainer.activation_checkpoint: true", "trainer.backprop_steps: 1",
        "trainer.parallelism.data: fsdp2",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_the_changes_that_save_most_come_first(tmp_path) -> None:
    """Their figures are those of the plans of the changed experiments."""
    given = experiment(tmp_path, "trainer.global_batch_size=4", "trainer.micro_batch_size=4")
    grid = grid_of("32x64")
    said = advice(given, 1, grid).split("; ")
    assert said[0].startswith("by `plan`, a step takes ")
    sizes = {text: advice_module._planned(changed, 1, grid, True, {}).fullest.peak for text, changed in changes(given)}
    assert said[1:] == [
        f"{advice_module._size(size)} with {text}" for text, size in sorted(sizes.items(), key=lambda s: s[1])
    ]


@pytest.mark.slow
@pytest.mark.long
def test_a_training_that_runs_out_of_memory_says_what_takes_less(tmp_path, monkeypatch, capsys) -> None:
    from credit_like.training.step import TrainStep

    def exhausted(self, *arguments):
        raise EXHAUSTED["gpu"]

    monkeypatch.setattr(TrainStep, "forward", exhausted)
    monkeypatch.setattr(memory, "_PATIENCE", 900.0)  # on a busy machine the plan takes longer
    values = [
        *TINY,
        "inference.init=null",
        "inference.lead=12h",
        f"save_loc={tmp_path / 'run'}",
        "trainer.micro_batch_size=4",
    ]
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(DEMO), *(part for value in values for part in ("--set", value))])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.count("out of memory: ") == 1, said
    assert "with trainer.micro_batch_size: 2" in said
    assert json.loads((tmp_path / "run" / "status.json").read_text())["reason"] in said
