"""Members of an ensemble in training: their noise and trajectories, what is refused, restart and every layout."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from credit_like import build
from credit_like.losses import crps
from credit_like.losses._mean import AreaLoss
from credit_like.nn.noise import Noise, NoiseKeys
from credit_like.parallel.runtime import Runtime
from credit_like.schema.checks import section_findings
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, FOUR_STEPS, SHORT
from tests.training.continued import assert_same_when_continued
from tests.training.layouts import SOME_AND_ALL, assert_exact

TINY = [
    *SHORT,
    BANDED_MODEL,
    *FOUR_STEPS,
    "model.noise={channels: 3}",
    "loss={type: crps}",
    "trainer.members=3",
    "data.forecast_len=2",
]


def experiment_in(folder, *overrides):
    return load_experiment(DEMO, [*TINY, f"save_loc={folder}", *overrides])


def stir(model):
    """Give every layer of noise weights other than 0."""
    for module in model.modules():
        if isinstance(module, Noise):
            module.weight.data.normal_(std=0.2, generator=torch.Generator().manual_seed(module.level))


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    context = build.build_context(experiment_in(tmp_path_factory.mktemp("run")), Runtime())
    stir(context.stepper.model)
    context.stepper.eval()
    return context


def sample_of(context):
    return next(iter(build.build_loader(context, context.experiment.data.valid, False).batches(0)))


@torch.no_grad()
def test_each_member_keeps_its_own_trajectory(context):
    """A rollout of all members is that of each one alone: its own noise, its own state, the sample's forcing."""
    sample, stepper = sample_of(context), context.stepper.double()
    together = [prediction for prediction, _ in stepper.predict_sample(sample, members=3)]
    for member in range(3):
        state = stepper.initial(sample.prognostic, sample.index, torch.full_like(sample.index, member))
        for lead, after in enumerate(stepper.rollout(state, sample.forcing, 2)):
            of_member = together[lead].unflatten(0, (-1, 3))[:, member]
            assert float(((of_member - stepper.outputs(after)) / stepper.std).abs().max()) < 1e-11
    spread = together[1].unflatten(0, (-1, 3)).std(1)
    assert float(spread.flatten(2).mean(-1).min()) > 0
    stepper.float()


@torch.no_grad()
def test_copies_of_the_fields_for_the_members_are_freed_with_the_first_step(context, monkeypatch):
    """A deterministic step has the sample and no copy: what members keep of it must not exceed that of as many samples."""
    sample, stepper = sample_of(context), context.stepper
    copies, initial = [], stepper.initial

    def noted(prognostic, index, member=None):
        state = initial(prognostic, index, member)
        copies.extend(map(weakref.ref, (prognostic, state.prognostic)))
        return state

    monkeypatch.setattr(stepper, "initial", noted)
    states = stepper.predict_sample(sample, members=3)
    next(states)
    assert [copy() for copy in copies] == [None, None]
    states.close()


@pytest.mark.parametrize("weighted", [True, False])
@torch.no_grad()
def test_the_loss_is_the_crps_of_the_members_and_validation_scores_their_mean(context, weighted):
    """The scores are means over area, also where the loss counts every point alike."""
    config = context.experiment.loss.model_copy(update={"latitude_weights": weighted})
    context = dataclasses.replace(context, experiment=context.experiment.model_copy(update={"loss": config}))
    experiment, stepper = context.experiment, context.stepper
    trainer = build.build_trainer(context)
    sample = sample_of(context)
    row = trainer.validation._made()([sample], lambda: False)
    loss = AreaLoss(experiment.loss, context.variables, context.statistics, context.store.grid)
    leads = list(stepper.predict_sample(sample, members=3))
    assert row["valid_loss"] == pytest.approx(sum(float(loss(*lead)) for lead in leads) / 2, rel=1e-5)
    prediction, target = leads[0]
    error = (prediction.unflatten(0, (-1, 3)).mean(1) - target).square()
    rows = torch.from_numpy(context.store.grid.latitude_weights())[:, None]
    assert list(row["rmse"].values()) == pytest.approx((error * rows).mean((0, 2, 3)).sqrt().tolist(), rel=1e-5)


def test_noise_changes_with_the_step_and_is_that_of_the_seed_between_steps(context, monkeypatch):
    trainer, sample = build.build_trainer(context), sample_of(context)
    keys, of_noise = [], NoiseKeys.forward

    def forward(self, index, member):
        keys.append(of_noise(self, index, member))
        return keys[-1]

    monkeypatch.setattr(NoiseKeys, "forward", forward)
    for step in (1, 2, 1):
        trainer.train_step([sample], 1, 0.0, step)
        list(context.stepper.predict_sample(sample, members=3))
    first, between, second, after, again, _ = keys
    assert torch.equal(first, again)
    assert torch.equal(between, after)
    assert len(torch.cat([first, second, between]).unique()) == 3 * len(first)


def wrong(*overrides, world=1):
    experiment = load_experiment(DEMO, [*TINY, *overrides])
    return [(".".join(map(str, place)), message) for place, message in section_findings(experiment, world)]


def test_what_cannot_be_trained_is_one_message():
    assert not wrong()
    [(place, message)] = wrong("model.noise=null")
    assert place == "trainer.members"
    assert "expected a model with noise for 3 members, got none" in message
    [(place, message)] = wrong("loss={type: mae}")
    assert place == "loss.type"
    assert "expected a loss of ensembles for 3 members, got mae" in message
    [(place, message)] = wrong("trainer.members=1")
    assert place == "trainer.members"
    assert "expected at least 2 members for the loss crps, got 1" in message


def test_terms_of_a_sum_are_all_of_ensembles_or_none():
    both = "loss={type: sum, terms: [{loss: {type: crps}}, {loss: {type: %s}}]}"
    assert not wrong(both % "spectral-crps")
    [(place, message)] = wrong(both % "mse")
    assert place == "loss.terms"
    assert "expected terms that all are losses of ensembles or none, got 1 of 2" in message


def test_members_that_ranks_cannot_share_are_one_message():
    assert not wrong("trainer.parallelism.ensemble=3", world=3)
    [(place, message)] = wrong("trainer.parallelism.ensemble=2", world=2)
    assert place == "trainer.parallelism.ensemble"
    assert message == "expected a divisor of trainer.members = 3, got 2, change it to one of 1, 3"
    for loss in ("crps", "mse"):
        [(place, message)] = wrong(
            "trainer.members=1", f"loss={{type: {loss}}}", "trainer.parallelism.ensemble=2", world=2
        )
        assert place == "trainer.parallelism.ensemble"
        assert message == "expected a divisor of trainer.members = 1, got 2, set trainer.members or remove it"
    [(place, message)] = wrong("trainer.parallelism.ensemble=3", world=4)
    assert place == "trainer.parallelism"
    assert "ensemble × tensor × domain = 3 × 1 × 1 = 3 divides, got 4" in message


def test_a_loss_that_needs_all_members_at_once_is_refused_on_several_ranks(monkeypatch):
    monkeypatch.setattr(crps, "of_members", lambda config, error_BKCHW: error_BKCHW.abs().mean(1))
    assert not wrong()
    [(place, message)] = wrong("trainer.parallelism.ensemble=3", world=3)
    assert place == "trainer.parallelism.ensemble"
    assert "expected 1 with the loss crps, whose of_members has no argument `others`, got 3" in message


def test_members_change_with_the_phase(tmp_path):
    """A phase of one member on a deterministic loss, then one of two on the score of ensembles."""
    phases = "trainer.phases=[{epochs: 1, members: 1, loss: {type: mse}}, {epochs: 1, members: 2, micro_batch_size: 1}]"
    experiment = experiment_in(tmp_path, phases, "trainer.epochs=1", "data.forecast_len=1")
    trainer = build.build_trainer(build.build_context(experiment, Runtime()))
    seen = []
    trainer.context.stepper.register_forward_hook(lambda module, inputs, after: seen.append(len(after.index)))
    for stage in trainer.stages:
        trainer._enter(stage)
        trainer.train_step([next(stage.train_loader.batches(0))], 1, 0.0, 1)
        trainer.validation._made()([next(stage.valid_loader.batches(0))], lambda: False)
    assert seen == [2, 2, 2, 2]  # 2 samples of 1 member, then 1 sample of 2


def test_forecasts_do_not_use_the_axis_of_the_ensemble(tmp_path, monkeypatch):
    """They are shared by initial time: two processes of a training with two ranks of an ensemble are two replicas."""
    started = []
    monkeypatch.setattr(Runtime, "start", lambda *arguments: started.append(arguments[0].ensemble) or Runtime())
    monkeypatch.setenv("WORLD_SIZE", "3")
    experiment = experiment_in(tmp_path, "trainer.parallelism={data: ddp, ensemble: 3}")
    for training in (True, False):
        build.start(experiment, training)
    assert started == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["norms", *(pytest.param(way, marks=pytest.mark.long) for way in ("plain", "accumulated"))]
)
def test_a_continued_run_is_bitwise_that_of_one_start(tmp_path, way):
    more = {
        "plain": [],
        "norms": ["model.noise={type: conditional-norm, channels: 3, correlation: 0.5}"],
        "accumulated": ["trainer.micro_batch_size=1", "trainer.activation_checkpoint=true"],
    }[way]
    losses, weights = assert_same_when_continued(lambda folder: experiment_in(folder, *more), tmp_path, "ema")
    assert len(losses) == 4
    first = next(name for name in weights if "noise." in name)
    assert float(weights[first].abs().max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("names", SOME_AND_ALL)
def test_every_layout_is_exact(tmp_path, names):
    assert_exact(experiment_in(tmp_path), names)
