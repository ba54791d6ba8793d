"""Copies of a parameter on tensor ranks: kept equal where kernels round differently, and compared before a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit_like.grid import Grid
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, whole
from credit_like.parallel.tensor_copies import check_copies
from credit_like.schema.experiment import Experiment
from tests.training.without_data import trainer_without_data

GRID = Grid(90 - (np.arange(32) + 0.5) * 180 / 32, np.arange(64) * 360 / 64)


def _trainer(data, folder):
    experiment = Experiment.model_validate(
        {
            "name": "small",
            "save_loc": str(folder),
            "data": {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "prognostic": {"surface": ["a", "b"]},
                "train": ["2000-01-01", "2000-01-05"],
                "valid": ["2000-01-06", "2000-01-07"],
                "test": ["2000-01-08", "2000-01-09"],
            },
            "model": {"type": "wxformer", "dim": [8, 16, 32, 64], "depth": [1, 1, 1, 1], "dim_head": 4},
            "trainer": {
                "parallelism": {"data": data, "tensor": 2},
                "global_batch_size": 2,
                "scheduler": {"type": "linear-warmup-cosine", "warmup_steps": 0},
            },
        }
    )
    runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
    trainer, sample = trainer_without_data(experiment, GRID, runtime)
    torch.manual_seed(runtime.dp_rank)
    for fields in (sample.prognostic, sample.target):
        fields.normal_()
    return trainer, sample


def _rounded_differently(rank, data, folder):
    """Two steps in which every gradient of a tensor rank is off by a little of its own, as by atomic additions."""
    trainer, sample = _trainer(data, folder)
    runtime, copied = trainer.runtime, trainer.train_step.copied
    generator = torch.Generator().manual_seed(runtime.tensor_rank)

    def shake(parameter):
        grad = local(parameter.grad)
        grad.mul_(1 + 1e-6 * torch.randn(grad.shape, generator=generator))

    for parameter in trainer.state.parameters.values():
        parameter.register_post_accumulate_grad_hook(shake)
    count = 2 // runtime.dp_size
    for step in (1, 2):
        trainer.train_step([sample] * count, count, 1e-3, step)
    check_copies(copied, runtime)
    split = sorted(set(trainer.state.parameters) - set(copied))
    values = {name: whole(parameter).detach().numpy().copy() for name, parameter in copied.items()}
    # The test can fail: without the average the copies of a parameter differ.
    trainer.train_step.copied = {}
    trainer.train_step([sample] * count, count, 1e-3, 3)
    with pytest.raises(ValueError, match="tensor ranks"):
        check_copies(copied, runtime)
    return runtime.tensor_rank, split, values


def _check(results):
    (_, split, expected), *others = results
    assert any(name.endswith("qkv.weight") for name in split), split
    assert not any("norm" in name or "embed" in name for name in split)
    for _, _, values in others:
        assert all(np.array_equal(values[name], x) for name, x in expected.items())


def test_tensor_ranks_take_the_same_step_from_gradients_that_differ(run_ranks, tmp_path):
    _check(run_ranks(2, _rounded_differently, "none", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("data", ["fsdp2", "ddp"])
def test_so_they_do_where_the_model_is_sharded_or_replicated(run_ranks, tmp_path, data):
    _check(run_ranks(4, _rounded_differently, data, tmp_path))


def _drifted(rank, folder):
    trainer, _ = _trainer("none", folder)
    copied = trainer.train_step.copied
    check_copies(copied, trainer.runtime)
    if rank == 1:
        with torch.no_grad():
            local(copied["up1.refine.convs.0.bias"])[3] += 0.5
    check_copies(copied, trainer.runtime)


def test_a_parameter_that_differs_is_named_on_every_rank(launch_ranks, tmp_path):
    answers = launch_ranks(2, _drifted, tmp_path)
    assert [answer[0] for answer in answers] == ["error"] * 2
    for answer in answers:
        assert "up1.refine.convs.0.bias: expected the same values on all 2 tensor ranks" in answer[1]
        assert "a difference of up to 0.5 on rank 1" in answer[1]
