"""SIGKILL at any change of a file in a command other than `train`: the same command again leaves the same bytes."""

from __future__ import annotations

import datetime as dt
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from credit_like.checkpoint import credit
from credit_like.data import statistics
from tests.checkpoint.test_credit import ARGUMENTS, credit_state
from tests.experiments import representatives
from tests.faults import harness
from tests.faults.test_run_folder import arguments

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
"""Audit events, besides those that open a file for writing, that announce a change of the file system."""
CLIMATOLOGY = ["--climatology"]
NETCDF = ["--set", "inference.output={type: netcdf}"]
MEMBERS = ["--set", "inference.ensemble={members: 3, amplitude: {u: 0.5}}"]  # in batches of 2 and 1
COMMANDS = {
    "preprocess": ("preprocess", []),
    "preprocess-climatology": ("preprocess", CLIMATOLOGY),
    "preprocess-workers": ("preprocess", [*CLIMATOLOGY, "--workers", "2"]),
    "preprocess-rechunk": ("preprocess", ["--rechunk", "RUN/training.zarr"]),
    "rollout": ("rollout", []),
    "rollout-netcdf": ("rollout", NETCDF),
    "rollout-ensemble": ("rollout", MEMBERS),
    "rollout-ensemble-netcdf": ("rollout", [*NETCDF, *MEMBERS]),
    "evaluate": ("evaluate", []),
    "plot": ("plot", []),
    "export": ("export", []),
    "import-credit": ("import-credit", []),
}
NEEDS = {
    "preprocess": (),
    "rollout": ("train",),
    "export": ("train",),
    "evaluate": ("train", "rollout"),
    "plot": ("train", "rollout", "evaluate"),
    "import-credit": (),
}


def command_line(name: str, run: Path) -> list[str]:
    command, extra = COMMANDS[name]
    if command == "import-credit":
        credited = run / "credit"
        return [
            command,
            str(credited / "checkpoint.pt"),
            "--config",
            str(credited / "config.yml"),
            "-o",
            str(run / "imported"),
        ]
    return [*arguments(command, run), *(part.replace("RUN", str(run)) for part in extra)]


def call(rank: int, world: int, port: int, save_loc: str, section: dict) -> int:
    """Run a command; end by SIGKILL before the `at`-th change below the run's folder, else write the kinds of all changes."""
    kinds, pid = [], os.getpid()

    def count(event: str, arguments: tuple) -> None:
        if event == "open":
            change = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            change = event in CHANGES
        if not change or os.getpid() != pid:
            return
        path = str(arguments[0])
        if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # below an open folder, as shutil.rmtree removes
            path = f"{os.readlink(f'/proc/self/fd/{arguments[1]}')}/{path}"
        if not path.startswith(save_loc):
            return
        kinds.append(re.sub("[0-9a-f]{6,}|[0-9]+", "N", f"{event} {path.removeprefix(save_loc)}"))
        if len(kinds) == section["at"]:
            os.kill(pid, signal.SIGKILL)

    # The time of day is part of a file's history.
    statistics.dt = SimpleNamespace(UTC=dt.UTC, datetime=SimpleNamespace(now=lambda zone: dt.datetime(2000, 1, 1)))
    sys.addaudithook(count)
    status = harness.called(section["arguments"])
    Path(section["changes"]).write_text("\n".join(kinds))
    return status


def start(run: Path, changes: Path, line: list[str], at: int | None = None) -> list[str] | None:
    """Return the kinds of all changes of a command, each an event and a path without numbers; None if it was killed."""
    changes.unlink(missing_ok=True)
    job = harness.Job(run, {"arguments": line, "at": at, "changes": str(changes)}, body=call)
    assert job.wait()
    (code,) = job.end()
    assert code in (0, -signal.SIGKILL), run.with_suffix(".0.out").read_text()[-4000:]
    return changes.read_text().splitlines() if code == 0 else None


def contents(run: Path) -> dict[str, bytes]:
    """Return every file below a folder, and every folder, hidden or not."""
    return {
        str(path.relative_to(run)): path.read_bytes() if path.is_file() else b"folder"
        for path in sorted(run.rglob("*"))
        if path.name != ".lock"
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that gives the folder of a run in which some commands have ended."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def of(*commands: str) -> Path:
        if commands not in made:
            place = folder / "run"
            if commands:
                shutil.copytree(of(*commands[:-1]), place)
                assert start(place, folder / "changes", arguments(commands[-1], place))
            else:
                place.mkdir()
                converted = credit.convert_model_args(ARGUMENTS, upsample="transpose")
                torch.manual_seed(0)
                _, state = credit_state(converted.config, converted, old_keys=False)
                (place / "credit").mkdir()
                torch.save({"model_state_dict": state}, place / "credit" / "checkpoint.pt")
                (place / "credit" / "config.yml").write_text(
                    yaml.safe_dump({"model": {"type": "crossformer", **ARGUMENTS}})
                )
            made[commands] = place.rename(folder / ("-".join(commands) or "nothing"))
        return made[commands]

    return of


Moments = Callable[[random.Random, list[str]], list[list[int]]]
"""Chooses, from the kinds of all changes, the changes before which to kill: each list is one sequence of starts."""


def killed(tmp_path: Path, before: Path, name: str, moments: Moments) -> None:
    """Kill a command at some of its changes, each time where the last start left off; then let it end."""
    run, changes, rng = tmp_path / "run", tmp_path / "changes", random.Random(name)
    shutil.copytree(before, run)
    line = command_line(name, run)
    kinds = start(run, changes, line)
    assert kinds
    expected = contents(run)
    for kills in moments(rng, kinds):
        shutil.rmtree(run)
        shutil.copytree(before, run)
        for at in kills:
            start(run, changes, line, at)
        assert start(run, changes, line) is not None  # perhaps with nothing left to change
        found, what = contents(run), (name, kills, [kinds[at - 1] for at in kills])
        assert found.keys() == expected.keys(), (what, sorted(found.keys() ^ expected.keys()))
        different = [path for path in expected if found[path] != expected[path]]
        assert not different, (what, different)


def two(rng: random.Random, kinds: list[str]) -> list[list[int]]:
    return [[rng.randint(1, len(kinds) // 2 + 1), rng.randint(len(kinds) // 2, len(kinds))]]


def each_kind(rng: random.Random, kinds: list[str]) -> list[list[int]]:
    """Return one change of each kind by itself, and five sequences of four."""
    places = {kind: [i + 1 for i, other in enumerate(kinds) if other == kind] for kind in kinds}
    return [[rng.choice(some)] for some in places.values()] + [
        rng.choices(range(1, len(kinds) + 1), k=4) for _ in range(5)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    representatives(list(COMMANDS), "preprocess-climatology", "rollout", "rollout-ensemble", "export", "import-credit"),
)
def test_killed_twice(tmp_path, runs, name) -> None:
    killed(tmp_path, runs(*NEEDS[COMMANDS[name][0]]), name, two)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_before_every_kind_of_change(tmp_path, runs, name) -> None:
    killed(tmp_path, runs(*NEEDS[COMMANDS[name][0]]), name, each_kind)
