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
HANG = 900_000
"""Milliseconds after which a browser hangs; on a busy machine it may take longer than the 30 s that it is given by default."""
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
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=HANG)
        new_context = opened.new_context

        def patient(**options):
            context = new_context(**options)
            context.set_default_timeout(HANG)
            return context

        opened.new_context = patient
        opened.new_page = lambda **options: patient(**options).new_page()
        yield opened
        opened.close()


_CONTRAST = """
elements => Math.min(...elements.map(element => {
  const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(c => c / 255)
    .map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * c, 0.05);
  const style = getComputedStyle(element), [a, b] = [light(style.color), light(style.backgroundColor)];
  return Math.max(a, b) / Math.min(a, b);
}))
"""


@pytest.fixture
def contrast():
    """contrast(tab, selector) → the lowest contrast of text with its background (WCAG 2.1) in the elements that are coloured."""

    def lowest(tab, selector):
        elements = tab.locator(", ".join(f"{one}[style*=background]" for one in selector.split(", ")))
        assert elements.count()
        return elements.evaluate_all(_CONTRAST)

    return lowest
