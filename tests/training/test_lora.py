"""Training with LoRA: starts as its source, trains and saves the changes alone, the same in every layout and after a restart."""

from __future__ import annotations

import pytest
import torch

from credit_like import build
from credit_like.check import checked_experiment
from credit_like.checkpoint.export import find, load_export
from credit_like.errors import UserError
from credit_like.parallel.runtime import Runtime
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, FOUR_STEPS, SHORT
from tests.training.continued import assert_same_when_continued
from tests.training.layouts import assert_exact

TINY = [
    *SHORT,
    BANDED_MODEL,
    *FOUR_STEPS,
    "trainer.optimizer.learning_rate=0.01",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("source")
    assert build.train(load_experiment(DEMO, [*TINY, f"save_loc={folder}"])) == 0
    return folder


def experiment_in(folder, source, *overrides):
    start = f"start_from={{path: {source}, lora: {{rank: 2, alpha: 4}}}}"
    return load_experiment(DEMO, [*TINY, f"save_loc={folder}", start, *overrides])


@pytest.mark.slow
def test_a_run_changes_and_saves_the_changes_alone_and_continues_bitwise(tmp_path, source):
    whole = tmp_path / "whole"
    assert_same_when_continued(lambda folder: experiment_in(folder, source), tmp_path, "ema")
    checkpoint = find(whole)
    trained_names = [*checkpoint.names("optimizer/"), *checkpoint.names("ema/")]
    assert trained_names
    assert all(".lora." in name for name in trained_names)
    before = find(source)
    average = set(before.names("ema/"))
    for name in before.names("model/"):
        ours = checkpoint.read(name)
        theirs = name.replace("model/", "ema/", 1)
        assert torch.equal(ours, before.read(theirs if theirs in average else name)), name

    # The export is a plain model that forecasts what the run does.
    context = build.build_context(experiment_in(whole, source), Runtime(), train=False)
    build.load_weights(context)
    x = torch.randn(1, context.stepper.model.in_channels, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = context.stepper.model.eval()(x), load_export(whole / "weights.safetensors").build()(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_first_forecast_is_that_of_the_source(tmp_path, source):
    made = [
        build.build_context(load_experiment(DEMO, [*TINY, f"save_loc={source}"]), Runtime(), train=False),
        build.build_context(experiment_in(tmp_path, source), Runtime()),
    ]
    build.load_weights(made[0])
    build.build_trainer(made[1]).state.start()
    x = torch.randn(1, made[0].stepper.model.in_channels, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (context.stepper.model.eval()(x) for context in made)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{rank: 2, match: [stages.7.*]}", "got stages.7.*, which matches none"),
        ("{rank: 64}", "expected at most 8"),
        ("{rank: 0}", "at least 1, got 0"),
        ("{match: []}", "expected "),
    ],
)
def test_what_does_not_fit_is_one_message(tmp_path, source, lora, message):
    inits = "inference.init={start: 2000-01-12, end: 2000-01-13, interval: 12h}"
    settings = [*TINY, inits, f"save_loc={tmp_path / 'run'}", f"start_from={{path: {source}, lora: {lora}}}"]
    with pytest.raises(UserError) as caught:
        checked_experiment(DEMO, settings)
    assert "start_from.lora" in str(caught.value)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["domain 2", "tensor 2"],
        pytest.param(["DDP 2", "FSDP2 2", "data 2 × domain 2"], marks=pytest.mark.long),
    ],
)
def test_every_layout_is_exact(tmp_path, source, names):
    assert_exact(experiment_in(tmp_path, source), names)
