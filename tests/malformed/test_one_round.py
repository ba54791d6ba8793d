"""The problems of an experiment come in one round, each once, wherever one does not hide another."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from credit_like.check import checked_experiment
from credit_like.schema.errors import ExperimentError


def files(folder) -> None:
    """Levels with members and in Pa, without leap days; surface fields of another calendar; a truncated third file."""
    random = np.random.default_rng(0)
    grid = {"latitude": np.linspace(90, -90, 37), "longitude": np.arange(72) * 5.0}
    times = xr.date_range("2000-02-01", periods=120, freq="6h", calendar="noleap", use_cftime=True)
    level = ("time", "level", "latitude", "longitude")
    shape = (120, 3, 37, 72)
    pressure = [85000.0, 50000.0, 20000.0]
    data = {name: (level, random.normal(size=shape).astype("f4")) for name in ("u", "v")}
    data["q"] = (("time", "number", *level[1:]), random.normal(size=(120, 2, 3, 37, 72)).astype("f4"))
    xr.Dataset(data, {**grid, "time": times, "level": pressure, "number": [0, 1]}).to_netcdf(folder / "pl.nc")
    surface = {name: (("time", *level[2:]), random.normal(size=(120, 37, 72)).astype("f4")) for name in ("sp", "t2m")}
    standard = xr.date_range("2000-02-01", periods=120, freq="6h", use_cftime=False)
    xr.Dataset(surface, {**grid, "time": standard}).to_netcdf(folder / "sfc.nc")
    (folder / "broken.nc").write_bytes((folder / "sfc.nc").read_bytes()[:2000])


EXPERIMENT = """
name: nine
save_loc: {folder}/run
data:
  source:
    - {{type: netcdf, path: "{folder}/pl.nc"}}
    - {{type: netcdf, path: "{folder}/sfc.nc"}}
    - {{type: netcdf, path: "{folder}/broken.nc"}}
  timestep: 6h
  levels: [850, 500, 200]
  prognostic: {{level: [u, v, q], surface: [sp, t2m]}}
  train: [2000-02-01, 2000-02-20]
  valid: [2000-02-21, 2000-02-29T18]
  test: [2004-03-01, 2004-03-02]
  statistics: {folder}/absent.nc
model: {{type: wxformer}}
physics: [{{type: clip, variables: [tq]}}]
evaluation: {{metrics: [rmsee]}}
inference: {{output: {{variables: [w]}}}}
trainer: {{global_batch_size: 3, micro_batch_size: 2}}
"""

EXPECTED = {
    "file": ("data.source.2", "broken.nc"),
    "dimensions": ("data.source.0: expected q of", "set data.source.0.select: {number: 0}"),
    "levels": (
        "data.levels: expected levels of u, v ",
        "got 850, 500, 200; did you mean 85000, 50000, 20000?",
        "levels: [85000, 50000, 20000]",
    ),
    "calendar": ("data.source.1: expected one calendar, got noleap in", "standard in"),
    "day": ("data.valid: expected days of the noleap calendar", "2000-02-29"),
    "times": ("data.test: expected a period with times of the store", "2004-03-01"),
    "statistics": ("data.statistics: expected a netCDF file, got", "run `credit-like preprocess`"),
    "physics": ("physics.0.variables", "'tq'"),
    "plug-in": ("evaluation.metrics.0", "did you mean 'rmse'?"),
    "output": ("inference.output", "'w'"),
    "batch": ("trainer.global_batch_size: expected", "3"),
    "latitude": ("model: stage", "padding_conf: {activate: true, pad_lat: ["),
    "longitude": ("model: stage", "padding_conf: {activate: true, pad_lon: ["),
}


def problems(folder, text: str) -> list[str]:
    file = folder / "nine.yml"
    file.write_text(text.format(folder=folder))
    with pytest.raises(ExperimentError) as refused:
        checked_experiment(file, scoring=True)
    return str(refused.value).splitlines()


def test_all_problems_come_in_one_round_each_once(tmp_path) -> None:
    files(tmp_path)
    said = problems(tmp_path, EXPERIMENT)
    left = list(said)
    for name, parts in EXPECTED.items():
        matching = [line for line in left if all(part in line for part in parts)]
        assert len(matching) == 1, (name, "\n".join(said))
        left.remove(matching[0])
    assert not left, "\n".join(said)
    lines = EXPERIMENT.splitlines()
    for line in said:
        place = line.split(": ")[0]
        assert place.startswith(f"{tmp_path}/nine.yml:"), line
        key = line.split(": ")[1].split(".")[-1 if not line.split(": ")[1][-1].isdigit() else -2]
        assert key in lines[int(place.rpartition(":")[2]) - 1] or key in ("source", "output", "model"), line


def test_what_one_problem_hides_is_not_said(tmp_path) -> None:
    """A variable that may be in the file that cannot be opened, and periods where the time step does not fit."""
    files(tmp_path)
    text = EXPERIMENT.replace("surface: [sp, t2m]", "surface: [sp, elsewhere]").replace("timestep: 6h", "timestep: 7h")
    said = "\n".join(problems(tmp_path, text))
    assert "got 'elsewhere'" not in said
    assert "data.timestep: expected a multiple of 6 h" in said
    assert "times of the store" not in said


@pytest.mark.parametrize("alone", [False, True], ids=["of several sources", "the only source"])
def test_repeated_times_hide_nothing(tmp_path, alone) -> None:
    files(tmp_path)
    with xr.open_dataset(tmp_path / "pl.nc") as levels:
        repeated = levels.isel(time=[*range(120), 119]).load()
    repeated.to_netcdf(tmp_path / "pl.nc")
    text = EXPERIMENT
    if alone:
        text = "\n".join(line for line in text.splitlines() if "sfc.nc" not in line and "broken.nc" not in line)
        text = text.replace(", surface: [sp, t2m]", "")
    said = problems(tmp_path, text)
    name = "data.source.0" if not alone else "data.source"
    told = [line for line in said if "expected each time once" in line]
    assert len(told) == 1, "\n".join(said)
    assert f"{name.removesuffix('.0')}.0: " in told[0]
    assert told[0].endswith(f"twice; set {name}.duplicates: first")
    missing = {key for key, parts in EXPECTED.items() if not any(all(part in line for part in parts) for line in said)}
    assert missing <= ({"file", "calendar", "dimensions"} if alone else set()), "\n".join(said)


def test_problems_of_the_schema_come_in_the_same_round(tmp_path) -> None:
    """What does not depend on a key that is not valid is checked all the same."""
    files(tmp_path)
    text = EXPERIMENT.replace("metrics: [rmsee]", "metrics: [rmsee], bootstraps: 100").replace(
        "micro_batch_size: 2", "micro_batch_size: 2, epochs: many"
    )
    alone, both = problems(tmp_path, EXPERIMENT), problems(tmp_path, text)
    further = [line for line in both if line not in alone]
    assert [line for line in alone if line not in both] == []
    assert len(further) == 2, "\n".join(further)
    assert "evaluation.bootstraps: expected a key of evaluation" in further[0] + further[1]
    assert "trainer.epochs: expected a whole number, got 'many'" in further[0] + further[1]


@pytest.mark.parametrize(
    ("key", "value", "hidden"),
    [
        ("micro_batch_size: 2", "micro_batch_size: two", {"batch"}),
        ("levels: [850, 500, 200]", "levels: 850 hPa", set(EXPECTED) - {"plug-in", "batch"}),
        ("model: {{type: wxformer}}", "model: {{type: wxform}}", {"latitude", "longitude"}),
        ("metrics: [rmsee]", "metrics: rmsee", {"plug-in"}),
        ("timestep: 6h", "timestep: often", set(EXPECTED) - {"plug-in", "batch", "physics", "output"}),
    ],
)
def test_what_depends_on_a_key_that_is_not_valid_is_not_said(tmp_path, key, value, hidden) -> None:
    files(tmp_path)
    alone, said = problems(tmp_path, EXPERIMENT), problems(tmp_path, EXPERIMENT.replace(key, value))
    further = [line for line in said if line not in alone]
    assert len(further) == 1, "\n".join(further)
    names = {name for name, parts in EXPECTED.items() if not any(all(part in line for part in parts) for line in said)}
    assert names == hidden, "\n".join(said)
