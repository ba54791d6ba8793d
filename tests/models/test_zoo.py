"""An architecture of the zoo cannot drift: its parameters, FLOPs and a seeded output are on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from credit_like import registry
from credit_like.nn.init import initialise

FOLDER = Path(__file__).parents[2] / "models"
# Channels and grid of the published configuration, and a grid small enough for a forward in float64.
CASES = {
    "wxformer-tiny": ((32, 64), 9, 8, (32, 64)),
    "wxformer-1deg": ((181, 360), 80, 84, (53, 104)),
    "wxformer-0.25deg": ((721, 1440), 60, 64, (81, 160)),
}


def build(name, grid, dtype=torch.float32, device="meta"):
    _, in_channels, out_channels, _ = CASES[name]
    module = registry.module("model", "wxformer")
    config = module.Config(**yaml.safe_load((FOLDER / name / "model.yml").read_text())["model"])
    with torch.device(device):
        model = module.build(
            config, in_channels=in_channels, out_channels=out_channels, frames=1, height=grid[0], width=grid[1]
        )
    return model.to(dtype)


def fingerprint(name):
    grid, in_channels, _, small = CASES[name]
    model = build(name, grid)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        model(torch.empty(1, in_channels, 1, *grid, device="meta"))
    seeded = initialise(build(name, small, device="cpu"), 0).double().eval()
    x = torch.randn(1, in_channels, 1, *small, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = seeded(x)
    return {
        "grid": list(grid),
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_forward": flops.get_total_flops(),
        "output": {
            "grid": list(small),
            "mean": float(y.mean()),
            "rms": float(y.square().mean().sqrt()),
            "first": float(y.flatten()[0]),
        },
    }


@pytest.mark.parametrize(
    "name", ["wxformer-tiny", "wxformer-1deg", pytest.param("wxformer-0.25deg", marks=pytest.mark.long)]
)
def test_equals_its_fingerprint(name):
    recorded = json.loads((FOLDER / name / "fingerprint.json").read_text())
    now = fingerprint(name)
    output, expected = now.pop("output"), recorded.pop("output")
    assert now == recorded
    assert output.pop("grid") == expected.pop("grid")
    assert output == pytest.approx(expected, rel=1e-6)


def test_every_architecture_has_a_card_and_is_held():
    assert {path.parent.name for path in FOLDER.glob("*/model.yml")} == set(CASES)
    for name in CASES:
        assert len((FOLDER / name / "card.md").read_text()) > 300
