"""A step on a device hands over work and never asks for a value or sends one that it made up.

The device here is meta: it has no values, so whatever would need one fails or is seen.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like.nn.padding import Pad, source_columns, source_rows
from credit_like.parallel.runtime import Runtime
from tests.training.without_data import global_grid, small_experiment, trainer_without_data

META = torch.device("meta")
GRID = global_grid(32, 64)


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch):
    """The meta device has none."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())


class _Operations(TorchDispatchMode):
    """Values that are read, and copies to the device from ordinary memory."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        sources = [a.device.type for a in args if isinstance(a, torch.Tensor)]
        copied = isinstance(result, torch.Tensor) and result.is_meta and "cpu" in sources
        if name in ("_local_scalar_dense", "nonzero", "equal") or (copied and name in ("_to_copy", "copy_")):
            self.found.append(name)
        return result


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
        return result


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1.0, 2.0], device=META),
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: torch.ones(3).to(META),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.as_tensor([1.0], device=META),
        lambda x: x[torch.tensor([0, 1], device=META)],
    ],
    ids=["tensor", "new_tensor", "to", "copy_", "as_tensor", "index"],
)
def test_what_waits_is_seen(wait):
    with Waits() as waits:
        wait(torch.ones(3, device=META))
    assert waits.found


@pytest.mark.parametrize("read", [float, bool, lambda x: x.item(), lambda x: x.tolist()])
def test_what_reads_a_value_fails(read):
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones((), device=META))


PHYSICS = {
    "none": [],
    "clip": [{"type": "clip", "variables": ["column_water"]}],
    "zonal-filter": [{"type": "zonal-filter", "variables": ["column_water"], "highest": 5}],
    "relax": [{"type": "relax", "variables": ["column_water"], "climatology": ["2000-01-01", "2000-01-05"]}],
    "spherical-filter": [{"type": "spherical-filter", "variables": ["column_water"], "highest": 5}],
    "mass": [{"type": "mass", "surface_pressure": "surface_pressure"}],
    "energy": [
        {
            "type": "energy",
            **dict.fromkeys(("temperature", "u", "v"), "specific_humidity"),
            "surface_geopotential": "orography",
            "top": {"down": ["precipitation"]},
            "surface": {"up": ["evaporation"]},
        }
    ],
}


def _trainer(physics, members=1):
    experiment = small_experiment(
        GRID,
        {
            "prognostic": {"level": ["specific_humidity"], "surface": ["surface_pressure", "column_water"]},
            "diagnostic": {"surface": ["precipitation", "evaporation"]},
            "forecast_len": 2,
        },
        model={
            "type": "wxformer",
            "use_spectral_norm": True,
            "noise": None if members == 1 else {"channels": 3},
            "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [16, 16], "pad_lon": [16, 16]},
        },
        physics=PHYSICS[physics],
        loss={"type": "mse" if members == 1 else "crps"},
        trainer={
            "members": members,
            "global_batch_size": 2,
            "use_ema": True,
            "grad_max_norm": 1.0,
            "shift_longitude": True,
        },
    )
    runtime = Runtime(device=META)
    trainer, sample = trainer_without_data(experiment, GRID, runtime)
    fields = {f.name: getattr(sample, f.name).to(META) for f in dataclasses.fields(sample)}
    return trainer, dataclasses.replace(sample, **fields)


def _step(trainer, sample):
    """The waits of an optimiser step; of the second one, when what is made once has been made."""
    trainer.train_step([sample, sample], 2, 1e-3, 1)
    with Waits() as waits:
        trainer.train_step([sample, sample], 2, 1e-3, 2)
    return waits.found


@pytest.mark.parametrize(
    "physics", ["mass", *(pytest.param(name, marks=pytest.mark.slow) for name in PHYSICS if name != "mass")]
)
def test_no_step_waits_whatever_the_physics(physics):
    trainer, sample = _trainer(physics)
    assert not _step(trainer, sample)


@pytest.mark.slow
def test_no_step_waits_for_members_with_noise():
    trainer, sample = _trainer("none", members=2)
    assert not _step(trainer, sample)


@pytest.mark.parametrize("mode", ["earth", "mirror", "replicate"])
@pytest.mark.parametrize(("pads", "height"), [((3, 2), 4), ((0, 3), 4), ((3, 0), 4), ((3, 3), 8)])
def test_padding_copies_the_rows_that_the_list_names(mode, pads, height):
    x = torch.randn(2, 3, height, 6, generator=torch.Generator().manual_seed(0))
    padded = Pad(mode, pads, (2, 1))(x)
    rows, columns = source_rows(mode, height, *pads), source_columns(mode, 6, 2, 1)
    for i, (row, turned) in enumerate(rows):
        expected = x[:, :, row].roll(3, -1) if turned else x[:, :, row]
        assert torch.equal(padded[:, :, i], expected[..., columns]), (i, row)
