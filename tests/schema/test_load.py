"""YAML → experiment: what a file may say, where its keys were written, and what overrides what."""

import datetime as dt
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from credit_like import registry
from credit_like.schema import sites
from credit_like.schema.base import Section
from credit_like.schema.errors import ExperimentError, Place
from credit_like.schema.experiment import Experiment
from credit_like.schema.launch import SiteSection
from credit_like.schema.load import dump_experiment, load_experiment, load_located

TEXT = """
name: small
save_loc: runs/small
data:
  source: {type: netcdf, path: data.nc}
  timestep: 6h
  prognostic: {surface: [t2m, {name: u, var: u10, levels: [10]}]}
  train: [[2000-01-01, 2000-01-10], [2001-01-01, 2001-01-10]]
  valid: [2002-01-01, 2002-01-10]
  test: [2003-01-01, 2003-01-10]
model: {type: persistence}
"""


@pytest.fixture
def write(tmp_path):
    def _write(text, name="experiment.yml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return path

    return _write


def problems(path, *overrides):
    with pytest.raises(ExperimentError) as error:
        load_experiment(path, overrides)
    return error.value.problems


def test_sections_arrive_as_written_and_defaults_are_filled_in(write):
    experiment = load_experiment(write(TEXT))
    assert experiment.name == "small"
    assert [period.start for period in experiment.data.train] == ["2000-01-01T00:00:00", "2001-01-01T00:00:00"]
    assert experiment.data.source[0].path == "data.nc"
    assert experiment.data.prognostic.surface[1].var == "u10"
    assert experiment.loss.type == "mse"
    assert experiment.trainer.checkpoint.async_ is True


def test_yaml_traps_are_read_as_people_mean_them(write):
    """YAML 1.1 would read 1e-3 as text, 12:00:00 as 43200, on and yes as true, 010 as eight, a date as an object."""
    text = TEXT.replace("surface: [t2m,", "surface: [n, on, yes, t2m,") + (
        "trainer:\n  optimizer: {type: adamw, learning_rate: 1e-3, weight_decay: 1.0e-2}\n  epochs: 010\n"
        "pbs: {walltime: 12:00:00}\nloss: {type: mse, variable_weights: {on: 2, n: 1.5}}\n"
    )
    experiment = load_experiment(write(text))
    assert [spec.name for spec in experiment.data.prognostic.surface][:3] == ["n", "on", "yes"]
    assert experiment.trainer.optimizer.learning_rate == 1e-3
    assert experiment.trainer.optimizer.weight_decay == 1e-2
    assert experiment.trainer.epochs == 10
    assert experiment.pbs.walltime.total_seconds() == 12 * 3600
    assert experiment.loss.variable_weights == {"on": 2.0, "n": 1.5}


def test_an_included_file_is_relative_to_its_includer_and_overridden_by_it(write):
    write("model: {type: persistence}\ntrainer: {epochs: 3, amp: true}\n", "parts/model.yml")
    write("include: model.yml\nseed: 7\n", "parts/both.yml")
    path = write("include: [parts/both.yml]\ntrainer: {epochs: 5}\n" + TEXT.replace("model: {type: persistence}\n", ""))
    experiment, locations = load_located(path)
    assert (experiment.seed, experiment.trainer.epochs, experiment.trainer.amp) == (7, 5, True)
    assert locations.resolve(("trainer", "epochs"))[0] == Place(str(path), 2)
    assert locations.resolve(("trainer", "amp"))[0] == Place(str(path.parent / "parts/model.yml"), 2)


def test_a_file_included_on_two_ways_does_not_conflict_with_itself(write):
    write("seed: 7\n", "base.yml")
    write("include: base.yml\n", "one.yml")
    write("include: base.yml\n", "two.yml")
    assert load_experiment(write("include: [one.yml, two.yml]\n" + TEXT)).seed == 7


def test_a_mapping_and_a_value_for_one_key_of_two_includes_conflict(write):
    write("trainer: {checkpoint: {keep: 2}}\n", "one.yml")
    two = write("trainer:\n  checkpoint: 5\n", "two.yml")
    found = problems(write("include: [one.yml, two.yml]\ntrainer: {checkpoint: {keep: 1}}\n" + TEXT))
    assert [(p.file, p.line, p.key) for p in found] == [(str(two), 2, "trainer.checkpoint")]


def test_variables_are_replaced_and_typed_by_what_they_hold(write, monkeypatch):
    monkeypatch.setenv("ROOT", "/scratch/me")
    monkeypatch.setenv("EPOCHS", "4")
    text = TEXT.replace("runs/small", "${ROOT}/runs/$EPOCHS.x") + "trainer: {epochs: $EPOCHS}\n"
    experiment = load_experiment(write(text))
    assert experiment.save_loc == "/scratch/me/runs/4.x"
    assert experiment.trainer.epochs == 4


def test_an_empty_variable_is_set(write, monkeypatch):
    monkeypatch.setenv("PREFIX", "")
    assert load_experiment(write(TEXT.replace("runs/small", "${PREFIX}runs"))).save_loc == "runs"


PATHS = (
    "save_loc",
    "data.source.path",
    "data.source.regrid.like",
    "data.source.cache.folder",
    "data.statistics",
    "data.prognostic.surface.1.path",
    "data.dynamic_forcing.surface.0.irradiance",
    "start_from.path",
    "inference.output.path",
    "evaluation.baselines.other",
    "evaluation.truth.path",
    "include",
)
"""The keys that name a file or a folder."""


@pytest.mark.parametrize("key", PATHS)
def test_a_tilde_is_the_home_folder(write, tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(write("", "elsewhere/none").parent)
    write("seed: 7\n", "there")
    text = TEXT + (
        "start_from: {path: runs/other}\n"
        "evaluation: {baselines: {other: other.nc}, truth: {type: zarr, path: truth.zarr}}\n"
    )
    text = text.replace(
        "{type: netcdf, path: data.nc}", "{type: zarr, path: s.zarr, cache: {size: 1GB}, regrid: {like: a.nc}}"
    )
    text += "include: a.yml\n"
    write("seed: 1\n", "a.yml")
    sun = "[{name: sun, compute: solar, irradiance: tsi.txt}]"
    text = text.replace("  train:", f"  dynamic_forcing: {{surface: {sun}}}\n  train:")
    if key == "include":
        assert load_experiment(write(text.replace("include: a.yml", "include: ~/there"))).seed == 7
        return
    value: Any = load_experiment(write(text), [f"{key}=~/there"])
    for part in key.split("."):
        if part.isdigit() or isinstance(value, dict):
            value = value[int(part) if part.isdigit() else part]
        else:
            (value,) = value if isinstance(value, tuple) else (value,)
            value = getattr(value, part)
    assert value == f"{tmp_path}/there"


def test_overrides_are_yaml_and_reach_into_lists(write):
    overrides = [
        "trainer.epochs=2",
        "trainer.parallelism={data: ddp}",
        "data.prognostic.surface.1.var=wind",
        "trainer.grad_max_norm=null",
        "save_loc=a=b",
        "seed=1",
        "seed=2",
    ]
    experiment = load_experiment(write(TEXT), overrides)
    assert experiment.trainer.epochs == 2
    assert experiment.trainer.parallelism.data == "ddp"
    assert experiment.data.prognostic.surface[1].var == "wind"
    assert experiment.trainer.grad_max_norm is None
    assert (experiment.save_loc, experiment.seed) == ("a=b", 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.epochs=x", "--set trainer.epochs=x: trainer.epochs: expected a whole number, got 'x'"),
        ("trainer.epocs=1", "--set trainer.epocs=1: trainer.epocs: expected a key of trainer"),
        ("trainer", "--set trainer: expected key=value such as trainer.epochs=2"),
        ("=1", "--set =1: expected key=value"),
        ("trainer..x=1", "--set trainer..x=1: expected key=value"),
        ("seed=[1", "--set seed=[1: expected YAML, got"),
        (
            "data.prognostic.surface.5=q",
            "--set data.prognostic.surface.5=q: data.prognostic.surface.5: expected a position",
        ),
        ("save_loc=$NOT_SET_ANYWHERE", "expected the environment variable NOT_SET_ANYWHERE to be set"),
    ],
)
def test_a_wrong_override_is_named_as_such(write, override, message):
    assert [str(problem) for problem in problems(write(TEXT), override) if message in str(problem)]
    assert all(str(problem).startswith("--set ") for problem in problems(write(TEXT), override))


def test_problems_are_reported_together_in_the_order_of_the_file(write):
    path = write(TEXT.replace("6h", "6x").replace("persistence", "persistance") + "trainer: {epochs: 0}\nseed: -1\n")
    assert [(problem.line, problem.key) for problem in problems(path)] == [
        (6, "data.timestep"), (11, "model.type"), (12, "trainer.epochs"), (13, "seed"),
    ]  # fmt: skip


def test_a_missing_key_is_not_reported_beside_its_misspelling(write):
    found = problems(write(TEXT.replace("timestep:", "timstep:")))
    assert [(problem.key, "did you mean 'timestep'?" in problem.message) for problem in found] == [
        ("data.timstep", True)
    ]


@pytest.mark.parametrize("name", ["absent.yml", "folder"])
def test_what_is_no_file_is_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (problem,) = problems(tmp_path / name)
    assert "expected an experiment file" in problem.message


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "x.yml").write_bytes(b"name: \xff\xfe\n")
    (problem,) = problems(tmp_path / "x.yml")
    assert "expected UTF-8" in problem.message


_word = st.text("abcdefghij", min_size=1, max_size=8)
_times = st.dates().filter(lambda day: day.year >= 1000)
_changes = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**40),
        "name": _word,
        "trainer": st.fixed_dictionaries(
            {},
            optional={
                "epochs": st.integers(1, 1000),
                "grad_max_norm": st.none() | st.floats(1e-3, 1e3),
                "stop_after": st.none() | st.timedeltas(dt.timedelta(seconds=1)),
                "checkpoint": st.fixed_dictionaries(
                    {
                        "every": st.integers(1, 10**6) | st.sampled_from(["30min", "90s", "01:00:00"]),
                        "async": st.booleans(),
                    }
                ),
            },
        ),
        "loss": st.fixed_dictionaries(
            {
                "type": st.sampled_from(["mse", "mae", "huber"]),
                "variable_weights": st.dictionaries(_word, st.floats(0, 10)),
            }
        ),
        "inference": st.fixed_dictionaries(
            {},
            optional={
                "lead": st.integers(1, 100) | st.sampled_from(["10d", "6h", "12 steps"]),
                "init": _times.map(str)
                | st.lists(_times.map(str), min_size=1)
                | st.just(["2000-01-01", "2000-02-01", "12h"]),
                "ensemble": st.fixed_dictionaries({"members": st.integers(1, 5)}),
                "output": st.sampled_from([{"format": "zarr"}, {"type": "netcdf"}]),
            },
        ),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(_changes)
def test_a_resolved_experiment_loads_back_equal(write, changes):
    """Through plain data, and through the YAML that a run keeps."""
    plain = load_experiment(write(TEXT)).to_dict()
    experiment = Experiment.model_validate({**plain, **changes})
    again = Experiment.model_validate(experiment.to_dict())
    assert again == experiment
    assert again.to_dict() == experiment.to_dict()
    stored = write(dump_experiment(experiment), "stored.yml")
    assert load_experiment(stored) == experiment


MINIMAL: dict[str, Any] = {
    "name": "small",
    "save_loc": "runs/small",
    "data": {
        "source": {"type": "netcdf", "path": "data.nc"},
        "timestep": "6h",
        "prognostic": {"surface": ["t2m"]},
        "train": ["2000-01-01", "2000-01-10"],
        "valid": ["2002-01-01", "2002-01-10"],
        "test": ["2003-01-01", "2003-01-10"],
    },
    "model": {"type": "persistence"},
}
SECTIONS: dict[str, dict[str, Any]] = {
    **{
        f"{kind} perturbations": {"inference": {"ensemble": {"members": 3, "perturbations": {"type": kind, **keys}}}}
        for kind, keys in (("gaussian", {}), ("lagged", {}), ("bred", {"cycles": 2, "cycle": "12h"}))
    },
    "initial times": {"inference": {"init": ["2003-01-01", "2003-01-05", "12h"]}},
    "lag": {"inference": {"ensemble": {"perturbations": {"type": "lagged", "lag": "12h"}}}},
    "derive": {"inference": {"derive": [{"pressure_levels": [850, 500]}, "geopotential"]}},
    "evaluation": {
        "evaluation": {
            "regions": {"all": {"south": 0, "north": 10}, "box": {"south": 0, "north": 1, "west": 350, "east": 20}},
            "thresholds": {"quantiles": [0.1]},
        }
    },
    "trainer": {"trainer": {"parallelism": {"data": "fsdp2", "replicate": 2}, "checkpoint": {"every": 5}}},
    "site": {"site": {"queues": {"q": {"nodes": ["this"]}}}, "pbs": {"rollout": {"nodes": 2}}},
    "noise": {"model": {"type": "wxformer", "noise": {}}},
    "energy": {"physics": [{"type": "energy"}]},
    "relax": {"physics": [{"type": "relax", "variables": ["t2m"], "climatology": ["2000-01-01", "2000-01-10"]}]},
    "clip": {"physics": [{"type": "clip", "minimum": None, "maximum": 1.0}]},
    **{
        name: {"data": {**MINIMAL["data"], "source": source}}
        for name, source in {
            "synthetic": {"type": "synthetic"},
            "region": {"type": "netcdf", "path": "a.nc", "region": {"west": 0, "east": 10}, "regrid": {"degrees": 1.0}},
            "half a region": {"type": "zarr", "path": "a.zarr", "region": {"south": 0}},
        }.items()
    },
}
"""Sections that check themselves as a whole, with the fewest keys that these checks allow, and with others."""


def instances(value: Any):
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from instances(getattr(value, name))
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from instances(item)


@pytest.mark.parametrize("changes", [pytest.param(changes, id=name) for name, changes in SECTIONS.items()])
def test_a_section_that_checks_itself_loads_back_with_all_its_defaults(write, changes):
    experiment = Experiment.model_validate({**MINIMAL, **changes})
    assert Experiment.model_validate(experiment.to_dict()) == experiment
    assert load_experiment(write(dump_experiment(experiment), "stored.yml")) == experiment


def test_the_sweep_has_every_section_that_checks_itself():
    for kind in registry.KINDS:
        for name in registry.names(kind):
            registry.module(kind, name)
    known = [Section]
    for section in known:
        known += section.__subclasses__()
    checked = {
        section
        for section in known
        if section.__module__.startswith("credit_like.")
        and any(found.info.mode == "after" for found in section.__pydantic_decorators__.model_validators.values())
    }
    assert checked
    reached = {
        type(section)
        for changes in SECTIONS.values()
        for section in instances(Experiment.model_validate({**MINIMAL, **changes}))
    }
    assert {section.__qualname__ for section in checked - reached} == set()


def test_keys_of_another_type_of_perturbations_are_refused(write):
    text = TEXT + "inference: {ensemble: {members: 2, perturbations: {type: lagged, cycles: 2, cycle: 6h}}}\n"
    (problem,) = problems(write(text))
    assert "expected no cycle, cycles with `type: lagged`" in problem.message


@pytest.mark.parametrize(
    "text",
    ["1e3", "007", "null", "true", "$HOME", "${X", "$$", "a: b", "- a", "#", "2000-01-01", "é", " ", "1_000",
     "a\nb", " a\n\n b ", "a\rb", "a\x85b", "a\u2028b", "a\x0bb", "a\x00", "\ufeff", "a" * 300 + " \x85" + "b" * 300],
)  # fmt: skip
def test_any_text_survives_in_a_stored_experiment(write, text):
    experiment = Experiment.model_validate({**load_experiment(write(TEXT)).to_dict(), "save_loc": text})
    assert load_experiment(write(dump_experiment(experiment), "stored.yml")).save_loc == text


FULL = (
    TEXT
    + """
loss: {type: huber, variable_weights: {t2m: 2}}
trainer:
  parallelism: {data: fsdp2, tensor: 2}
  optimizer: {type: adamw, learning_rate: 1e-3, betas: [0.9, 0.95]}
  checkpoint: {every: 30min, async: true}
inference: {init: [2003-01-01, 2003-01-05, 12h], output: {format: zarr}}
pbs: {walltime: 12:00:00, ngpus: 4}
"""
)
_pieces = st.sampled_from(
    [
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "\n",
        "  ",
        "#",
        "&a",
        "*a",
        "!!int ",
        "'",
        '"',
        "null",
        "-1",
        "x",
        "$A",
        "<<: ",
        "? ",
        "|",
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 12), _pieces), min_size=1, max_size=3))
def test_whatever_is_cut_or_put_into_a_file_it_loads_or_is_told_where_it_is_wrong(write, edits):
    text = FULL
    for at, cut, piece in edits:
        text = text[:at] + piece + text[at + cut :]
    path = write(text)
    try:
        load_experiment(path)
    except ExperimentError as error:
        for problem in error.problems:
            assert problem.file == str(path)
            assert 0 <= problem.line <= text.count("\n") + 1
            assert problem.message.isprintable()


def test_a_shipped_model_is_included_from_any_folder(write):
    path = write("include: [models/wxformer-tiny/model.yml]\n" + TEXT.replace("model: {type: persistence}\n", ""))
    assert load_experiment(path).model.type == "wxformer"


def test_a_file_beside_the_experiment_takes_precedence_over_a_shipped_one(write):
    write("model: {type: persistence}\n", "models/wxformer-tiny/model.yml")
    path = write("include: [models/wxformer-tiny/model.yml]\n" + TEXT.replace("model: {type: persistence}\n", ""))
    assert load_experiment(path).model.type == "persistence"


@pytest.mark.parametrize("name", ["models/../pyproject.toml", "/models/wxformer-tiny/model.yml", "tests/conftest.py"])
def test_only_models_and_sites_are_shipped(write, name):
    assert any("include" in str(p) for p in problems(write(f"include: [{name}]\n" + TEXT)))


@pytest.mark.parametrize("site", sorted(sites.profiles()))
def test_a_shipped_site_is_the_same_by_its_name_and_included(write, site):
    named = load_experiment(write(TEXT + f"site: {site}\n"))
    included = load_experiment(write(f"include: config/site/{site}.yml\n" + TEXT))
    assert included.site == named.site
    assert included.site.name == site


CHANGED = "site: {nodes: {gpu: {gpus: 8, cpus: 96}}}\n"


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ([CHANGED], ["site=generic-pbs"]),
        (["site: generic-pbs\n"], ["site.nodes.gpu={gpus: 8, cpus: 96}"]),
        (["site: generic-pbs\n"], ["site={nodes: {gpu: {gpus: 8, cpus: 96}}}"]),
        ([CHANGED, "site: generic-pbs\n"], []),
        (["site: generic-pbs\n", CHANGED], []),
        ([CHANGED, "include: config/site/generic-pbs.yml\n"], []),
        ([CHANGED, "site: derecho\n"], ["site=generic-pbs"]),
    ],
)
def test_keys_of_the_experiment_change_the_site_that_is_named_elsewhere(write, files, overrides):
    for number, text in enumerate(files[1:]):
        write(text, f"{number}.yml")
    include = "".join(f"include: [{number}.yml]\n" for number in range(len(files) - 1))
    site = load_experiment(write(include + files[0] + TEXT), overrides).site
    if files[1:] == ["site: derecho\n"]:  # what changed Derecho does not change another one
        assert site == SiteSection.model_validate("generic-pbs")
    else:
        assert (site.name, site.scheduler, site.launcher) == ("generic-pbs", "pbs", "pbsdsh")
        assert (site.nodes["gpu"].gpus, site.nodes["gpu"].cpus, site.nodes["cpu"].cpus) == (8, 96, 32)


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        (["site: derrecho\n"], ["site.stop_before=5min"]),
        (["site: {stop_before: 5min}\n"], ["site=derrecho"]),
        (["site: {stop_before: 5min}\n", "site: derrecho\n"], []),
        (["site: derrecho\n", "site: {stop_before: 5min}\n"], []),
    ],
)
def test_a_misspelt_site_is_reported_beside_keys_that_would_change_it(write, files, overrides):
    for number, text in enumerate(files[1:]):
        write(text, f"{number}.yml")
    include = "".join(f"include: [{number}.yml]\n" for number in range(len(files) - 1))
    with pytest.raises(ExperimentError, match="got 'derrecho'; did you mean 'derecho'"):
        load_experiment(write(include + files[0] + TEXT), overrides)


def test_a_whole_site_is_replaced_by_another_one(write):
    stored = dump_experiment(load_experiment(write(TEXT + "site: derecho\n")))
    assert load_experiment(write(stored), ["site=local"]).site == SiteSection.model_validate("local")


def test_a_site_that_is_unknown_or_wrong_is_reported_once(write):
    (problem,) = problems(write(CHANGED + TEXT), "site=derrecho")
    assert "did you mean 'derecho'" in problem.message
    mine = write("site: {scheduler: pbs, setup: [$NOT_SET_ANYWHERE]}\n", "mine.yml")
    (problem,) = problems(write(CHANGED + TEXT), f"site={mine}")
    assert (problem.file, problem.line, problem.key) == (str(mine), 1, "site.setup.0")


@pytest.mark.parametrize(
    ("output", "overrides", "expected"),
    [
        ("{format: zarr}", ["inference.output.type=netcdf"], "netcdf"),
        ("{type: zarr}", ["inference.output.format=netcdf"], "netcdf"),
        ("{format: zarr}", ["inference.output={type: netcdf}"], "netcdf"),
        ("{type: zarr}", ["inference={output: {format: netcdf}}"], "netcdf"),
        ("{format: netcdf, type: netcdf}", ["inference.output.type=zarr"], "zarr"),
        ("{format: netcdf, type: netcdf}", [], "netcdf"),
        ("{format: zarr}", ["inference.output.type=netcdf", "inference.output.format=zarr"], "zarr"),
    ],
)
def test_format_and_type_are_one_key_and_the_last_one_counts(write, output, overrides, expected):
    experiment = load_experiment(write(TEXT + f"inference: {{output: {output}}}\n"), overrides)
    assert experiment.inference.output.type == expected
    write(f"inference: {{output: {output}}}\n", "base.yml")
    for key in ("type", "format"):
        own = f"include: base.yml\ninference: {{output: {{{key}: netcdf}}}}\n"
        assert load_experiment(write(own + TEXT)).inference.output.type == "netcdf"


def test_different_values_of_format_and_type_are_refused(write):
    (problem,) = problems(write(TEXT + "inference: {output: {format: zarr, type: netcdf}}\n"))
    assert "got type 'netcdf' and format 'zarr', remove one" in problem.message


def test_a_variable_that_is_not_set_counts_only_where_its_value_does(write):
    unset = TEXT.replace("runs/small", "$NOT_SET_ANYWHERE/x").replace("data.nc", "$NOT_SET_ANYWHERE/y")
    path = write(unset)
    assert [problem.key for problem in problems(path)] == ["save_loc", "data.source.path"]
    assert [problem.key for problem in problems(path, "save_loc=runs/x")] == ["data.source.path"]
    assert load_experiment(path, ["save_loc=$NO", "save_loc=x", "data.source.path=z"]).save_loc == "x"
    write("save_loc: $NOT_SET_ANYWHERE\ntrainer: {phases: [{epochs: $NOT_SET_ANYWHERE}]}\n", "base.yml")
    assert load_experiment(write("include: base.yml\ntrainer: {phases: []}\n" + TEXT)).save_loc == "runs/small"
    assert [problem.key for problem in problems(write("include: base.yml\n" + TEXT))] == ["trainer.phases.0.epochs"]
    assert {problem.key for problem in problems(write("include: $NOT_SET_ANYWHERE\n" + TEXT))} == {"include"}
