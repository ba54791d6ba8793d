"""The first module that makes a number infinite or NaN is named, and looking for it changes nothing in the run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from credit_like import build, cli
from credit_like.parallel.runtime import Runtime
from credit_like.schema.load import load_experiment
from credit_like.training import trainer as trainer_module
from credit_like.training.nonfinite import first_module
from tests.experiments import DEMO
from tests.faults import harness, tiny
from tests.integration.test_restart import TINY


class Backwards(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 0


class Spoiled(nn.Module):
    """A module of the model with a fault in its output or in its gradient."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x):
        y = self.inner(x)
        return Backwards.apply(y) if self.how == "gradient" else y / 0 if self.how == "infinite" else y


@pytest.fixture
def made(tmp_path):
    return tiny.trainer(tmp_path / "run")


def found(made) -> str | None:
    count = made.schedule.accumulation
    return first_module(made.train_step, made.train_loader.again(0, 0, count), 1)


def test_a_step_without_a_fault_has_no_such_module(made) -> None:
    assert found(made) is None


def test_the_module_that_makes_an_infinity_is_named(made) -> None:
    made.context.stepper.model.conv = Spoiled(made.context.stepper.model.conv, "infinite")
    assert found(made) == "output of model.conv (Spoiled), whose input is finite"


def test_a_parameter_that_is_not_finite_is_named(made) -> None:
    with torch.no_grad():
        made.context.stepper.model.head.bias[1] = torch.nan
    assert found(made) == "output of model.head (Linear), whose parameter bias is not finite"


def test_an_input_that_is_not_finite_is_not_the_fault_of_the_module(tmp_path) -> None:
    made = tiny.trainer(tmp_path / "run", poison=frozenset(range(48)))
    assert found(made) == "output of model.conv (Conv2d), whose input is not finite"


def test_a_gradient_is_followed_to_the_module_where_it_fails(made) -> None:
    made.context.stepper.model.conv = Spoiled(made.context.stepper.model.conv, "gradient")
    # The output of `inner` is the first tensor whose gradient is not finite.
    assert found(made) == "gradient at the output of model.conv.inner (Conv2d)"


def trained(made, monkeypatch, look: bool) -> dict[str, torch.Tensor]:
    """Train with an infinite target in step 2, and return the checkpoint; `look`: for the module of the skipped step."""
    inner, looked = made.train_step, []

    def spoiled(micro_batches, count, rate, number):
        if number == 2:
            micro_batches = [replace(sample, target=sample.target / 0) for sample in micro_batches]
        return inner(micro_batches, count, rate, number)

    def find(*arguments):
        looked.append(first_module(*arguments) if look else None)

    made.train_step = spoiled
    monkeypatch.setattr(trainer_module, "first_module", find)
    assert made.fit().state == "finished"
    assert looked == [
        None
    ]  # the samples are read again, without the fault: forward and backward are computed to their ends
    return harness.tensors(made.folder)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not a[name].equal(b[name])] == []


def test_looking_for_the_module_changes_no_bit_of_the_run(tmp_path, monkeypatch) -> None:
    """With the random numbers of dropout, a buffer that counts, and averaged weights."""
    runs = [trained(tiny.trainer(tmp_path / str(look), epochs=1), monkeypatch, look) for look in (True, False)]
    assert_equal(*runs)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_looking_for_the_module_changes_no_bit_of_a_real_model(tmp_path, monkeypatch, workers) -> None:
    """With the vectors of spectral norm, shifts, recomputation and samples that workers read ahead."""
    model = "model={type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 8, use_spectral_norm: true}"
    runs = []
    for look in (True, False):
        values = [
            *TINY, model, f"save_loc={tmp_path / str(look)}", "inference.init=null", "inference.lead=12h", "trainer.epochs=1",
            "trainer.batches_per_epoch=3", "trainer.shift_longitude=true", "trainer.activation_checkpoint=true",
            f"trainer.loader.num_workers={workers}",
        ]  # fmt: skip
        experiment = load_experiment(DEMO, values)
        with build.start(experiment) as runtime:
            made = build.build_trainer(build.build_context(experiment, runtime))
            runs.append(trained(made, monkeypatch, look))
    assert_equal(*runs)


def diverging(rank, world, port, save_loc, section) -> int:
    """Train with a layer of the model that returns infinity on one rank, to the last step that may be skipped."""
    from credit_like.nn.feed_forward import FeedForward

    inner = FeedForward.forward

    def forward(self, *arguments):
        y = inner(self, *arguments)
        return y / 0 if rank == section["rank"] else y

    FeedForward.forward = forward
    values = [
        f"save_loc={save_loc}", *TINY, "trainer.max_skipped=2", f"trainer.parallelism={section['layout']}",
        "inference.init=null", "inference.lead=12h",
    ]  # fmt: skip
    cli.main(["train", str(DEMO), *(part for value in values for part in ("--set", value))])
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "rank", "layout"),
    [
        (2, 1, "{data: fsdp2}"),
        *(
            pytest.param(world, world - 1, layout, marks=pytest.mark.long)
            for world, layout in [
                (2, "{data: ddp}"),
                (2, "{tensor: 2}"),
                (2, "{domain: 2}"),
                (4, "{data: fsdp2, domain: 2}"),
            ]
        ),
    ],
)
def test_the_module_is_named_in_layouts(tmp_path, world, rank, layout) -> None:
    run = tmp_path / "run"
    job = harness.Job(run, {"rank": rank, "layout": layout}, world, body=diverging)
    assert job.wait()
    said = "".join(run.with_suffix(f".{r}.out").read_text() for r in range(world))
    assert job.end() == [1] * world, said
    reason = json.loads((run / "status.json").read_text())["reason"]
    assert reason.startswith("skipped 2 steps in a row for a loss or gradient that is not finite: prediction of "), said
    assert "first module: output of model." in reason
    assert "(FeedForward), whose input is finite" in reason
    assert f"(rank {rank})" in reason


def test_no_hook_is_left(made) -> None:
    found(made)
    assert not any(module._forward_hooks for module in made.context.stepper.modules())
    assert all(parameter.grad is None for parameter in made.context.stepper.parameters())


def test_a_run_of_one_process_says_no_rank(tmp_path) -> None:
    made = tiny.trainer(tmp_path / "run", poison=frozenset(range(48)), max_skipped=1)
    outcome = made.fit()
    assert outcome.state == "failed"
    assert outcome.reason.endswith(
        "not finite: input v; first module: output of model.conv (Conv2d), whose input is not finite"
    )
    assert json.loads((tmp_path / "run" / "status.json").read_text())["reason"] == outcome.reason
    assert Runtime().gather("x") == ["x"]
