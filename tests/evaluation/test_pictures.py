"""Figures look as they did when someone last looked at them."""

import pytest
from matplotlib.testing.compare import compare_images

from tests.evaluation import pictures
from tests.evaluation.pictures import FIGURES, STORED, draw

TOLERANCE = 4.0
"""Root mean square of the difference of the 8-bit colours; other releases of a font renderer differ by 1 to 3, and a figure
without the titles of its panels by 4.2."""


SLOW = ("robinson", "region", "polar")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in FIGURES])
def test_a_figure_is_the_stored_picture(name, tmp_path):
    made = draw(name, tmp_path / f"{name}.png")
    differs = compare_images(str(STORED / f"{name}.png"), str(made), TOLERANCE)
    assert differs is None, f"{differs}\nlook at it; if it is right: python -m tests.evaluation.pictures"


def test_pictures_are_small_and_each_has_a_figure():
    stored = {path.stem: path.stat().st_size for path in STORED.glob("*.png")}
    assert set(stored) == set(FIGURES)
    assert max(stored.values()) < 60_000


def test_the_tolerance_does_not_hide_another_field(tmp_path, monkeypatch):
    original = pictures.fields
    monkeypatch.setattr(pictures, "fields", lambda kind, on, lead, error=0.0: original(kind, on, lead, error + 0.1))
    made = draw("plate-carree", tmp_path / "made.png")
    assert compare_images(str(STORED / "plate-carree.png"), str(made), TOLERANCE) is not None
