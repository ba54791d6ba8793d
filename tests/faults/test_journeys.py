"""Experiments with random options through the commands of a user: what `check` accepts is trained, stopped, resumed and scored."""

from __future__ import annotations

import json
import random
import signal
from contextlib import nullcontext

import pytest
import yaml

from tests.faults import harness
from tests.parallel.drawn import as_training, draw, written
from tests.training.continued import stopped_in_step

ENSEMBLE = {"members": 2, "amplitude": {"u": 0.5, "temperature": 0.2}}


def command(_rank, _world, _port, _save_loc, section) -> int:
    """Run a command; with `stop: (step, signal)` this process gets a signal in that step."""
    with stopped_in_step(*section["stop"]) if section["stop"] else nullcontext():
        return harness.called(section["arguments"])


def run(folder, *arguments, stop=None) -> int:
    """The status of a command, which shows no traceback and no warning of Python."""
    log = folder / "command.0.out"
    log.unlink(missing_ok=True)
    job = harness.Job(folder / "command", {"arguments": [str(a) for a in arguments], "stop": stop}, body=command)
    assert job.wait(), log.read_text()
    text = log.read_text()
    assert "Traceback" not in text, text
    assert "Warning: " not in text, text
    return job.end()[0]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 212))
def test_the_commands_of_a_user(tmp_path, seed):
    r = random.Random(seed)
    drawn = as_training(draw(seed, tmp_path, domain=(1, 1), tensor=1, ensemble=1))
    file = written(drawn, tmp_path)
    document = drawn.sections | {"trainer": drawn.sections["trainer"] | drawn.trainer}
    document["trainer"] |= {"global_batch_size": 4, "micro_batch_size": r.choice([1, 2, 4])}
    document["trainer"] |= {"checkpoint": {"every": 1, "keep": 2, "async": r.choice([True, False])}}
    document["inference"] = {
        "init": ["2000-01-06", "2000-01-06T12", "12h"],
        "lead": "12h",
        "output": {"type": r.choice(["zarr", "netcdf"])},
        **({"ensemble": ENSEMBLE} if r.random() < 0.5 else {}),
    }
    file.write_text(yaml.safe_dump(document))
    whole, parts, further = (tmp_path / name for name in ("whole", "parts", "further"))

    def call(name, save_loc, *more, **options):
        return run(tmp_path, name, file, "--set", f"save_loc={save_loc}", *more, **options)

    assert call("check", whole) == 0
    assert call("train", whole) == 0
    # Two phases of an epoch with two steps each: within a phase, and at the boundary.
    number = r.choice([signal.SIGTERM, signal.SIGKILL])
    assert call("train", parts, stop=(r.choice([2, 3, 4]), number)) == (0 if number == signal.SIGTERM else -number)
    assert call("train", parts) == 0
    harness.assert_same(whole, parts)
    for name in ("rollout", "evaluate", "plot"):
        assert call(name, whole) == 0
    assert json.loads((whole / "status.json").read_text())["state"] == "finished"
    assert (whole / "evaluation" / "report.html").exists()
    assert run(tmp_path, "runs", "--compare", whole, parts) == 0
    assert run(tmp_path, "export", whole, "--output", tmp_path / "weights.safetensors") == 0
    assert call("train", further, "--set", f"start_from={{path: {tmp_path / 'weights.safetensors'}}}") == 0
