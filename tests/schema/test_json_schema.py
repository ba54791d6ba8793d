"""The JSON Schema describes what the loader accepts."""

from pathlib import Path

import pytest

from credit_like import registry
from credit_like.schema.errors import Place
from credit_like.schema.experiment import Experiment
from credit_like.schema.json_schema import experiment_schema
from credit_like.schema.load import _parse, read_plain

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[2]

WHOLE = {
    "include": ["a.yml"],
    "name": "x",
    "save_loc": "runs/x",
    "data": {
        "source": {"type": "netcdf", "path": "x.nc"},
        "timestep": "6h",
        "levels": [500, 850],
        "prognostic": {"level": ["U", {"name": "V", "var": "v"}], "surface": ["t2m"]},
        "train": [["2000-01-01", "2000-01-31"], ["2001-01-01", "2001-01-31"]],
        "valid": ["2002-01-01", "2002-01-31"],
        "test": {"start": "2003-01-01", "end": "2003-01-31"},
    },
    "model": {"type": "wxformer", "dim": [8, 16, 32, 64]},
    "trainer": {"checkpoint": {"every": 500, "async": False}, "grad_max_norm": None},
    "inference": {"init": ["2003-01-01", "2003-01-31", "12h"], "lead": 40, "output": {"format": "zarr"}},
    "pbs": {"walltime": "12:00:00"},
}


@pytest.fixture(scope="module")
def validator():
    schema = experiment_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def changed(**sections):
    return {**WHOLE, **sections}


@pytest.mark.parametrize(
    "experiment",
    [
        WHOLE,
        changed(data={**WHOLE["data"], "source": [{"type": "netcdf", "path": "a"}, {"type": "zarr", "path": ["b"]}]}),
        changed(inference={"init": "2003-01-01", "lead": "10d", "output": {"type": "netcdf"}}),
        changed(site="derecho"),
        changed(pbs={"walltime": 3600, "rollout": {"walltime": 60}}),
        changed(inference={"derive": [{"pressure_levels": [850, 500], "conventions": "credit"}, "geopotential"]}),
        changed(inference={"derive": {"fields": ["geopotential"]}, "output": {"path": "x"}}),
        changed(trainer={"optimizer": {"learning_rate": 1e-3}, "checkpoint": {"every": "30min"}}),
        changed(data={**WHOLE["data"], "source": {"type": "zarr", "path": "x", "cache": 10**9}}),
        changed(data={**WHOLE["data"], "source": {"type": "zarr", "path": "x", "cache": {"size": 10**9}}}),
    ],
)
def test_what_loads_is_valid(validator, experiment):
    assert not [error.message for error in validator.iter_errors(experiment)]
    Experiment.model_validate({key: value for key, value in experiment.items() if key != "include"})


@pytest.mark.parametrize(
    "experiment",
    [
        changed(trainr={}),
        changed(trainer={"epocs": 1}),
        changed(trainer={"epochs": "many"}),
        changed(model={"type": "wxfromer"}),
        changed(model={"type": "wxformer", "dimm": 3}),
        changed(model={"type": "wxformer", "noise": {"tpe": "decoder"}}),
        changed(inference={"output": {"pathh": "x"}}),
        changed(inference={"derive": ["geopotentiall"]}),
        changed(inference={"derive": [{"pressure_level": [500]}]}),
        changed(inference={"lead": 0}),
        changed(trainer={"optimizer": {"learning_rat": 1}}),
        changed(trainer={"checkpoint": {"every": -1}}),
        changed(pbs={"walltime": 0}),
        changed(pbs={"rollout": {"walltime": -1}}),
        changed(data={**WHOLE["data"], "train": ["2000-01-01"]}),
        changed(data={**WHOLE["data"], "prognostic": {"level": [{"nam": "U"}]}}),
        changed(inference={"output": {"format": "grb"}}),
    ],
)
def test_what_does_not_load_is_invalid(validator, experiment):
    assert list(validator.iter_errors(experiment))
    with pytest.raises(ValueError, match="validation error"):
        Experiment.model_validate({key: value for key, value in experiment.items() if key != "include"})


SHIPPED = [
    *(ROOT / "config").rglob("*.yml"),
    *(ROOT / "models").rglob("*.yml"),
    *(ROOT / "credit_like").glob("*.yml"),
]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_shipped_files_are_valid_though_others_have_their_required_keys(validator, monkeypatch, file):
    for name in ("SCRATCH", "ERA5", "CREDIT_LIKE_DATA"):
        monkeypatch.setenv(name, "/somewhere")
    alone = _parse(file.read_text(), Place(str(file), 1)).plain()
    for content in (alone, read_plain(file)):
        assert not [error.message for error in validator.iter_errors(content)]


def test_every_plugin_has_its_keys_in_it():
    definitions = experiment_schema()["$defs"]
    for kind in registry.KINDS:
        for name in registry.names(kind):
            if hasattr(registry.module(kind, name), "Config"):
                assert definitions[f"{kind}.{name}"]["properties"]["type"]["const"] == name


def test_keys_are_described_for_editors():
    definitions = experiment_schema()["$defs"]
    assert "Autoregressive steps" in definitions["DataSection"]["properties"]["forecast_len"]["description"]
