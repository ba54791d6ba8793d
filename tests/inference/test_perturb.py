"""Perturbations of initial states by random fields."""

from __future__ import annotations

import copy

import pytest
import torch
from world import make_context, make_experiment

from credit_like.inference.perturb import perturbations
from credit_like.schema.inference import Ensemble


def test_noise_depends_on_seed_member_and_time_alone(data, tmp_path):
    experiment = make_experiment(data, tmp_path)
    context = make_context(experiment)
    store, variables, statistics = context.store, context.variables, context.statistics
    ensemble = Ensemble(members=4, amplitude={"u": 0.5}, seed=3)
    perturb = perturbations(ensemble, variables, statistics, store)
    zero = torch.zeros(3, variables.n("prognostic"), store.grid.height, store.grid.width)
    together = perturb([0, 2, 3])(zero, [5, 5, 9])
    assert (together[0] == 0).all(), "member 0 is the control"
    assert torch.equal(perturb([2])(zero[:1], [5])[0], together[1])
    assert not torch.equal(perturb([2])(zero[:1], [9])[0], together[1])
    _, _, change = statistics.select(variables.role("prognostic"))
    u, others = together[1:, :2], together[1:, 2:]
    assert (others == 0).all()
    assert 0.3 < float((u.std((-1, -2)) / torch.tensor(0.5 * change[:2])).mean()) < 2
    whole = perturb([2])(zero[:1], [5])
    part = perturbations(ensemble, variables, statistics, store, slice(2, 5))([2])(zero[:1, :, 2:5], [5])
    assert torch.equal(part, whole[:, :, 2:5]), "a rank's rows are those of the whole field"
    other = copy.copy(store)
    again = perturbations(ensemble, variables, statistics, other)([2])
    other.seconds = store.seconds[3:]
    assert torch.equal(again(zero[:1], [2]), whole), "data that begin later"
    other.seconds = store.seconds - 50 * 365 * 86400
    assert not torch.equal(again(zero[:1], [5]), whole), "another year, before 1970"


def test_amplitude_of_an_unknown_variable_is_refused(data, tmp_path):
    experiment = make_experiment(data, tmp_path)
    context = make_context(experiment)
    store, variables, statistics = context.store, context.variables, context.statistics
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        perturbations(Ensemble(members=2, amplitude={"temperatur": 1}), variables, statistics, store)
