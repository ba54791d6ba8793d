"""Which precision computes: in every unit of every shipped experiment and model, as its operations show it."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like.grid import Grid
from credit_like.nn import spectral_norm
from credit_like.nn.layer import is_shard_unit
from credit_like.nn.precision import keeps_full_precision
from credit_like.parallel.observe import wraps_others
from credit_like.parallel.runtime import Runtime
from credit_like.plan import simulate as simulation
from credit_like.plan.layouts import Candidate
from credit_like.schema.data import DataSection
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_located
from credit_like.schema.trainer import Parallelism, TrainerSection
from credit_like.stepper import Stepper
from credit_like.variables import Variables

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "config").glob("*.yml"))
ZOO = sorted((ROOT / "models").glob("*/model.yml"))
MARKS = {"era5-1deg.yml": (), "gcm-t21.yml": pytest.mark.slow, "gcm-t21-ensemble.yml": pytest.mark.slow}
"""Of an experiment with autocast, one without and one with members; the others are among the long tests."""


def _experiment(path):
    """An experiment file as it is, or a model of the zoo trained as the 1° experiment trains its own."""
    for name in ("SCRATCH", "ERA5", "CREDIT_LIKE_DATA"):
        os.environ.setdefault(name, name.lower())
    found, _ = load_located(path if path in FILES else ROOT / "config" / "era5-1deg.yml", [])
    if path in FILES:
        return found
    return Experiment.model_validate(found.to_dict() | yaml.safe_load(path.read_text()))


def _grid(experiment):
    """Any grid that suits the model."""
    likely = [(64, 128), (181, 360), (721, 1440)]
    sizes = itertools.chain(likely, itertools.product(range(16, 100), range(16, 100)))
    height, width = next(size for size in sizes if not experiment.model.check(*size))
    return Grid(90 - (np.arange(height) + 0.5) * 180 / height, np.arange(width) * 360 / width)


def _blocks(model):
    """The blocks that are gathered one at a time, without their wrappers."""
    for name, module in model.named_modules():
        if is_shard_unit(module) and not isinstance(module, CheckpointWrapper):
            yield name, module


class _Types(TorchDispatchMode):
    """The floating-point types of what is multiplied, by unit."""

    def __init__(self, model):
        super().__init__()
        self.found, self.inside = defaultdict(set), []
        for name, module in _blocks(model):
            module.register_forward_pre_hook(lambda module, args, name=name: self.inside.append(name))
            module.register_forward_hook(lambda *_: self.inside.pop() and None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if wraps_others(types):
            return NotImplemented
        name = func.name().partition("::")[2].partition(".")[0]
        if self.inside and name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear"):
            self.found[self.inside[-1]] |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **(kwargs or {}))


class _Seen(Exception):
    pass


def _types(rank, path, layout, changes):
    """What each unit multiplies in, in the forward of a training step; what the trainer says of it."""
    os.environ["WORLD_SIZE"] = "1"
    experiment = _experiment(path)
    trainer = experiment.trainer.model_copy(update={"global_batch_size": 2, "micro_batch_size": 1, **changes})
    # One layer of each stage stands for all; two ranks can share its heads.
    model = experiment.model.model_copy(update={"depth": (1, 1, 1, 1), "dim_head": 8})
    experiment = experiment.model_copy(update={"trainer": trainer, "model": model})
    result = {}

    def measured_step(trainer, samples, count, meter):
        model = trainer.context.stepper.model
        types = _Types(model)
        with meter, types:
            sample = next(samples)
            step = trainer.train_step
            step.forward(step.stepper.predict_sample(sample), range(sample.leads), sample.leads)
        for name, module in _blocks(model):
            result[name] = keeps_full_precision(module), types.found[name]
        result["says"] = trainer.precision
        raise _Seen

    simulation.measured_step = measured_step
    with pytest.raises(_Seen):
        simulation.simulate(experiment, layout, 0, _grid(experiment))
    return result


def _check(result, says):
    narrow = torch.bfloat16 if says.startswith("bfloat16") else torch.float32
    assert result.pop("says") == says
    full = [name for name, (kept, _) in result.items() if kept]
    assert [name.rpartition(".")[2] for name in full] == ["embed", "head"]
    for name, (kept, types) in result.items():
        assert types == {torch.float32 if kept else narrow}, name


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=MARKS.get(path.name, pytest.mark.long)) for path in FILES + ZOO],
    ids=lambda path: "-".join(path.parts[-2:]),
)
def test_every_unit_computes_in_what_the_experiment_says(run_ranks, path):
    """On one rank and, where the experiment shards, on two."""
    section = _experiment(path).trainer
    data = section.parallelism.data
    (one,) = run_ranks(1, _types, path, Candidate(1, data=data), {})
    _check(one, "bfloat16 (autocast)" if section.amp else "float32")
    if data == "fsdp2":
        (two,) = run_ranks(1, _types, path, Candidate(2), {})
        _check(two, "bfloat16 (FSDP2 policy)" if section.amp else "float32")


@pytest.mark.parametrize(
    ("layout", "changes", "says"),
    [
        pytest.param(Candidate(2), {"amp": True}, "bfloat16 (FSDP2 policy)", marks=pytest.mark.slow),
        (Candidate(2), {"amp": True, "activation_checkpoint": True}, "bfloat16 (FSDP2 policy)"),
        pytest.param(Candidate(1, 2, 2), {"amp": True}, "bfloat16 (FSDP2 policy)", marks=pytest.mark.slow),
        # One replica: nothing is sharded.
        pytest.param(Candidate(1, 2), {"amp": True}, "bfloat16 (autocast)", marks=pytest.mark.slow),
        (Candidate(2, data="ddp"), {"amp": True}, "bfloat16 (autocast)"),
        pytest.param(Candidate(1, 1, 2, data="none"), {"amp": True}, "bfloat16 (autocast)", marks=pytest.mark.slow),
        pytest.param(Candidate(2), {"amp": False}, "float32", marks=pytest.mark.slow),
        pytest.param(Candidate(2, data="ddp"), {"amp": False}, "float32", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_computes_in_what_it_says(run_ranks, layout, changes, says):
    path = ROOT / "models" / "wxformer-tiny" / "model.yml"
    (result,) = run_ranks(1, _types, path, layout, changes)
    _check(result, says)


def test_the_configuration_has_bfloat16_somewhere():
    """So that the test above is not of float32 alone."""
    assert any(_experiment(path).trainer.amp for path in FILES)


# ---- what stays in full precision --------------------------------------------------------------------------------------

MEAN, STD, CHANGE = 54000.0, 3000.0, 150.0  # as geopotential at 500 hPa, in m² s⁻²


VARIABLES = Variables(
    DataSection.model_validate(
        {
            "source": {"type": "synthetic"},
            "timestep": "6h",
            "prognostic": {"surface": ["a", "b", "c", "d"]},
            "static": {"surface": ["s"]},
            "train": ["2000-01-01", "2000-01-02"],
            "valid": ["2000-01-03", "2000-01-04"],
            "test": ["2000-01-05", "2000-01-06"],
        }
    )
)


class _Statistics:
    def __init__(self, tiny):
        self.tiny = tiny

    def select(self, variables):
        n = len(variables)
        return np.full(n, MEAN), np.full(n, STD), np.full(n, CHANGE)

    def mask(self, variables):
        return np.ones((len(variables), self.tiny.height, self.tiny.width), bool)


def _rounding(tiny, model, predict, autocast):
    """RMS of what a step loses besides the rounding of the features inside the model: of input, head and update.

    The reference takes what the head was given, and does the rest in float64.
    """
    stepper = Stepper(model, VARIABLES, _Statistics(tiny), np.zeros((1, tiny.height, tiny.width), np.float32), predict)
    generator = torch.Generator().manual_seed(3)
    shape = (1, 4, 2, tiny.height, tiny.width)
    frames = MEAN + STD * torch.randn(shape, generator=generator)
    given = {}
    handles = [
        model.head.register_forward_pre_hook(lambda _, args: given.update(head=args[0])),
        model.stages[0].embed.register_forward_pre_hook(lambda _, args: given.update(embed=args[0])),
    ]
    state = stepper.initial(frames, torch.zeros(1, dtype=torch.int64))
    forcing = torch.zeros(1, 0, 2, tiny.height, tiny.width)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        after = stepper(state, forcing)
    for handle in handles:
        handle.remove()
    assert given["embed"].dtype == given["head"].dtype == torch.float32
    return stepper, state, given, after


def _exact(whole, stepper, state, given, predict):
    """The step in float64 from the features that the head was given; `whole`: the model with weights of its own."""
    with torch.no_grad():
        y = whole.resize(whole.unpad(whole.head.double()(given["head"].double()).permute(0, 3, 1, 2)))
        n = stepper.mean.shape[0]
        if predict == "increment":
            return state.now.double() + CHANGE * y[:, :n]
        return MEAN + STD * y[:, :n]


def _copy(tiny):
    model = tiny.model(dtype=torch.float32)
    spectral_norm.refresh(model)
    return model


def _errors(tiny, build, autocast):
    errors = {}
    for predict in ("increment", "state"):
        stepper, state, given, after = _rounding(tiny, build(), predict, autocast)
        exact = _exact(_copy(tiny), stepper, state, given, predict)
        errors[predict] = float((after.now.double() - exact).square().mean().sqrt())
    return errors


def test_predicting_the_state_loses_little_more_than_predicting_its_change(tiny):
    """A geopotential of 54 000 m² s⁻² in bfloat16 would be wrong by up to 128, its deviation from the mean by up to 8.

    What is left is rounding in float32: of the new state in both, and of the head's sums, which are of its deviation in one
    and of its change in the other.
    """
    errors = _errors(tiny, lambda: _copy(tiny), autocast=True)
    assert 0 < errors["state"] < 1.2 * errors["increment"] < 1e-6 * STD


def _sharded_errors(rank, tiny):
    from credit_like.parallel.apply import parallelise

    section = TrainerSection(parallelism=Parallelism(data="fsdp2"), amp=True)
    runtime = Runtime.start(section.parallelism, torch.device("cpu"))
    return _errors(tiny, lambda: parallelise(_copy(tiny), section, runtime), autocast=False)


def test_nor_does_it_where_the_model_is_sharded(run_ranks, tiny):
    for errors in run_ranks(2, _sharded_errors, tiny):
        assert 0 < errors["state"] < 1.2 * errors["increment"] < 1e-6 * STD


@pytest.mark.parametrize("in_backward", [True, False])
def test_sigma_is_not_rounded(in_backward):
    """W/σ in bfloat16 is the rounded quotient; 1/σ rounded first would shift all of it alike."""
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = spectral_norm.SpectralNorm((64, 32))
    norm.in_backward = in_backward
    norm.inv_sigma.fill_(1.00390625 * 0.75)  # half-way between two bfloat16 numbers
    got = norm(weight)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, (weight.double() * norm.inv_sigma.double()).bfloat16())


def test_float16_is_refused():
    for key in ("param_dtype", "reduce_dtype", "output_dtype"):
        with pytest.raises(ValueError, match=r"float32.*bfloat16"):
            TrainerSection.model_validate({"fsdp2_mp_policy": {key: "float16"}})
