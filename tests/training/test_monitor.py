"""The log of a run on a disk that fills or has lost its power, and the curves of a start that was killed."""

from __future__ import annotations

import errno
import json
import os

import pytest

from credit_like.training.monitor import JsonLines, Monitor

ROW = {"epoch": 0, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "samples_per_second": 8.0, "data_wait": 0.0}


class Disk:
    """A file on a disk that takes at most `most` bytes at once, and `room` in all."""

    def __init__(self, file, most: int, room: int) -> None:
        self.file, self.most, self.room = file, most, room

    def write(self, content) -> int:
        size = min(len(content), self.most, self.room)
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= size
        return self.file.write(content[:size])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_row_is_written_whole_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    rows = JsonLines(path)
    rows._file = disk = Disk(rows._file, most=5, room=40)
    rows.write({"step": 1, "loss": 0.5})
    whole = path.read_bytes()
    assert json.loads(whole) == {"step": 1, "loss": 0.5}
    with pytest.raises(OSError, match="No space left"):
        rows.write({"step": 2, "loss": 0.25})
    assert disk.room == 0, "the disk has taken a part of the row"
    assert path.read_bytes() == whole
    disk.room = 100
    rows.write({"step": 2, "loss": 0.25})
    rows.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("broken", [b"\0\0\0\n", b'{"step": 2, "lo{"step": 3}\n', b"[]\n", b"\n", b'{"step": "2"}\n'])
def test_a_line_that_is_no_row_takes_no_other_with_it(tmp_path, broken, caplog) -> None:
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step}).encode() + b"\n" for step in range(1, 8)]
    path.write_bytes(b"".join([broken, *lines[:2], broken, broken, *lines[2:5], broken, *lines[5:], broken]))
    rows = JsonLines(path)
    rows.truncate(5, True)
    assert path.read_bytes() == b"".join(lines[:5])
    assert "dropped 3 lines that are not valid rows of the log" in caplog.text
    caplog.clear()
    rows.write({"step": 6})
    rows.sync()
    assert path.read_bytes() == b"".join(lines[:6])
    rows.truncate(4, True)
    rows.write({"step": 5})
    rows.close()
    assert path.read_bytes() == b"".join(lines[:5])
    assert not caplog.text
    assert [one.name for one in tmp_path.iterdir()] == ["log.jsonl"]


def test_what_follows_the_checkpoint_goes_also_without_a_newline_at_the_end(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    kept = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(kept + b'{"step": 2, "valid_loss": 1}\n{"step": 3}\n{"step": 4')
    rows = JsonLines(path)
    rows.truncate(2, validated=False)
    rows.close()
    assert path.read_bytes() == kept


@pytest.mark.parametrize("begun", [0, 2])
def test_the_curves_of_a_killed_start_end_where_the_next_one_begins(tmp_path, monkeypatch, begun) -> None:
    """Also of one that was killed before its first checkpoint.

    TensorBoard reads its files in the order of the second in their names, so each start has a second of its own.
    """
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for second, last in enumerate((5, 3)):
        monkeypatch.setattr("time.time", lambda second=second: 1.8e9 + second)
        monitor = Monitor(tmp_path, 9)
        monitor.open(begun, True)
        for step in range(begun + 1, last + 1):
            monitor.step({"step": step, "memory_mib": 1.0, **ROW})
        monitor.close()
    curves = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == list(range(begun + 1, 4))


def test_without_permission_there_is_no_tensorboard(tmp_path, monkeypatch, caplog) -> None:
    """Its writer has a thread, which would end with a traceback."""
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(os, "access", lambda path, how: False)  # root may write anywhere
    monitor = Monitor(tmp_path, 2)
    monitor.open(0, validated=False)
    monitor.close()
    assert "no TensorBoard: expected a folder that may be written to, got" in caplog.text
    assert not list((tmp_path / "tensorboard").iterdir())
