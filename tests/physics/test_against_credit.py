"""The energy correction against NCAR CREDIT's own, where the package miles-credit is installed.

CREDIT's objects get their grid, layers and channels here, since their constructors read files. They use the same area weights.
"""

import pytest
import torch
from torch import nn

from tests.physics.test_physics import ENERGY, NET, A, B, Store, build, energetic, moist  # noqa: F401

gen1 = pytest.importorskip("credit.postblock.gen1", reason="NCAR CREDIT is not installed: pip install miles-credit")
core = pytest.importorskip("credit.physics_core", reason="NCAR CREDIT is not installed: pip install miles-credit")

SECONDS = 21600
EITHER = {"top": {"down": ["solar"], "up": ["thermal"]}, "surface": {"up": ["sensible"]}}
ABSENT = 16  # a channel of zeros


def theirs(kind, grid, hybrid):
    """Return CREDIT's correction for the channels of `moist` and one channel of zeros."""
    fixer = kind.__new__(kind)
    nn.Module.__init__(fixer)
    latitude, longitude = torch.as_tensor(grid.latitude), torch.as_tensor(grid.longitude)
    places = torch.meshgrid(longitude, latitude, indexing="xy")
    if hybrid:
        layers = (torch.as_tensor(values, dtype=torch.float64) for values in (A, B))
        fixer.core_compute = core.physics_hybrid_sigma_level(*places, *layers, midpoint=True)
    else:
        levels = torch.tensor([20000.0, 50000.0, 85000.0], dtype=torch.float64)
        fixer.core_compute = core.physics_pressure_level(*places, levels, midpoint=False)
    fixer.core_compute.area = torch.as_tensor(grid.latitude_weights())[:, None].expand(places[0].shape)
    fixer.flag_sigma_level = fixer.flag_midpoint = hybrid
    fixer.N_seconds, fixer.state_trans, fixer.sp_ind = SECONDS, None, 12
    fixer.GPH_surf = torch.from_numpy(Store(grid).static()[0]).double()
    for i, name in enumerate(["T", "q", "U", "V"]):
        setattr(fixer, f"{name}_ind_start", 3 * i)
        setattr(fixer, f"{name}_ind_end", 3 * i + 3)
    for name in ("surf_solar", "surf_LR", "surf_SH", "surf_LH", "surf_up_solar", "surf_down_LW", "surf_up_LW"):
        setattr(fixer, f"{name}_ind", ABSENT)
    if kind is gen1.GlobalEnergyFixer:
        fixer.TOA_solar_ind, fixer.TOA_OLR_ind, fixer.surf_solar_ind = 13, 14, 15
    else:
        fixer.TOA_down_solar_ind, fixer.TOA_up_solar_ind, fixer.TOA_up_OLR_ind = 13, 14, ABSENT
        fixer.surf_down_solar_ind, fixer.surf_SH_ind = ABSENT, 15
    return fixer


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("kind", "fluxes"), [("GlobalEnergyFixer", NET), ("GlobalEnergyFixerUpDown", EITHER)])
def test_temperatures_are_those_of_credit(moist, kind, fluxes, hybrid):  # noqa: F811
    after, before, forcing = energetic(float(SECONDS))
    config = {"type": "energy", **ENERGY, **fluxes, **({"a": A, "b": B} if hybrid else {})}
    fix, grid = build(config, moist)
    with_zeros = torch.cat([after, torch.zeros_like(after[:, :1])], 1)
    given = {"x": before[:, :, None], "y_pred": with_zeros[:, :, None]}
    expected = theirs(getattr(gen1, kind), grid, hybrid)(given)["y_pred"][:, :-1, 0]
    got = fix(after, before, forcing)
    assert (got - after).abs().max() > 1.0
    # Hybrid layers have coefficients in float32 there.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 if hybrid else 1e-11)
