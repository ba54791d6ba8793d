"""A phase trains the parameters that it does not freeze, and no others, wherever the run is interrupted and in every layout."""

from __future__ import annotations

import pytest
import torch

from credit_like import build
from credit_like.check import checked_experiment
from credit_like.checkpoint.manager import steps
from credit_like.errors import UserError
from credit_like.nn import spectral_norm
from credit_like.schema.errors import ExperimentError
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, SHORT, representatives
from tests.faults import harness, tiny
from tests.faults.harness import at, begun, last_steps

PHASES = [
    {"epochs": 1, "freeze": ["conv.*"]},
    {"epochs": 1},
    {"epochs": 1, "freeze": ["head.*", "conv.bias"], "use_ema": True},
]
SECTION = {"phases": PHASES, "ema_decay": 0.5, "checkpoint": {"every": 1, "keep": 1000, "async": False}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is never interrupted, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("frozen") / "whole"
    assert tiny.trainer(folder, **SECTION).fit().state == "finished"
    return folder


def changed(folder, first, last):
    """Names of the parameters that differ between two checkpoints."""
    a, b = at(folder, first), at(folder, last)
    return {
        name.removeprefix("model/")
        for name in a.names("model/")
        if name != "model/calls" and not torch.equal(a.read(name), b.read(name))
    }


def test_each_phase_changes_what_it_trains_alone(whole) -> None:
    first, second, last = last_steps(whole)
    assert changed(whole, 1, first) == {"head.weight", "head.bias"}
    assert changed(whole, first, second) == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    assert changed(whole, second, last) == {"conv.weight"}


def test_what_is_frozen_has_no_optimiser_state(whole) -> None:
    found = [{name.split("/", 2)[2] for name in at(whole, step).names("optimizer/")} for step in last_steps(whole)]
    every = {"conv.weight", "conv.bias", "head.weight", "head.bias", "never"}
    assert found == [every - {"conv.weight", "conv.bias"}, every, every - {"head.weight", "head.bias", "conv.bias"}]


def test_the_average_of_what_is_frozen_goes_on(whole) -> None:
    """It follows the weights that another phase has trained; computed here from the checkpoints of all steps."""
    _, second, last = last_steps(whole)
    for name in ("conv.weight", "head.weight", "head.bias"):
        average = at(whole, second).read(f"ema/{name}")
        for step in range(second + 1, last + 1):
            average = torch.lerp(average, at(whole, step).read(f"model/{name}"), 1 - min(0.5, (1 + step) / (10 + step)))
            torch.testing.assert_close(at(whole, step).read(f"ema/{name}"), average, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("phase", "after"), [(0, 0), (0, 1), (1, 0), (1, -1), (1, 1)])
def test_a_crash_near_a_boundary_goes_on_bitwise(whole, tmp_path, phase, after) -> None:
    folder = begun(whole, tmp_path / "run", last_steps(whole)[phase] + after)
    assert tiny.trainer(folder, **SECTION).fit().state == "finished"
    harness.assert_same(folder, whole)


def test_a_phase_may_be_added_that_trains_what_was_frozen(tmp_path, caplog) -> None:
    """The average of these parameters starts from their weights, that of the others goes on."""
    frozen, every = {"epochs": 1, "freeze": ["conv.*"], "use_ema": True}, {"epochs": 1, "use_ema": True}
    section = {**SECTION, "phases": [frozen]}
    assert tiny.trainer(tmp_path, **section).fit().state == "finished"
    before = steps(tmp_path / "checkpoints")[-1]
    assert "ema/conv.weight" not in at(tmp_path, before).names("")
    with caplog.at_level("INFO"):
        assert tiny.trainer(tmp_path, **{**section, "phases": [frozen, every]}).fit().state == "finished"
    first = at(tmp_path, before + 1)
    for name, was in (("conv.weight", "model/conv.weight"), ("head.weight", "ema/head.weight")):
        average = (
            at(tmp_path, before).read(was).lerp(first.read(f"model/{name}"), 1 - min(0.5, (2 + before) / (11 + before)))
        )
        torch.testing.assert_close(first.read(f"ema/{name}"), average, rtol=1e-6, atol=1e-7)
    assert "no averaged weights of 2 parameters that no phase trained before" in caplog.text


LAYOUT_PHASES = (
    "[{epochs: 1, freeze: ['stages.0.*', '*.bias']}, {epochs: 1}, {epochs: 1, freeze: ['stages.1.*', 'head.*']}]"
)


def in_layout(rank, folder, parallelism, phases=LAYOUT_PHASES):
    """Train six steps in three phases, with spectral norm and a checkpoint of every step."""
    settings = [
        *SHORT,
        BANDED_MODEL,
        "trainer={global_batch_size: 4, micro_batch_size: 2, batches_per_epoch: 2, device: cpu, use_ema: true}",
        "trainer.checkpoint={every: 1, keep: 10, async: false}",
        "trainer.scheduler.warmup_steps=0",
        f"trainer.phases={phases}",
        f"trainer.parallelism={parallelism}",
        f"save_loc={folder}",
    ]
    return build.train(load_experiment(DEMO, settings))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert in_layout(0, folder, "{}") == 0
    return folder


def state_of(folder, step):
    checkpoint = at(folder, step)
    return {name: checkpoint.read(name) for name in checkpoint.names("")}


@pytest.mark.slow
def test_what_is_never_trained_goes_on_bitwise_too(tmp_path) -> None:
    """Its singular vectors stay as they are at the start, where they come from no checkpoint."""
    phases = "[{epochs: 1, freeze: ['stages.*']}, {epochs: 1, freeze: ['stages.*', 'head.*']}]"
    assert in_layout(0, tmp_path / "whole", "{}", phases) == 0
    assert not any(name.startswith("ema/stages.") for name in at(tmp_path / "whole", 4).names(""))
    assert in_layout(0, begun(tmp_path / "whole", tmp_path / "run", 1), "{}", phases) == 0
    harness.assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_layer_is_frozen_with_the_sigma_of_its_newest_weights(tmp_path) -> None:
    """A restart computes it from them, and a training step from those before its update."""
    settings = [
        *SHORT,
        BANDED_MODEL,
        "trainer={device: cpu, global_batch_size: 1, micro_batch_size: 1}",
        f"save_loc={tmp_path}",
    ]
    settings += ["trainer.phases=[{epochs: 1}, {epochs: 1, freeze: ['stages.*']}]", "trainer.scheduler.warmup_steps=0"]
    experiment = load_experiment(DEMO, settings)
    with build.start(experiment) as runtime:
        trainer = build.build_trainer(build.build_context(experiment, runtime))
        trainer.train_step(trainer.train_loader.batches(0), 1, 1e-2, 1)
        trainer._enter(trainer.stages[1])
        layers = dict(spectral_norm.layers(trainer.state.model))
        found = {name: layer.spectral.inv_sigma.clone() for name, layer in layers.items()}
        spectral_norm.refresh(trainer.state.model)
        assert any(name.startswith("stages.") for name in found)
        assert [name for name in found if not torch.equal(found[name], layers[name].spectral.inv_sigma)] == []


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("freeze: ['nothing.*']", "trainer.freeze: expected patterns of names of parameters"),
        ("freeze: ['*']", "trainer.freeze: expected patterns that leave some parameters to train"),
        ("phases: [{epochs: 1}, {freeze: ['nothing.*']}]", "trainer.phases.1.freeze: expected patterns of names"),
        ("phases: [{epochs: 1}, {freeze: ['*']}]", "trainer.phases.1.freeze: expected patterns that leave some"),
        (
            "phases: [{freeze: ['head.*'], optimizer: {groups: [{match: 'head.*', learning_rate: 0.1}]}}]",
            "trainer.phases.0.optimizer.groups: expected a pattern of trained parameters",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, section, told) -> None:
    inference = ("inference.init=2000-01-12", "inference.lead=24h")
    settings = [
        *SHORT,
        BANDED_MODEL,
        *inference,
        f"save_loc={tmp_path / 'run'}",
        f"trainer={{device: cpu, scheduler: {{warmup_steps: 1}}, {section}}}",
    ]
    with pytest.raises(ExperimentError) as refused:
        checked_experiment(DEMO, settings)
    assert told in str(refused.value)
    with pytest.raises(UserError):
        build.train(load_experiment(DEMO, settings))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallelism",
    representatives(["{data: fsdp2}", "{data: ddp}", "{tensor: 2}", "{domain: 2}"], "{domain: 2}"),
)
def test_every_layout_trains_the_same_and_goes_on_bitwise(one_process, run_ranks, tmp_path, parallelism):
    whole = tmp_path / "whole"
    assert run_ranks(2, in_layout, whole, parallelism) == [0, 0]
    rows, expected = ([row for row in harness.rows(folder) if "loss" in row] for folder in (whole, one_process))
    for key in ("loss", "grad_norm"):  # of the trained parameters alone
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-3)
    for step in (2, 4, 6):
        names = [
            {name for name in at(folder, step).names("") if not name.startswith("random/")}
            for folder in (whole, one_process)
        ]
        assert names[0] == names[1]
    moved = [changed(whole, *steps) for steps in ((1, 2), (2, 4), (4, 6))]
    assert not any(name.startswith("stages.0.") or name.endswith(".bias") for name in moved[0])
    assert not any(name.startswith(("stages.1.", "head.")) for name in moved[2])
    assert all(any(name.startswith("stages.0.") for name in names) for names in moved[1:])
    for step in (2, 5):
        folder = begun(whole, tmp_path / f"from-{step}", step)
        assert run_ranks(2, in_layout, folder, parallelism) == [0, 0]
        expected, found = state_of(whole, 6), state_of(folder, 6)
        assert expected.keys() == found.keys()
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
