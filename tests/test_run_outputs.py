"""What a command writes under a fixed name in the run's folder replaces only what such a command has written."""

from __future__ import annotations

import shutil

import pytest

from tests.experiments import representatives
from tests.faults.test_run_folder import call

OTHERS = {
    "train": ("status.json", "log.jsonl"),
    "preprocess": ("statistics.nc", "audit.csv", "audit.png"),
    "evaluate": (
        "evaluation/model.nc", "evaluation/persistence.nc", "evaluation/climatology.nc", "evaluation/scores.csv",
        "evaluation/report.html",
    ),
    "plot": ("evaluation/rmse.png",),
}  # fmt: skip
"""Command → names in the run's folder that it writes."""
TEXT = "measured in the field, and nowhere else\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run after each of these commands, and after each of them once more."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    for command in ("preprocess", "preprocess", "train", "train", "rollout", "evaluate", "evaluate", "plot", "plot"):
        assert call(command, folder) == 0, command
    return folder


CASES = [f"{command}: {name}" for command, names in OTHERS.items() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    representatives(
        CASES, "train: log.jsonl", "preprocess: audit.png", "evaluate: evaluation/model.nc", "plot: evaluation/rmse.png",
    ),
)  # fmt: skip
def test_a_file_of_something_else_is_refused_and_stays(finished, tmp_path, monkeypatch, capsys, case) -> None:
    command, _, name = case.partition(": ")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    if command in ("evaluate", "plot"):
        shutil.copytree(finished, folder)
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TEXT)
    before = set(folder.rglob("*"))
    assert call(command, folder) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "Traceback" not in said
    assert file.read_text() == TEXT
    if command != "plot":  # which draws what comes before
        assert set(folder.rglob("*")) == before


def test_what_a_start_that_failed_has_left_is_replaced(tmp_path, monkeypatch) -> None:
    """Its status, and a log without a line: there is no stored experiment yet."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "status.json").write_text('{\n "state": "failed",\n "step": 0\n}')
    (folder / "log.jsonl").touch()
    assert call("train", folder) == 0
