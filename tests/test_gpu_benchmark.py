"""The benchmark of a GPU, rehearsed on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def _run(*options):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.long
def test_every_row_is_measured(tmp_path):
    """The code of the measurements on a device, at reduced sizes; the memory of a step is that of the plan."""
    path = tmp_path / "gpu.md"
    done = _run("--small", "--output", str(path), "--minutes", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in path.read_text().splitlines() if line[:1] == "|"
    ]
    whats = [row[0] for row in rows[2:]]
    assert whats == [
        "machine",
        *["arithmetic"] * 4,
        "compilation",
        "repetition",
        "collectives",
        *["training step"] * 2,
        "loader",
        "beside definition",
    ]
    for row in rows[2:]:
        if row[0] in ("training step", "loader", "beside definition"):
            assert float(row[2]) > 0
            assert float(row[3]) > 0
        if row[0] == "training step":
            assert float(row[4].rstrip("%")) > 0
            assert 0.8 < float(re.search(r"\((.*) ×\)", row[7]).group(1)) < 1.2


def test_shares_of_a_slow_step_are_not_rounded_to_nothing(monkeypatch):
    """On a busy processor a step takes many times as long as on a free one."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    row = {"what": "training step", "setting": "small", "seconds": 1e5, "batch": 1, "memory": 2e9, "note": ""}
    about = {"small": True, "peak": 1.0, "bandwidth": 10.0}
    cells = gpu.line(row, about, {"flops": 1e9, "traffic": 1e9, "memory": 2e9}).split("|")
    assert [float(cell.strip(" %")) for cell in cells[5:7]] == pytest.approx([1e-6, 1e-4])


def test_without_a_device_it_is_one_message(tmp_path):
    path = tmp_path / "gpu.md"
    done = _run("--output", str(path))
    assert done.returncode == 1
    assert done.stderr == "expected a CUDA device, got none; rehearse on the CPU with --small\n"
    assert not path.exists()


def test_what_is_not_measured_is_a_row_that_says_so():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gpu
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    (row,) = gpu.in_process("step", 0.0, True, "1°,1,eager")
    assert row["failed"]
    assert row["note"] == "not measured: no time was left"
    (row,) = gpu.in_process("step", time.monotonic() + 300, True, "no such model,1,eager")
    assert row["failed"]
    assert "KeyError" in row["note"]
