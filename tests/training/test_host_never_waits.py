"""A step on a device hands over work and never asks for a value or sends one that it made up.

The device here is meta: it has no values, so whatever would need one fails or is seen.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from credit_like import registry
from credit_like.derive.fields import scored_derivation
from credit_like.losses._mean import AreaLoss
from credit_like.nn import init
from credit_like.nn.linear import Linear
from credit_like.nn.lora import Lora
from credit_like.nn.padding import Pad, source_columns, source_rows
from credit_like.parallel.apply import materialise
from credit_like.parallel.environment import Environment
from credit_like.parallel.observe import fake_group
from credit_like.parallel.runtime import Runtime
from credit_like.plan import simulate
from credit_like.rollout import rollout
from credit_like.variables import Variables
from tests.training.without_data import NARROW_MODEL, global_grid, small_experiment, trainer_without_data

META = torch.device("meta")
GRID = global_grid(32, 64)


@pytest.fixture(autouse=True)
def _like_cuda(monkeypatch):
    """The meta device has no autocast, and no memory is pinned for it."""

    def pin_memory(x):
        PINNED[x.data_ptr()] = x
        return x

    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    yield
    PINNED.clear()


class _Operations(TorchDispatchMode):
    """Values that are read, and copies to the device from ordinary memory, for which CUDA waits, however they are asked for."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ordinary = [x for x in tensors if not x.is_meta and x.data_ptr() not in PINNED]
        to_device = any(x.is_meta for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor))
        # A tensor of one number that is used where it is goes with the kernel as an argument.
        sent = [x for x in ordinary if x.dim() or name in ("_to_copy", "copy_")]
        if name in ("_local_scalar_dense", "nonzero", "equal") or (to_device and sent):
            self.found.append(name)
        return result


PINNED = {}
"""Tensors in pinned memory, by address."""


class Waits(TorchFunctionMode):
    """What makes the host wait for the device: the above, and tensors that are made there of Python numbers."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.operations = _Operations(self.found)

    def __enter__(self):
        self.operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.operations.__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and result.is_meta
        if made and not isinstance(args[int(func is torch.Tensor.new_tensor)], torch.Tensor):
            self.found.append(func.__name__)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].is_meta:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.found += [func.__name__ for part in at if isinstance(part, list | np.ndarray)]
        return result


def _set(x, at):
    x[at] = 1.0


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1.0, 2.0], device=META),
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: torch.ones(3).to(META),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.as_tensor([1.0], device=META),
        lambda x: x[torch.tensor([0, 1], device=META)],
        lambda x: x[[0, 1]],
        lambda x: _set(x, [0, 1]),
    ],
    ids=["tensor", "new_tensor", "to", "copy_", "as_tensor", "index", "list", "set"],
)
def test_what_waits_is_seen(wait):
    with Waits() as waits:
        wait(torch.ones(3, device=META))
    assert waits.found


def test_what_does_not_wait_is_not_seen():
    with Waits() as waits:
        x = torch.ones(3, device=META)
        x[0], x[-1] = 0.5, 2.0
        torch.where(x > 1, x, 0.0) + torch.ones(3).pin_memory().to(META) + torch.full((3,), 2.0, device=META)
    assert not waits.found


@pytest.mark.parametrize("read", [float, bool, lambda x: x.item(), lambda x: x.tolist()])
def test_what_reads_a_value_fails(read):
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones((), device=META))


VARIABLES = {
    "prognostic": {
        "level": ["temperature", "u_component_of_wind", "v_component_of_wind", "specific_humidity"],
        "surface": ["surface_pressure", {"name": "column_water", "transform": {"type": "log1p", "scale": 1.0}}],
    },
    "diagnostic": {"surface": ["precipitation", "evaporation"]},
    "forecast_len": 2,
}
PHYSICS = [
    {"type": "clip", "variables": ["column_water"]},
    {"type": "zonal-filter", "variables": ["column_water"], "highest": 5},
    {"type": "relax", "variables": ["column_water"], "climatology": ["2000-01-01", "2000-01-05"]},
    {"type": "zonal-energy", "variables": ["surface_pressure"], "lowest": 3},
    {"type": "zonal-energy", "variables": ["precipitation"], "rate": 0.1, "climatology": ["2000-01-01", "2000-01-05"]},
    {"type": "spherical-filter", "variables": ["column_water"], "winds": ["u_component_of_wind"], "highest": 5},
    {
        "type": "spherical-filter",
        "variables": ["surface_pressure"],
        "highest": 5,
        "climatology": ["2000-01-01", "2000-01-05"],
    },
    {"type": "conserve", "variables": ["specific_humidity"]},
    {"type": "mass"},
    {"type": "moisture", "precipitation": "precipitation"},
    {
        "type": "energy",
        "surface_geopotential": "orography",
        "top": {"down": ["precipitation"]},
        "surface": {"up": ["evaporation"]},
        "flux_units": "W m-2",
    },
]


def test_every_correction_is_tested_here():
    assert {section["type"] for section in PHYSICS} == set(registry.names("physics"))


def _trainer(model=None, trainer=None, **sections):
    experiment = small_experiment(
        GRID,
        VARIABLES,
        model={
            "type": "wxformer",
            "use_spectral_norm": True,
            "depth": [1, 1, 1, 1],
            "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [16, 16], "pad_lon": [16, 16]},
            **(model or {}),
        },
        trainer={"use_ema": True, "grad_max_norm": 1.0, "shift_longitude": True, **(trainer or {})},
        **sections,
    )
    runtime = Runtime(device=META)
    trainer, sample = trainer_without_data(experiment, GRID, runtime)
    return trainer, sample.to(META)


def _step(trainer, sample):
    """The waits of an optimiser step; of the second one, when what is made once has been made."""
    trainer.train_step([sample], 1, 1e-3, 1)
    with Waits() as waits:
        trainer.train_step([sample], 1, 1e-3, 2)
    return waits.found


class _Fields:
    """A store of zeros."""

    def __init__(self, store):
        self.grid, self.variables = store.grid, store.variables

    def read(self, variables, times, rows=slice(None), columns=slice(None)):
        return np.zeros((len(times), sum(map(len, variables)), self.grid.height, self.grid.width), np.float32)

    def forcing(self, times, **_):
        return np.zeros(
            (len(times), self.variables.n("dynamic_forcing"), self.grid.height, self.grid.width), np.float32
        )


@pytest.mark.slow
def test_no_step_waits_whatever_the_physics():
    """Of training with all corrections, noise on the input, dropout and a loss of rows, and of a rollout."""
    trainer, sample = _trainer(
        {"attn_dropout": 0.1, "ff_dropout": 0.1, "drop_path": 0.1},
        {"input_noise": 0.1},
        physics=PHYSICS,
        loss={"type": "sum", "terms": [{"loss": {"type": "mse"}}, {"loss": {"type": "spectral"}}]},
    )
    assert not _step(trainer, sample)
    context = trainer.context
    context.stepper.eval()
    steps = rollout(context.stepper, _Fields(context.store), context.variables, [0], 3, without_gradients=torch.no_grad)
    next(steps)  # the initial state and what is made once
    with Waits() as waits:
        next(steps)
    assert not waits.found


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    [
        pytest.param({"channels": 3}, id="decoder", marks=pytest.mark.long),
        pytest.param({"type": "conditional-norm", "channels": 3, "correlation": 0.5}, id="norms"),
    ],
)
def test_no_step_waits_for_members_with_noise(noise):
    options = {"members": 2, "optimizer": {"type": "muon"}, "activation_checkpoint": True, "backprop_steps": 1}
    trainer, sample = _trainer({"noise": noise}, options, loss={"type": "crps"})
    assert not _step(trainer, sample)


def _of_rows_and_columns(rank):
    """The waits of a rank of four that share a sample, in a group without the other ranks."""
    grid = global_grid(64, 128)
    parallelism = {"data": "none", "domain": [2, 2]}
    experiment = small_experiment(
        grid,
        VARIABLES,
        model={
            **NARROW_MODEL,
            "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [32, 32], "pad_lon": [0, 0]},
        },
        physics=PHYSICS,
        loss={"type": "spectral"},
        trainer={"shift_longitude": True, "input_noise": 0.1, "parallelism": parallelism},
    )
    with fake_group(0, 4):
        runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"), environment=Environment(world=4))
        assert runtime.gradient_mesh is not None
        assert runtime.flat_gradient_mesh is not None
        runtime.device = META

        def without_ddp(model, runtime, seed):
            return materialise(model, runtime, seed, lambda model, _: init.reset_buffers(model), lambda model, _: model)

        trainer, sample = trainer_without_data(experiment, grid, runtime, without_ddp)
        assert sample.prognostic.shape[-2:] == (32, 64)
        return _step(trainer, sample.to(META))


@pytest.mark.slow
def test_no_step_waits_on_rows_and_columns(run_ranks):
    assert run_ranks(1, _of_rows_and_columns) == [[]]


@pytest.mark.parametrize("name", registry.names("loss"))
def test_no_loss_waits(name):
    experiment = small_experiment(GRID, VARIABLES, model={"type": "persistence"}, loss={"type": name})
    variables = Variables(experiment.data)
    loss = AreaLoss(experiment.loss, variables, simulate._NoStatistics(GRID), GRID).to(META)
    members = 2 if loss.of_members and not loss.rowwise else 1
    shape = (variables.out_channels, GRID.height, GRID.width)
    prediction = torch.empty(members, *shape, device=META, requires_grad=True)
    with Waits() as waits:
        loss(prediction, torch.empty(1, *shape, device=META)).backward()
    assert not waits.found


def test_low_rank_changes_do_not_wait():
    with META:
        layer = Linear(8, 8, spectral_norm=True)
        layer.lora = Lora(8, 8, 2, 1.0)
    with Waits() as waits:
        layer(torch.empty(3, 8, device=META)).sum().backward()
    assert not waits.found


@pytest.mark.parametrize("hybrid", [False, True])
def test_derived_fields_do_not_wait(hybrid):
    levels = [60, 100, 137] if hybrid else [300, 500, 850]
    data = {
        **VARIABLES,
        "levels": levels,
        "prognostic": {"level": VARIABLES["prognostic"]["level"], "surface": ["surface_pressure"]},
        "static": {"surface": ["geopotential_at_surface"]},
    }
    names = ["vorticity", "divergence", "wind_speed", "relative_humidity", "total_column_water"]
    derive = {"fields": names, "pressure_levels": [500, 850]}
    if hybrid:
        derive |= {"fields": [*names, "geopotential", "mean_sea_level_pressure"], "model_levels": "era5-137"}
    experiment = small_experiment(GRID, data, model={"type": "persistence"}, evaluation={"derive": derive})
    variables = Variables(experiment.data)
    derivation = scored_derivation(experiment, variables)
    fields = torch.empty(1, variables.out_channels, GRID.height, GRID.width, device=META)
    by_name = {name: fields[:, where] for name, where in Variables.slices(variables.outputs).items()}
    ground = torch.empty(GRID.height, GRID.width, device=META)
    derivation(by_name, ground, GRID)
    with Waits() as waits:
        derivation(by_name, ground, GRID)
    assert not waits.found


@pytest.mark.parametrize("mode", ["earth", "mirror", "replicate"])
@pytest.mark.parametrize(("pads", "height"), [((3, 2), 4), ((0, 3), 4), ((3, 0), 4), ((3, 3), 8)])
def test_padding_copies_the_rows_that_the_list_names(mode, pads, height):
    x = torch.randn(2, 3, height, 6, generator=torch.Generator().manual_seed(0))
    padded = Pad(mode, pads, (2, 1))(x)
    rows, columns = source_rows(mode, height, *pads), source_columns(mode, 6, 2, 1)
    for i, (row, turned) in enumerate(rows):
        expected = x[:, :, row].roll(3, -1) if turned else x[:, :, row]
        assert torch.equal(padded[:, :, i], expected[..., columns]), (i, row)
