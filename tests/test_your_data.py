"""The commands and experiments in docs/data.md work as they stand there, on data with the names that the page gives."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from credit_like import registry
from credit_like.check import checked_experiment
from credit_like.cli import main
from credit_like.schema.load import load_experiment
from tests.data.conftest import make_dataset

TEXT = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"^(?:<!-- not executed: ([^\n]+) -->\n)?```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = [line for why, kind, text in BLOCKS if kind == "console" and not why for line in text.splitlines()]
SECTIONS = [text for why, kind, text in BLOCKS if kind == "yaml" and not why]

BASE = """
name: page
save_loc: run
data:
  source: {type: zarr, path: era5.zarr}
  timestep: 6h
  levels: [500, 850]
  prognostic: {level: [u, t], surface: [sp]}
  train: [2001-01-01, 2001-01-06T18]
  valid: [2001-01-07, 2001-01-08T18]
  test: [2001-01-09, 2001-01-10T18]
model: {type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 8}
trainer: {global_batch_size: 2, epochs: 1, optimizer: {type: adamw, learning_rate: 1.0e-3}}
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A store, and a folder of files of one month each, in the folder where the commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDIT_LIKE_CACHE", str(tmp_path / "cache"))
    fields = make_dataset(steps=60, start="2001-01-20", height=16, width=32)
    fields.to_zarr("era5.zarr", consolidated=False)
    (tmp_path / "era5").mkdir()
    for month, part in fields.drop_vars(["orography", "lsm"]).groupby("time.month"):
        part.to_netcdf(f"era5/era5_2001{month:02d}.nc")
    return fields


def test_every_block_is_tested_or_says_why_not():
    assert len(BLOCKS) == TEXT.count("```") / 2
    assert {kind for why, kind, _ in BLOCKS if not why} == {"console", "yaml"}
    assert len(COMMANDS) == 3
    assert len(SECTIONS) >= 6


def run(capsys, arguments):
    """Run a command; return its exit status and all that it printed, on one line."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr()
    return end.value.code, " ".join((printed.out + printed.err).split())


def test_the_commands_work(data, capsys):
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        assert program == "credit-like"
        status, printed = run(capsys, arguments)
        assert status == 0, printed
    monthly = load_experiment(Path("monthly.yml"))
    assert registry.of("source", monthly.data.source[0]).open_dataset(monthly.data.source[0]).sizes["time"] == 60


@pytest.mark.parametrize("text", SECTIONS, ids=lambda text: " ".join(text.split())[:60])
def test_the_sections_are_experiments(tmp_path, text):
    """Each passes as a part of an experiment, with every key known."""
    experiment = yaml.safe_load(BASE)
    part = yaml.safe_load(text)["data"]
    whole = {**experiment, "data": {**experiment["data"], **part}}
    (tmp_path / "page.yml").write_text(yaml.safe_dump(whole))
    loaded = load_experiment(tmp_path / "page.yml")
    assert set(part) <= loaded.data.model_fields_set


def test_the_section_of_keys_fits_the_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = make_dataset(steps=40, height=32, width=64)
    fields["t"].attrs["units"] = "K"
    fields.to_zarr("era5.zarr", consolidated=False)
    (text,) = [text for text in SECTIONS if "t1000" in text]
    experiment = yaml.safe_load(BASE)
    experiment["data"].update(yaml.safe_load(text)["data"])
    (tmp_path / "page.yml").write_text(yaml.safe_dump(experiment))
    windows = "model={local_window_size: 2, global_window_size: [2, 2, 2, 1]}"
    pads = "model.padding_conf={activate: true, mode: replicate, pad_lat: [10, 10], pad_lon: [0, 0]}"
    checked_experiment(tmp_path / "page.yml", [windows, pads])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prognostic": {"surface": ["nothing"]}}, "expected a variable of "),
        ({"levels": [50000]}, "expected levels of "),
        ({"static": {"surface": ["sst"]}}, "expected a static field, got "),
        ({"timestep": "7h"}, "expected a multiple of "),
        ({"source": {"type": "zarr", "path": "era6.zarr"}}, "expected an existing file or folder"),
        ({"source": {"type": "zarr", "path": "*.zip"}}, "expected files that match "),
    ],
)
def test_check_says_what_the_page_says(data, tmp_path, capsys, change, message):
    if "existing" not in message:
        assert f"`{message.strip()}" in TEXT
    experiment = yaml.safe_load(BASE)
    experiment["data"].update(change)
    (tmp_path / "page.yml").write_text(yaml.safe_dump(experiment))
    status, printed = run(capsys, ["check", "page.yml"])
    assert status == 2
    assert message in printed
