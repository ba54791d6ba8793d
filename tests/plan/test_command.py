"""`credit-like plan` from the command line: one message for what cannot be, JSON for what can."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from credit_like.plan import advice
from credit_like.plan.layouts import Candidate
from credit_like.plan.machine import PRESETS
from credit_like.plan.run import grid_of, simulate_all
from tests.experiments import call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "expected --gpus"),
        (["--gpus", "4,x"], "expected --gpus"),
        (["--gpus", "4", "--gpu", "h10"], "did you mean"),
        (["--gpus", "4", "--grid", "64"], "expected --grid ROWSxCOLUMNS"),
        (["--gpus", "4", "--grid", "181x360"], "expected a grid that suits the model"),
        (["--gpus", "4", "--plot", "nowhere/at/all.png"], "--plot: expected a file in an existing folder"),
        (["--gpus", "4", "--set", "trainer.tensor=2"], "trainer.tensor"),
    ],
)
def test_one_message_and_status_2(arguments, message, capsys):
    assert call("plan", "config/demo.yml", *arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_grid_without_data():
    with_poles, without = grid_of("181x360"), grid_of("32×64")
    assert (with_poles.height, with_poles.width, with_poles.latitude[0]) == (181, 360, 90)
    assert without.latitude[0] == pytest.approx(90 - 180 / 64)
    assert with_poles.is_periodic


TWO = {(2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1)}
FOUR = {(4, 1, 1, 1), (4, 1, 1, 2), (4, 1, 1, 4), (2, 1, 2, 1), (2, 1, 2, 2), (2, 2, 1, 1), (1, 2, 2, 1)}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "layouts"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.long)])
def test_plan_of_some_ranks(small, tmp_path, capsys, ranks, layouts):
    """Every row has as many ranks as there are; parameters and optimiser state are shared by the shards."""
    file = tmp_path / "small.yml"
    file.write_text(yaml.safe_dump(small.experiment(global_batch_size=ranks).to_dict()))
    assert (
        call("plan", file, "--gpus", str(ranks), "--grid", "64x128", "--json", "--plot", tmp_path / "memory.png") == 0
    )
    out, err = capsys.readouterr()
    document = json.loads(out)
    lines = [line.split(": ")[0] for line in err.splitlines() if " ranks, layout " in line]
    assert len(lines) >= len(layouts)  # the model refuses some more
    assert lines == [f"{ranks} ranks, layout {n} of {len(lines)}" for n in range(1, len(lines) + 1)]
    assert (tmp_path / "memory.png").exists()
    rows = {(x["dp"], x["tensor"], x["domain"], x["replicate"]): x for x in document["layouts"]}
    assert all(dp * tensor * domain == ranks and dp % copies == 0 for dp, tensor, domain, copies in rows)
    assert layouts <= set(rows)

    def held(layout):
        memory = rows[layout]["ranks"][0]["memory"]
        return memory["parameters"] + memory["optimiser state"]

    whole = held((ranks, 1, 1, ranks))
    for dp, tensor, domain, copies in rows:
        if tensor == 1:
            assert held((dp, tensor, domain, copies)) == pytest.approx(whole / (dp * domain / copies), rel=0.03)
    assert document["recommended"] == document["layouts"][0]["parallelism"]


@pytest.mark.slow
def test_submit_says_the_plan_and_refuses_what_cannot_fit(small, tmp_path, capsys):
    file, machine = tmp_path / "small.yml", tmp_path / "machine.yml"
    trainer = {"parallelism": {"data": "none"}, "global_batch_size": 2}
    document = small.experiment(**trainer).to_dict() | {"save_loc": str(tmp_path / "run")}
    file.write_text(yaml.safe_dump(document))
    submit = ["submit", file, "--site", "local", "--dry-run", "--gpu", machine]
    for memory, more, status in ((1e-3, [], 2), (1e-3, ["--force"], 0)):
        machine.write_text(yaml.safe_dump(PRESETS["a100-40gb"].assumptions() | {"memory": memory}))
        assert call(*submit, *more) == status
        out, err = capsys.readouterr()
        if status:
            assert "expected a layout that fits, got" in err
        else:
            assert "GB" in out.splitlines()[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine.yml", "small.yml"]


@pytest.mark.long
def test_of_a_training_in_phases_the_hungriest_is_planned(small, known):
    def planned(changes):
        experiment = small.experiment(global_batch_size=1, **changes.pop("trainer", {}), **changes)
        ((row,), _) = simulate_all(experiment, [Candidate(1)], PRESETS["a100-40gb"], small.grid, known=known)
        (rank,) = row.ranks
        return rank.parts

    phases = [{"forecast_len": 2}, {"forecast_len": 3}, {"forecast_len": 6, "backprop_steps": 1}]
    assert planned({"trainer": {"phases": phases}}) == planned({"forecast_len": 3})
    of_type = [{"optimizer": {"type": name}} for name in ("muon", "adamw")]
    muon, adamw = map(planned, [{"trainer": dict(one)} for one in of_type])
    assert muon["optimiser state"] < adamw["optimiser state"]
    assert planned({"trainer": {"phases": of_type}}) == adamw


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "compile", "compiled"), [(False, None, False), (False, True, True), (True, None, True)]
)
def test_a_machine_is_planned_with_its_own_kernels(small, simulate, known, gpu, compile, compiled):
    """As `train` would compute there: a CPU compiles only where it is told to. So does the advice after memory ran out."""
    chosen = small.experiment(global_batch_size=1, parallelism={"data": "none"}, compile=compile)
    layout, machine = Candidate(1, data="none"), replace(PRESETS["h100"], streams=gpu)
    ((row,), _) = simulate_all(chosen, [layout], machine, small.grid, known=known)
    (rank,), wanted = row.ranks, simulate(chosen, layout, gpu=gpu)
    assert (rank.operations, rank.parts) == (wanted.operations, wanted.parts)
    assert rank.compiled is compiled
    assert advice._planned(chosen, 1, small.grid, gpu, known).fullest.parts == wanted.parts
