"""Every notebook runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONG = ("04_ensembles", "05_fine_tuning_from_credit")


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped(path):
    cells = nbformat.read(path, as_version=4).cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.long] * (p.stem in LONG)) for p in NOTEBOOKS],
)
# The kernel's messaging library opens its event loop at import, before any test could ask it not to.
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")
def test_runs(path, tmp_path):
    from nbclient import NotebookClient

    limits = {"timeout": 3600, "startup_timeout": 1800}  # for hangs only
    client = NotebookClient(nbformat.read(path, as_version=4), **limits, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
