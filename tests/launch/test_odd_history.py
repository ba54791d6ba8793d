"""A job history and a status that hold other things than a run writes: one message, or passed over, but no traceback."""

from __future__ import annotations

import json
import random

import pytest

from credit_like import cli
from credit_like.launch import chain

EVENTS = [
    {"event": "submission", "time": "t", "mode": "train", "site": None, "scheduler": "local", "chain": "auto"},
    {"event": "submitted", "time": "t", "mode": "train", "ids": ["1"], "after": []},
    {"event": "begin", "time": "t", "mode": "train", "job": "1", "checkpoint": -1},
    {"event": "extended", "time": "t", "mode": "train", "job": "1", "next": "2"},
    {"event": "end", "time": "t", "mode": "train", "job": "1", "code": 0, "state": "continue", "step": 3},
    {"event": "stopped", "time": "t", "mode": "train", "job": "2", "reason": "no new checkpoint"},
    {"event": "withdrawn", "time": "t", "mode": "train", "submission": "train-2"},
    {"event": "cancellation", "time": "t"},
    {"event": "cancelled", "time": "t", "mode": "train", "job": "2", "reason": "before it began"},
]
STATUS = {"state": "running", "step": 3, "reason": "", "precision": "float32"}
ODD = [None, "", "x", "[/x]", "\0", 7, -1, 1.5, True, 10**30, [], {}, ["x"], [["x"]], {"x": []}]
CASES = [(number, key) for number, event in enumerate([*EVENTS, STATUS]) for key in event]


def answered(tmp_path, capsys, number, key, values) -> None:
    (tmp_path / "jobs").mkdir(exist_ok=True)
    for value in values:
        events = [*(dict(event) for event in EVENTS), dict(STATUS)]
        del events[number][key]
        if value != "absent":
            events[number][key] = value
        (tmp_path / "status.json").write_text(json.dumps(events.pop()))
        chain.history_file(tmp_path).write_text("".join(json.dumps(event) + "\n" for event in events))
        for command in ("status", "cancel"):
            with pytest.raises(SystemExit) as end:
                cli.main([command, str(tmp_path)])
            assert end.value.code in (None, 0, 1, 2), (command, value)
            assert (end.value.code == 2) == bool(capsys.readouterr().err.strip())
        assert chain.begin(tmp_path, "train", "3") in (0, 1, chain.FINISHED)
        assert chain.end(tmp_path, "train", "3", 0) in (0, 1)
        capsys.readouterr()


def test_some_absent_keys_and_odd_values(tmp_path, capsys) -> None:
    rng = random.Random(0)
    for case in rng.sample(CASES, 12):
        answered(tmp_path, capsys, *case, ["absent", rng.choice(ODD)])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("number", "key"), CASES)
def test_odd_values(tmp_path, capsys, number, key) -> None:
    answered(tmp_path, capsys, number, key, ODD)


def test_an_unknown_scheduler_is_named(tmp_path, capsys) -> None:
    (tmp_path / "jobs").mkdir()
    chain.history_file(tmp_path).write_text(json.dumps({**EVENTS[0], "scheduler": "lsf"}) + "\n")
    for command in ("status", "cancel"):
        with pytest.raises(SystemExit) as end:
            cli.main([command, str(tmp_path)])
        assert end.value.code == 2
        assert "got 'lsf'" in capsys.readouterr().err
