"""Members of a sample over ranks: in every layout the numbers of one process, and messages that only pass members on."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

from credit_like import verify as kit
from credit_like.losses import crps, energy, spectral_crps
from credit_like.losses import sum as sum_
from credit_like.parallel.processes import run_ranks
from credit_like.parallel.runtime import Runtime
from credit_like.schema.load import load_experiment
from credit_like.schema.trainer import Parallelism
from tests.experiments import BANDED_MODEL, DEMO, SHORT, representatives
from tests.largest import largest

SETTINGS = [
    *SHORT,
    BANDED_MODEL,
    "model.noise={channels: 3}",
    "loss={type: crps}",
    "trainer.members=4",
    "data.forecast_len=2",
]
TAME = "trainer.optimizer={type: adamw, learning_rate: 1.0e-3, eps: 1.0}"
"""With an eps far above the gradients the update is proportional to them, so it does not amplify rounding errors."""


def _case(text):
    """`fsdp2 2 4 1 1`: data mode, and the degrees of data, ensemble, tensor and domain."""
    data, *degrees = text.split()
    dp, ensemble, tensor, domain = map(int, degrees)
    return kit.Case(text, dp * ensemble * tensor * domain, data, tensor, domain, ensemble=ensemble)


LAYOUTS = [
    "none 1 2 1 1", "none 1 4 1 1", "none 1 2 1 2", "ddp 2 1 1 1", "ddp 2 2 1 1", "ddp 1 2 2 1", "ddp 1 4 1 2",
    "fsdp2 1 1 2 2", "fsdp2 1 2 1 1", "fsdp2 1 4 1 1", "fsdp2 2 2 1 1", "fsdp2 2 4 1 1", "fsdp2 1 2 2 1", "fsdp2 1 4 2 1",
    "fsdp2 1 2 1 2", "fsdp2 1 4 1 2", "fsdp2 2 2 2 1", "fsdp2 2 2 1 2", "fsdp2 1 2 2 2", "fsdp2 2 2 2 2",
]  # fmt: skip


@dataclasses.dataclass
class Compared:
    """An experiment, the numbers that one process computes of it, and the comparison with them."""

    problem: kit.Problem
    reference: Path

    def ranks(self, case):
        """Return the largest errors of any rank; none of a case that ends with a checkpoint."""
        answers = run_ranks(case.world, partial(kit._layout, self.problem, case, self.reference), 500)
        assert all(answer.state == "done" for answer in answers), answers
        errors = [answer.value["errors"] for answer in answers]
        return {what: largest(each[what] for each in errors) for what in errors[0]}


def compared(folder, *overrides):
    experiment = load_experiment(DEMO, [*SETTINGS, f"save_loc={folder}", *overrides])
    made = Compared(kit.prepare(experiment, str(folder)), folder / "reference.pt")
    [answer] = run_ranks(1, partial(kit._reference, made.problem, made.reference), 500)
    assert answer.state == "done", answer
    return made


NORMS = "model.noise={type: conditional-norm, channels: 3, correlation: 0.5}"
SUM_OF_SCORES = "loss={type: sum, terms: [{loss: {type: crps}}, {weight: 0.5, loss: {type: spectral-crps}}]}"


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """Correlated noise in norms, and a sum of scores."""
    return compared(tmp_path_factory.mktemp("norms"), TAME, NORMS, SUM_OF_SCORES)


@pytest.fixture(scope="module")
def tame(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("tame"), TAME)


@pytest.mark.slow
@pytest.mark.parametrize("name", representatives(LAYOUTS, "fsdp2 1 2 1 2"))
def test_every_layout_is_one_process(tame, name):
    """Outputs of every module, losses, every gradient and the weights of three steps of rollouts, in fp64."""
    errors = tame.ranks(_case(name))
    assert set(errors) == {"outputs", "loss", "gradients", "weights"}
    assert largest(errors.values()) < 1e-12, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    representatives(
        ["fsdp2 1 2 1 2", "fsdp2 1 2 2 1", "ddp 2 2 1 1", "none 1 1 1 2", "fsdp2 1 1 2 2", "fsdp2 1 2 2 2"],
        "fsdp2 1 2 1 2",
    ),
)
def test_noise_in_norms_is_that_of_one_process(norms, name):
    errors = norms.ranks(_case(name))
    assert set(errors) == {"outputs", "loss", "gradients", "weights"}
    assert largest(errors.values()) < 1e-12, errors


@pytest.mark.slow
@pytest.mark.long
# The compiler looks whether any tensor has a gradient, and makes instances of functions.
@pytest.mark.parametrize("way", ["compiled", "recomputed"])
@pytest.mark.parametrize("noise", ["tame", "norms"])
def test_compiled_units_and_recomputation_change_nothing(request, noise, way):
    tame = request.getfixturevalue(noise)
    case, experiment = _case("fsdp2 1 2 1 1"), tame.problem.experiment
    trainer = experiment.trainer.model_copy(update={"activation_checkpoint": way == "recomputed"})
    problem = dataclasses.replace(tame.problem, experiment=experiment.model_copy(update={"trainer": trainer}))
    other = dataclasses.replace(tame, problem=problem)
    errors = other.ranks(dataclasses.replace(case, compiled=way == "compiled"))
    assert errors.keys() >= {"outputs", "loss", "gradients", "weights"}
    assert largest(errors.values()) < 1e-12, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "continued", representatives(["none 1 1 1 1", "none 1 4 1 1", "fsdp2 2 2 1 1"], "none 1 4 1 1")
)
def test_a_run_goes_on_in_another_layout(tame, tmp_path, continued):
    """Two steps with the members on two ranks and the third one elsewhere; the noise of a step is the same everywhere."""
    saved = dataclasses.replace(_case("fsdp2 1 2 1 1"), steps=(0, 2), folder=str(tmp_path))
    assert tame.ranks(saved) == {}
    errors = tame.ranks(dataclasses.replace(_case(continued), steps=(2, 3), folder=str(tmp_path)))
    assert set(errors) == {"outputs", "loss", "weights"}
    assert largest(errors.values()) < 1e-12, errors


@pytest.mark.slow
@pytest.mark.long
def test_adamw_amplifies_rounding_alone(tmp_path):
    """AdamW divides gradients by their own size: where they are near 0, rounding errors become visible in the weights."""
    made = compared(tmp_path)
    errors = made.ranks(_case("fsdp2 1 4 1 1"))
    rounded = [run_ranks(1, partial(kit._rounded, made.problem, made.reference, n), 500)[0].value for n in range(3)]
    assert errors.pop("weights") < kit.GROWTH * max(each["weights"] for each in rounded)
    assert largest(errors.values()) < 1e-11, errors


SUM = sum_.Config.model_validate({"terms": [{"loss": {"type": "crps"}}, {"weight": 2, "loss": {"type": "energy"}}]})
LOSSES = ((crps, crps.Config()), (energy, energy.Config()), (spectral_crps, spectral_crps.Config()), (sum_, SUM))


def _parts(rank, error_BKCHW):
    runtime = Runtime.start(Parallelism(ensemble=4), torch.device("cpu"))
    members, found = runtime.members(error_BKCHW.shape[1]), []
    for loss, config in LOSSES:
        own = error_BKCHW[:, members.start : members.stop].clone().requires_grad_()
        part = loss.of_members(config, own, runtime.from_other_members(own))
        part.sum().backward()
        found.append((part.detach(), own.grad))
    return found


def test_the_parts_of_ranks_add_up_to_the_score_and_their_gradients_are_its_own(run_ranks):
    error = torch.randn(2, 8, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error[0] = error[0].round()  # members that are equal, or equal to the truth
    for (loss, config), *of_ranks in zip(LOSSES, *run_ranks(4, _parts, error), strict=True):
        whole = error.clone().requires_grad_()
        score = loss.of_members(config, whole)
        score.sum().backward()
        parts, gradients = zip(*of_ranks, strict=True)
        torch.testing.assert_close(sum(parts), score.detach(), rtol=0, atol=1e-14)
        torch.testing.assert_close(torch.cat(gradients, 1), whole.grad, rtol=0, atol=1e-14)


def test_verify_compares_layouts_of_the_ensemble_where_there_are_members():
    assert kit.cases_of(load_experiment(DEMO, SHORT)) == kit.CASES
    added = kit.cases_of(load_experiment(DEMO, [*SETTINGS, "trainer.members=9"]))[len(kit.CASES) :]
    assert [(case.ensemble, case.domain, case.world) for case in added] == [(3, 1, 3), (3, 2, 6), (3, (1, 2), 6)]
