"""Files that are read as a whole: of anything else that may be at their place, one answer, soon and in little memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from credit_like.checkpoint import credit
from credit_like.checkpoint.credit_scalers import read_scalers
from credit_like.checkpoint.export import load_export
from credit_like.checkpoint.format import MANIFEST, read_manifest
from credit_like.checkpoint.package import CONFIG, open_package
from credit_like.checkpoint.transfer import Source
from credit_like.data.solar import read_irradiance
from credit_like.data.statistics import Statistics
from credit_like.derive.levels import read_levels
from credit_like.errors import UserError
from credit_like.evaluation.frames import log_frame
from credit_like.launch.chain import best_checkpoint, epochs_done, history, run_status
from credit_like.migrate import document
from credit_like.plan.machine import machine_of
from credit_like.runs import find_runs, read_run
from credit_like.schema.origin import StartFrom
from credit_like.small_files import read_small, read_yaml, yaml_values

SPARSE = 20 * 10**9
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "statistics": ("statistics.nc", Statistics.load),
    "an export": ("export.safetensors", load_export),
    "weights to start from": ("export.safetensors", lambda path: Source.open(StartFrom(path=str(path)))),
    "CREDIT's weights": ("checkpoint.pt", credit.read_checkpoint),
    "CREDIT's weights, safe": ("weights.safetensors", credit.read_checkpoint),
    "CREDIT's YAML": (
        "model.yml",
        lambda path: credit.import_credit(path.with_name("x.pt"), path, path.with_name("o")),
    ),
    "CREDIT's experiment": ("credit.yml", document.read),
    "CREDIT's scalers": ("scaler.json", read_scalers),
    "a package": (CONFIG, lambda path: open_package(str(path.parent))),
    "a manifest": (MANIFEST, lambda path: read_manifest(path.parent)),
    "coefficients of levels": ("levels.yml", lambda path: read_levels(str(path))),
    "coefficients of levels in netCDF": ("levels.nc", lambda path: read_levels(str(path))),
    "a table of irradiance": ("sun.txt", lambda path: read_irradiance(str(path))),
    "a file of bench": ("gpu.yml", lambda path: machine_of(str(path), {})),
    "a log": ("log.jsonl", lambda path: log_frame(path.parent)),
}
"""The name of each file that a user gives or a command reads, and what reads it: it raises UserError."""
TOLERANT: dict[str, tuple[str, Callable[[Path], object]]] = {
    "status in runs": ("status.json", lambda path: read_run(path.parent).state),
    "log in runs": ("log.jsonl", lambda path: read_run(path.parent).step),
    "experiment in runs": ("experiment.yml", lambda path: len(read_run(path.parent).keys)),
    "status of a job": ("status.json", lambda path: run_status(path.parent).get("state")),
    "jobs": ("jobs/history.jsonl", lambda path: len(history(path.parent.parent))),
    "manifest of a job": (f"checkpoints/step-3/{MANIFEST}", lambda path: epochs_done(path.parents[2])),
    "best of a job": (f"checkpoints/step-3/{MANIFEST}", lambda path: best_checkpoint(path.parents[2])),
}
"""The same of what is passed over where it is damaged."""
ANSWERS = {"status in runs": "not begun", "status of a job": "unknown", "experiment in runs": 0, "jobs": 0}


def make(path: Path, kind: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "deep":
        path.write_text("[" * 100_000 + "\n\n")
    elif kind == "bomb":
        lines = ["data: {a: &l0 [1]}", *(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12))]
        path.write_text("\n".join(lines))
    else:
        with path.open("wb") as file:
            file.truncate(SPARSE)
    return path


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let this process have 3 GB more than it has, so that a file of 20 GB that is read as a whole is an error."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    has = 1024 * int(status["VmData"].split()[0])  # without mapped files
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (has + 3 * 10**9, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.timeout(900)  # a pipe would be waited for without end
@pytest.mark.parametrize("kind", ["pipe", "sparse", "deep", "bomb", "folder"])
@pytest.mark.parametrize("what", READERS)
def test_what_is_no_such_file_is_one_error(tmp_path, little_memory, what, kind) -> None:
    name, read = READERS[what]
    path, began = make(tmp_path / name, kind), time.process_time()
    with pytest.raises(UserError) as refused:
        read(path)
    assert time.process_time() - began < 5
    assert len(str(refused.value)) < 1500


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["pipe", "sparse", "deep", "bomb", "folder"])
@pytest.mark.parametrize("what", TOLERANT)
def test_what_is_no_such_file_is_passed_over(tmp_path, little_memory, what, kind) -> None:
    name, read = TOLERANT[what]
    path, began = make(tmp_path / name, kind), time.process_time()
    answer = read(path)
    assert time.process_time() - began < 5
    if (what, kind) != ("experiment in runs", "bomb"):
        assert answer == ANSWERS.get(what)


def test_the_sections_of_a_bomb_that_are_no_bombs_are_shown(tmp_path) -> None:
    """Sections are parsed one by one, so those whose aliases another one has are left out, however few they stand for."""
    make(tmp_path / "experiment.yml", "bomb")
    (tmp_path / "status.json").write_text("{}")
    (run,) = find_runs(tmp_path)
    assert run.keys == {"data.a": [1]}


def test_contents_and_limits(tmp_path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"
    with pytest.raises(ValueError, match="got more"):
        read_small(path, 4)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "b")
    path.write_bytes(b"\xef\xbb\xbfa: {b: [1, 2]}")
    assert read_yaml(path) == {"a": {"b": [1, 2]}}
    merges = "\n".join(
        ["l0: &l0 {a: 1}", *(f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}'] * 10)}]}}" for i in range(1, 9))]
    )
    for text, why in (
        (merges, "with aliases replaced"),
        ("a: [", "flow node"),
        ("a: &a [*a]", "contains itself"),
        ("a: 2000-13-01", "month"),
    ):
        with pytest.raises(ValueError, match=why):
            yaml_values(text)
