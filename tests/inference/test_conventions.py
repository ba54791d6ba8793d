"""Forecast files against the checker of the CF conventions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from world import make_context, make_experiment

from credit_like.inference.forecast import write_forecasts

CHECKER = shutil.which("compliance-checker", path=str(Path(sys.executable).parent))
# The layout wants initial times to be called `time`; the checker then asks for another standard name than theirs.
CALLED_TIME = "Coordinate variable 'time' should have standard_name='time', found: 'forecast_reference_time'"


@pytest.mark.skipif(CHECKER is None, reason="the package compliance-checker is not installed")
def test_the_checker_finds_no_error(data, tmp_path):
    files = {}
    for flavour in ("cf", "weatherbench2"):
        for members in (1, 2):
            ensemble = {"members": members, "amplitude": {"u": 0.5}}
            output = {"type": "netcdf", "flavour": flavour}
            experiment = make_experiment(
                data, tmp_path / f"{flavour}{members}", init="2000-01-09", lead="12h", output=output, ensemble=ensemble
            )
            write_forecasts(make_context(experiment), "step-7")
            (file,) = (tmp_path / f"{flavour}{members}").rglob("*.nc")
            files[str(file)] = {CALLED_TIME} if flavour == "weatherbench2" else set()
    report = tmp_path / "report.json"
    command = [CHECKER, "-t", "cf:1.11", "-c", "strict", "-f", "json_new", "-o", report, *files]
    subprocess.run(command, capture_output=True, check=False)
    found = json.loads(report.read_text())
    assert found.keys() == files.keys()
    for file, known in files.items():
        errors = {text for part in found[file]["cf:1.11"]["high_priorities"] for text in part["msgs"]}
        assert errors == known, file
