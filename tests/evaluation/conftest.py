"""The tests of scores use the small world of the tests of forecasts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from credit_like.evaluation.fields import Fields, Regions
from credit_like.grid import Grid

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HEIGHT, WIDTH, MEMBERS, LEADS, LEVELS = 9, 16, 5, 3, 2


@pytest.fixture(scope="session")
def grid():
    return Grid(np.linspace(90, -90, HEIGHT), np.arange(WIDTH) * 360 / WIDTH)


@pytest.fixture
def make_fields(grid):
    """make_fields(members, masked, boxes, …) → Fields of smooth noise about a climatology."""

    def make(members=MEMBERS, masked=False, seed=0, boxes=None, forecast=None, truth=None, thresholds=None):
        rng = np.random.default_rng(seed)
        shape = (LEADS, LEVELS, HEIGHT, WIDTH)
        climatology = 280 + 10 * rng.standard_normal(shape)
        truth = climatology + 3 * rng.standard_normal(shape) if truth is None else truth
        if forecast is None:
            forecast = truth + 0.5 + 2 * rng.standard_normal((members, *shape))
        if masked:
            truth = truth.copy()
            truth[:, :, 2:4, 3:8] = np.nan
            forecast[:, :, :, 6, 1] = np.nan
        return Fields(forecast, truth, climatology, Regions(grid, boxes or {}), grid, thresholds, 0.25)

    return make


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
