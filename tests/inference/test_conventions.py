"""Forecast files against the checker of the CF conventions."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from world import make_context, make_experiment

from credit_like.data.units import same_dimensions
from credit_like.grid import Grid
from credit_like.inference.forecast import write_forecasts
from credit_like.inference.layout import STANDARD_NAMES, ForecastLayout
from credit_like.schema.data import VariableSpec
from credit_like.variables import Variable

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


@pytest.mark.parametrize(
    ("name", "units", "expected"),
    [
        ("tp", "m", "lwe_thickness_of_precipitation_amount"),
        ("tp", "mm", "lwe_thickness_of_precipitation_amount"),
        ("tp", "kg m**-2", "precipitation_amount"),
        ("total_precipitation", "kg m-2 s-1", "precipitation_flux"),
        ("total_precipitation", "K", None),
        ("z", "m**2 s**-2", "geopotential"),
        ("z", "gpm", "geopotential_height"),
        ("wap", "Pa s-1", "lagrangian_tendency_of_air_pressure"),
        ("w", "m/s", "upward_air_velocity"),
        ("q", "g kg-1", "specific_humidity"),
        ("t", "degC", "air_temperature"),
        ("t", "who knows", None),
        ("t", "", "air_temperature"),
        ("t", None, "air_temperature"),
    ],
)
def test_the_standard_name_is_one_of_the_units(name, units, expected):
    attrs = {name: {} if units is None else {"units": units}}
    variable = Variable(name, "diagnostic", (), VariableSpec(name=name))
    grid = Grid(np.array([-45.0, 45.0]), np.array([0.0, 180.0]))
    times = np.array(["2000-01-01"], "datetime64[s]")
    layout = ForecastLayout(times, (1,), 21600, 1, grid, (variable,), {name: ()}, attrs, {})
    assert layout.attrs_of(name).get("standard_name") == expected


@pytest.mark.skipif(CHECKER is None, reason="the package compliance-checker is not installed")
def test_standard_names_and_their_units_are_those_of_cf():
    table = importlib.resources.files("compliance_checker") / "data" / "cf-standard-name-table.xml"
    canonical = {
        entry.get("id"): entry.findtext("canonical_units")
        for entry in ElementTree.fromstring(table.read_bytes()).iter("entry")
    }
    for units, name in (pair for pairs in STANDARD_NAMES.values() for pair in pairs):
        assert same_dimensions(units, canonical[name]), name
