"""The benchmark of the first picture: its stages, and its table."""

from __future__ import annotations

import datetime as dt
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("first_picture", ROOT / "benchmarks" / "first_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_targets_are_those_of_the_makefile(benchmark):
    rules = (ROOT / "Makefile").read_text()
    commands = benchmark.stages("torch==2.13.0")
    assert list(commands) == ["clone", "install", "demonstration"]
    assert commands["install"][1] == ".venv/.installed-user"
    assert "USER_STAMP := $(VENV)/.installed-user" in rules
    assert "\ndemo: " in rules


def test_stages_are_timed_and_a_failure_ends_them(benchmark, tmp_path):
    found = benchmark.measured({"one": [sys.executable, "-c", "print(1)"]}, tmp_path, {})
    assert found.keys() == {"one"}
    assert found["one"] > 0
    with pytest.raises(subprocess.CalledProcessError):
        benchmark.measured({"two": [sys.executable, "-c", "raise SystemExit(3)"]}, tmp_path, {})


def test_the_table_adds_up(benchmark):
    text = benchmark.page({"clone": 6.0, "install": 54.0, "demonstration": 300.0}, 1.5, dt.date(2026, 1, 2))
    assert "| demonstration | 5.0 |" in text
    assert "| together | 6.0 |" in text
    assert "load of the machine at the start 1.5" in text
