"""`credit-like plan` from the command line: one message for what cannot be, JSON for what can."""

from __future__ import annotations

import json

import pytest

from credit_like import cli
from credit_like.plan.run import grid_of


def call(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "expected --gpus"),
        (["--gpus", "4,x"], "expected --gpus"),
        (["--gpus", "4", "--gpu", "h10"], "did you mean"),
        (["--gpus", "4", "--grid", "64"], "expected --grid ROWSxCOLUMNS"),
        (["--gpus", "4", "--grid", "181x360"], "expected a grid that suits the model"),
        (["--gpus", "4", "--plot", "nowhere/at/all.png"], "expected --plot"),
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


@pytest.mark.slow
def test_plan_of_two_ranks(small, tmp_path, capsys):
    """Every row has as many ranks as there are; parameters and optimiser state are shared by the shards."""
    import yaml

    file = tmp_path / "small.yml"
    file.write_text(yaml.safe_dump(small.experiment().to_dict()))
    assert call("plan", file, "--gpus", "2", "--grid", "64x128", "--json", "--plot", tmp_path / "memory.png") == 0
    document = json.loads(capsys.readouterr().out)
    assert (tmp_path / "memory.png").exists()
    rows = {(x["dp"], x["tensor"], x["domain"], x["replicate"]): x for x in document["layouts"]}
    assert set(rows) == {(2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1)}

    def held(*layout):
        memory = rows[layout]["ranks"][0]["memory"]
        return memory["parameters"] + memory["optimiser state"]

    whole = held(2, 1, 1, 2)
    assert held(2, 1, 1, 1) == pytest.approx(whole / 2, rel=0.02)
    assert held(1, 1, 2, 1) == pytest.approx(whole / 2, rel=0.02)
    assert document["recommended"] == document["layouts"][0]["parallelism"]
