"""Groups of parameters have learning rates and weight decays of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit_like.check import checked_experiment
from credit_like.errors import UserError
from credit_like.schema.load import load_experiment
from credit_like.training.groups import build_optimizer, members
from credit_like.training.optimizers import Group, adamw, muon
from tests.experiments import DEMO, SHORT, SMALL_MODEL


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 4), "a.bias": (4,), "head.weight": (3, 4), "head.bias": (3,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


@pytest.mark.parametrize("plugin", [adamw, muon])
def test_each_group_is_stepped_as_by_an_optimiser_of_its_own(plugin):
    config = plugin.Config(
        learning_rate=0.1,
        weight_decay=0.1,
        groups=[{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "learning_rate": 0.01}],
    )
    together, apart = parameters(), parameters()
    plain = plugin.Config(learning_rate=0.1, weight_decay=0.1)
    slow = plugin.Config(learning_rate=0.01, weight_decay=0.1)
    separate = [
        (1.0, plugin.build(plain, {"a.weight": apart["a.weight"]})),
        (1.0, plugin.build(plain, {name: apart[name] for name in ("a.bias", "head.bias")})),
        (0.1, plugin.build(slow, {"head.weight": apart["head.weight"]})),
    ]
    optimizer = build_optimizer(config, together)
    skip = torch.zeros(())
    for step in range(3):
        for i, name in enumerate(together):
            gradient = torch.randn(together[name].shape, generator=torch.Generator().manual_seed(10 * step + i))
            together[name].grad, apart[name].grad = gradient, gradient.clone()
        optimizer.step(0.1 / (step + 1), skip)  # a schedule
        for ratio, one in separate:
            one.step(ratio * 0.1 / (step + 1), skip)
    for name in together:
        assert torch.equal(together[name], apart[name]), name
    assert optimizer.state().keys() == together.keys()


def test_the_first_group_that_matches_has_a_parameter():
    groups = [Group(match="head.bias"), Group(match="head.*")]
    assert members(groups, ["a", "head.weight", "head.bias"]) == [["a"], ["head.bias"], ["head.weight"]]


@pytest.mark.parametrize("patterns", [["nothing.*"], ["head.*", "head.last.*"]])
def test_a_group_without_parameters_is_refused_with_its_key(tmp_path, patterns):
    groups = ", ".join(f"{{match: '{pattern}', learning_rate: 0.1}}" for pattern in patterns)
    settings = [
        *SHORT, SMALL_MODEL, "trainer.scheduler={type: constant}", f"save_loc={tmp_path}",
        "inference.init=[2000-01-12, 2000-01-12T06, 6h]", "inference.lead=12h",
        "trainer.global_batch_size=4", "trainer.micro_batch_size=1", f"trainer.optimizer.groups=[{groups}]",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=f"got {patterns[-1]}".replace("*", r"\*")):
        checked_experiment(DEMO, settings)
    config = load_experiment(DEMO, settings).trainer.optimizer
    with pytest.raises(UserError, match=f"trainer.optimizer.groups.{len(patterns) - 1}.match"):
        build_optimizer(config, {"stages.0.weight": torch.zeros(1), "head.last.weight": torch.zeros(1)})
