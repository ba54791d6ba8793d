"""The commands of README and docs, run one after the other as a reader would, on small data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from credit_like.cli import app
from tests.data.conftest import make_dataset
from tests.experiments import FOUR_STEPS, SHORT, SMALL_MODEL
from tests.test_docs import ROOT, SHELLS, blocks, commands

ELSEWHERE = {
    "make": "are the targets that CI runs",
    "pip install": "installs packages; test_wheel.py",
    "export": "sets a variable of the shell",
    "torchrun": "needs several processes; tests of layouts start them",
    "credit-like demo": "trains for minutes; test_demo.py, and CI by `make demo`",
    "credit-like import-credit": "needs files of CREDIT; test_migrate.py makes them",
    "credit-like verify": "compares for minutes; test_verify.py",
    "credit-like submit": "needs a batch system; tests of launch have one",
    "coming-from-credit.md": "needs files of CREDIT; test_migrate.py makes them",
    "derived-fields.md": "needs a model on ERA5's levels; tests/evaluation/test_derived.py",
    "from-analysis.md": "needs an analysis; tests/inference/test_from_files.py",
    "model.md": "is for a grid of 181 rows; tests/test_layout.py",
    "hpc.md": "needs an account on Derecho",
    "parallelism.md": "needs several processes; tests of layouts start them",
    "scaling.md": "plans large models for minutes; tests of plan have smaller ones",
}
"""Beginnings of commands, and pages, that are not executed here, and why."""


def elsewhere(page: str, words: list[str]) -> str | None:
    """Return the entry of `ELSEWHERE` that a command belongs to."""
    return next((key for key in ELSEWHERE if key == page or words[: len(key.split())] == key.split()), None)


def written(*pages: str) -> list[list[str]]:
    """Return the commands of pages, or of all of them, that are executed here."""
    found = [
        (block.page.name, words)
        for block in blocks(*SHELLS)
        if block.page.name in pages or not pages
        for words in commands(block.text)
        if words and (block.executed or words[0] == "credit-like")
    ]
    return [words for page, words in found if elsewhere(page, words) is None]


def small(path: Path, steps: tuple[str, ...]) -> None:
    """Make what `new` proposed small: the same keys, a smaller model, and two epochs of two steps."""
    path.rename(path.with_stem("proposed"))
    settings = [line.partition("=") for line in steps]
    text = {"include": "proposed.yml"}
    for key, _, value in settings:
        section = text
        *outer, last = key.split(".")
        for name in outer:
            section = section.setdefault(name, {})
        section[last] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(text))


def execute(words: list[str], folder: Path) -> None:
    arguments = [word.replace("/data/", f"{folder}/data/") for word in words[1:]]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, (words, outcome.output, outcome.exception)
    if words[1] == "new":
        many = ("trainer.global_batch_size=32", "trainer.micro_batch_size=1", "trainer.parallelism.data=ddp")
        steps = (*FOUR_STEPS, *many, SMALL_MODEL, "save_loc=runs/my-experiment")
        small(folder / words[words.index("-o") + 1], steps)


def test_every_command_is_executed_here_or_says_why_not():
    here = ("README.md", "data.md", "first-run.md", "one-to-many.md", "run-folder.md", "troubleshooting.md")
    assert written(*here) == written()
    every = [(block.page.name, words) for block in blocks(*SHELLS) for words in commands(block.text) if words]
    unused = set(ELSEWHERE) - {elsewhere(page, words) for page, words in every}
    assert not unused


@pytest.mark.slow
@pytest.mark.parametrize("pages", [("data.md",), ("first-run.md", "one-to-many.md", "troubleshooting.md")], ids=str)
def test_commands_from_data_of_one_s_own(tmp_path, monkeypatch, pages):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "era5").mkdir()
    data = make_dataset(steps=160, height=16, width=32).drop_vars(["sst", "rain"])
    for path in (tmp_path / "era5.zarr", tmp_path / "data" / "era5.zarr"):
        data.to_zarr(path, consolidated=False)
    for number, part in enumerate(np.split(np.arange(160), 4)):
        data.isel(time=part).to_netcdf(tmp_path / "era5" / f"{number}.nc")
    done = [execute(words, tmp_path) for words in written(*pages)]
    assert len(done) > 3


@pytest.mark.slow
def test_commands_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small(_copy(tmp_path), (*SHORT, *FOUR_STEPS, SMALL_MODEL, "inference.init=[2000-01-12, 2000-01-13, 12h]"))
    done = [execute(words, tmp_path) for words in written("README.md", "run-folder.md")]
    assert len(done) > 9
    assert (tmp_path / "model.safetensors").is_file()


def _copy(folder: Path) -> Path:
    """Return a copy of the demonstration under the name and with the runs' folder that the pages use."""
    path = folder / "my-experiment.yml"
    experiment = yaml.safe_load((ROOT / "credit_like" / "demo.yml").read_text())
    path.write_text(yaml.safe_dump({**experiment, "name": "my-experiment", "save_loc": "runs/my-experiment"}))
    return path
