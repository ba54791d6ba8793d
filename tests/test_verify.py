"""The conformance kit finds nothing wrong with good parts, and names what is wrong with bad ones."""

from pathlib import Path

import pytest

from credit_like import verify as kit
from credit_like.check import checked_experiment
from credit_like.cli import main
from credit_like.parallel.processes import Answer
from credit_like.schema.load import load_experiment
from tests.experiments import DEMO, SHORT, SMALL_MODEL

PARTS = Path(__file__).parent / "parts"
FILE = PARTS / "experiment.yml"
CASES = {case.name: case for case in kit.CASES}
ROOT = Path(__file__).parents[1]

MODEL = """\
import os
from typing import Literal
from credit_like.schema.base import Section

class Config(Section):
    type: Literal["bad"] = "bad"
    predict: Literal["increment", "state"] = "increment"

def build(config, *, in_channels, out_channels, frames, height, width):
    import torch
    from torch import nn
    from credit_like.nn.conv import Conv2d

    class Planted(nn.Module):
        _pointwise = True
        _fsdp2_shard = {unit}

        def __init__(self):
            super().__init__()
            self.register_buffer("offset", torch.zeros(()), persistent=False)

        def reset_buffers(self):
            self.offset.fill_({buffer})

        def forward(self, x):
            return {forward}

    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_channels, self.frames, self.height, self.width = in_channels, frames, height, width
            self.first, self.planted = Conv2d(in_channels * frames, 4), Planted()
            self.last = Conv2d(4, out_channels)

        def forward(self, x):
            x = x.flatten(1, 2).movedim(1, -1)
            return self.last(self.planted(self.first(x))).movedim(-1, 1)[:, :, None]

    return Bad()
"""
LOSS = """\
from typing import Literal
from credit_like.losses import LossConfig

class Config(LossConfig):
    type: Literal["bad"] = "bad"

def pointwise(config, error):
    return error.square() * (16 / error.shape[-2])
"""


def rows(experiment, *names):
    found = {row.name: row for row in kit.verify(experiment, [CASES[name] for name in names])}
    assert found.pop("loss: gradient against differences").ok
    found.pop("one process, weights rounded", None)
    return found


def with_model(tmp_path, forward, buffer="0.0", unit=False):
    """The experiment with a model of two convolutions and something between them."""
    (tmp_path / "bad" / "models").mkdir(parents=True)
    text = MODEL.replace("{forward}", forward).replace("{buffer}", buffer).replace("{unit}", str(unit))
    (tmp_path / "bad" / "models" / "bad.py").write_text(text)
    plugins = f"plugins=[{PARTS / 'my_parts'}, {tmp_path / 'bad'}]"
    return load_experiment(FILE, [plugins, "model={type: bad}", f"save_loc={tmp_path / 'run'}"])


def test_good_parts_are_the_same_in_two_processes(tmp_path):
    found = rows(load_experiment(FILE, [f"save_loc={tmp_path}"]), "domain 2")
    assert list(found) == ["domain 2", "domain 2, continued in one process"]
    for row in found.values():
        assert row.ok, row
        assert {"outputs", "loss", "weights"} <= row.errors.keys()
    assert not list(tmp_path.iterdir())


def test_a_global_mean_in_a_model_is_found(tmp_path):
    row = rows(with_model(tmp_path, "x + x.mean((1, 2), keepdim=True)"), "domain 2")["domain 2"]
    assert "planted" in (row.refused or row.first), row
    assert row.refused or not row.ok


def test_a_buffer_that_depends_on_the_rank_is_found(tmp_path):
    row = rows(with_model(tmp_path, "x + self.offset", "float(os.environ['RANK'])"), "FSDP2 2")["FSDP2 2"]
    assert not row.ok
    assert row.first == "planted"


def test_noise_without_a_seed_is_found(tmp_path):
    noise = "x + torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4))))"
    row = rows(with_model(tmp_path, f"x if x.is_meta else {noise}"), "again")["again"]
    assert not row.ok
    assert row.first == "planted"


def test_a_state_that_each_forward_changes_is_found(tmp_path):
    """Recomputed in backward, the layer has moved on; in every other way to run it moves alike."""
    experiment = with_model(tmp_path, "x * (1 + self.offset.add_(0.01).clone())", unit=True)
    found = rows(experiment, "again", "recomputed")
    assert found["again"].ok
    assert not found["recomputed"].ok
    assert found["recomputed"].first.startswith("gradient of ")


SOMETIMES = """
            self.extra, self.calls = nn.Linear(4, 4), 0

        def used(self):
            self.calls += 1
            return self.calls % 2
"""


def test_a_layer_that_only_some_steps_use_is_trained_alike_in_every_layout(tmp_path, monkeypatch):
    line = 'self.register_buffer("offset", torch.zeros(()), persistent=False)'
    assert line in MODEL
    monkeypatch.setitem(globals(), "MODEL", MODEL.replace(line, line + SOMETIMES))
    experiment = with_model(tmp_path, "x + (self.extra(x) if self.used() else 0)", unit=True)
    row = rows(experiment, "FSDP2 2")["FSDP2 2"]
    assert row.ok, row


SMALL = {"outputs": 1e-15, "loss": 1e-15, "gradients": 1e-14}


@pytest.mark.parametrize(
    ("rounded", "within", "beyond"), [(1e-16, 9e-11, 2e-10), (1e-11, 9e-10, 2e-9), (1e-7, 9e-6, 2e-5)]
)
def test_weights_may_differ_as_much_as_rounding_makes_them(rounded, within, beyond):
    runs = [[Answer("done", SMALL | {"weights": rounded * part})] for part in (0.1, 1.0, 0.5)]
    row = kit._effect_of_rounding(runs)
    assert row.ok
    allowed = kit.allowance(row.errors)
    assert kit.Row("DDP 2", SMALL | {"weights": within}, allowed=allowed).ok
    assert not kit.Row("DDP 2", SMALL | {"weights": beyond}, allowed=allowed).ok
    assert not kit.Row("DDP 2", SMALL | {"weights": within, "gradients": 2e-10}, allowed=allowed).ok


def test_steps_that_rounding_changes_as_much_as_errors_are_not_compared():
    row = kit._effect_of_rounding([[Answer("done", SMALL | {"weights": size})] for size in (1e-9, 2e-6, 1e-9)])
    assert not row.ok
    assert "changes by at most 1e-06, got 2.0e-06" in row.failed
    assert kit._effect_of_rounding([[Answer("failed", "Traceback\nValueError: no")]]).failed == "ValueError: no"


def test_a_loss_with_a_denominator_of_its_own_is_found(tmp_path):
    (tmp_path / "bad" / "losses").mkdir(parents=True)
    (tmp_path / "bad" / "losses" / "bad.py").write_text(LOSS)
    plugins = f"plugins=[{PARTS / 'my_parts'}, {tmp_path / 'bad'}]"
    row = rows(load_experiment(FILE, [plugins, "loss={type: bad}", f"save_loc={tmp_path}"]), "domain 2")["domain 2"]
    assert not row.ok
    assert row.errors["outputs"] < kit.TOLERANCE
    assert row.first == f"loss.bad ({tmp_path / 'bad' / 'losses' / 'bad.py'})"


@pytest.mark.parametrize(("along", "layout", "what"), [(1, "domain 2", "rows"), (2, "domain 1 × 2", "columns")])
def test_a_layout_that_the_model_refuses_is_no_failure(tmp_path, along, layout, what):
    experiment = with_model(tmp_path, f"x.flip({along})")
    row = rows(experiment, layout)[layout]
    assert row.ok
    assert f"mixes {what}" in row.refused
    assert "flip" in row.refused
    kit.print_rows(experiment.name, [row])


def test_a_loss_whose_gradient_is_wrong_is_found(tmp_path):
    (tmp_path / "bad" / "losses").mkdir(parents=True)
    text = LOSS.replace("error.square() * (16 / error.shape[-2])", "error.detach() * error")
    (tmp_path / "bad" / "losses" / "bad.py").write_text(text)
    plugins = f"plugins=[{PARTS / 'my_parts'}, {tmp_path / 'bad'}]"
    [row] = kit.verify(load_experiment(FILE, [plugins, "loss={type: bad}", f"save_loc={tmp_path}"]), [])
    assert row.errors["slope"] == pytest.approx(0.5, rel=1e-6) or row.errors["slope"] == pytest.approx(1.0, rel=1e-6)
    assert not row.ok


def test_the_command_says_what_differs(tmp_path, capsys, monkeypatch):
    experiment = with_model(tmp_path, "x")
    bad = kit.Row("DDP 2", {"outputs": 1e-3, "loss": 1e-3}, "planted")
    monkeypatch.setattr(kit, "verify", lambda *arguments: iter([kit.Row("again", {"loss": 0.0}), bad]))
    assert kit.run(experiment) == 1
    assert "DDP 2: differs first at planted" in capsys.readouterr().out
    monkeypatch.setattr(kit, "verify", lambda *arguments: iter([kit.Row("domain 2", refused="rows are mixed")]))
    assert kit.run(experiment) == 0
    assert "domain 2: refused: rows are mixed" in capsys.readouterr().out


PHASES = (
    "trainer.phases=[{epochs: 1}, {epochs: 1, freeze: ['stages.0.*']}, "
    "{epochs: 1, loss: {type: crps}, members: 2, optimizer: {learning_rate: 1.0e-4}}, "
    "{epochs: 2, optimizer: {learning_rate: 1.0e-5}}]"
)


def of_phases(folder):
    return load_experiment(DEMO, [*SHORT, SMALL_MODEL, "model.noise={channels: 2}", PHASES, f"save_loc={folder}"])


def test_every_phase_that_computes_something_else_is_compared(tmp_path, capsys, monkeypatch):
    given = []
    monkeypatch.setattr(kit, "verify", lambda each, cases, _: given.append((each, cases)) or iter([kit.Row("again")]))
    experiment = of_phases(tmp_path)
    assert kit.run(experiment) == 0
    assert [(each.loss.type, each.trainer.members, each.trainer.freeze) for each, _ in given] == [
        ("mse", 1, ()), ("mse", 1, ("stages.0.*",)), ("crps", 2, ()),
    ]  # fmt: skip
    assert [any(case.ensemble > 1 for case in cases) for _, cases in given] == [False, False, True]
    said = capsys.readouterr().out
    assert [line.partition(":")[0] for line in said.splitlines() if "largest relative" in line] == [
        f"{experiment.name}, phase {number}" for number in (0, 1, 2)
    ]


@pytest.mark.long
def test_frozen_parameters_and_members_of_phases_are_the_same_in_every_layout(tmp_path):
    (_, frozen), (_, members) = kit.compared_phases(of_phases(tmp_path))[1:]
    for each, names in ((frozen, {"DDP 2", "FSDP2 2"}), (members, {"ensemble 2"})):
        rows = list(kit.verify(each, [case for case in kit.cases_of(each) if case.name in names]))
        assert all(row.ok and not row.refused for row in rows), rows
        assert names <= {row.name for row in rows}


CORRECTIONS = [
    "{type: zonal-filter, variables: [precipitation], highest: 21}",
    "{type: spherical-filter, variables: [height, column_water], winds: [u, v], highest: 21, damping: 0.1, order: 2, "
    "climatology: [2000-01-01, 2000-01-09]}",
    "{type: conserve, variables: [height, v]}",
    "{type: relax, variables: [u, height], rate: 0.1, climatology: [2000-01-01, 2000-01-09]}",
    "{type: zonal-energy, variables: [v, column_water], lowest: 4}",
    "{type: zonal-energy, variables: [precipitation], rate: 0.5, climatology: [2000-01-01, 2000-01-09]}",
]


def assert_that_all_hold(found, count):
    names = {row.name for row in found} - {"one process, weights rounded"}
    assert len(names) == count
    assert all(row.ok and not row.refused for row in found), found


@pytest.mark.parametrize("layout", ["domain: 2", "tensor: 2, data: fsdp2", "domain: [2, 2], data: ddp", "ensemble: 2"])
def test_the_command_takes_an_experiment_of_any_layout(tmp_path, monkeypatch, layout):
    """All layouts are compared with one process, whatever layout the experiment has."""
    given = []
    monkeypatch.setattr(kit, "run", lambda experiment: given.append(experiment) or 0)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(FILE), "--set", f"save_loc={tmp_path}", "--set", f"trainer.parallelism={{{layout}}}"])
    assert ended.value.code == 0
    assert given[0].trainer.parallelism.degrees.sample_ranks == 1


@pytest.mark.slow
def test_steps_of_random_numbers_of_leads_are_compared(tmp_path):
    given = ["data.forecast_len=2", "trainer.random_forecast_len=true", "seed=1", f"save_loc={tmp_path / 'run'}"]
    found = rows(load_experiment(FILE, given), "FSDP2 2")
    assert found["FSDP2 2, continued in one process"].ok


@pytest.mark.long
def test_every_comparison_of_parts_from_outside(tmp_path, monkeypatch):
    """By the command, whose exit status says so."""
    printed = []
    monkeypatch.setattr(kit, "print_rows", lambda title, rows: printed.extend(rows))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(FILE), "--set", f"save_loc={tmp_path / 'run'}"])
    assert_that_all_hold(printed, len(CASES) + 3)
    assert ended.value.code == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "count"),
    [
        pytest.param(("FSDP2 2", "tensor 2", "domain 3", "domain 2 × 2"), 4 + 2, id="some"),
        pytest.param(tuple(CASES), len(CASES) + 3, id="every", marks=pytest.mark.long),
    ],
)
def test_comparisons_of_a_wxformer(tmp_path, cases, count):
    """A small one, whose heads and windows suffice for every layout, with corrections."""
    short = ["data.source.steps=60", "data.train=[2000-01-01, 2000-01-09]", "data.valid=[2000-01-09T06, 2000-01-11]"]
    short += [
        "trainer.scheduler.warmup_steps=1",
        "data.test=[2000-01-11T06, 2000-01-15T18]",
        "inference={init: 2000-01-11T06, lead: 12h}",
    ]
    short += ["model={dim: [16, 32, 64, 128], depth: [1, 1, 1, 1], dim_head: 8, padding_conf: {pad_lat: [32, 32]}}"]
    short += [f"physics=[{', '.join(CORRECTIONS)}]"]
    experiment = checked_experiment(ROOT / "config" / "demo.yml", [*short, f"save_loc={tmp_path / 'run'}"])[0]
    assert_that_all_hold(list(kit.verify(experiment, [CASES[name] for name in cases])), count)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("{type: spectral}", marks=pytest.mark.long),
        pytest.param("{type: log-cosh}", marks=pytest.mark.long),
        "{type: sum, terms: [{loss: {type: log-cosh}}, {weight: 0.5, loss: {type: spectral}}]}",
    ],
)
def test_losses_are_the_same_in_bands_of_rows(tmp_path, loss):
    for row in rows(load_experiment(FILE, [f"save_loc={tmp_path}", f"loss={loss}"]), "domain 2").values():
        assert row.ok, row
