"""What a message says of a file that cannot be read: its name and the reason on one line, without the system's numbers."""

import argparse
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from credit_like.checkpoint.errors import DamagedCheckpoint
from credit_like.checkpoint.export import load_export
from credit_like.data.files.regrid import read_weights
from credit_like.data.solar import read_irradiance
from credit_like.derive.levels import read_levels
from credit_like.errors import UserError, known_message, reading, reason
from credit_like.inference.writers._base import check_folder
from credit_like.migrate import document
from credit_like.outputs import check_own
from credit_like.plan.machine import machine_of

READERS: dict[str, Callable[[Path], object]] = {
    "an export": load_export,
    "coefficients of levels": lambda path: read_levels(str(path)),
    "a file of bench": lambda path: machine_of(str(path), {}),
    "a table of irradiance": lambda path: read_irradiance(str(path)),
    "CREDIT's YAML": document.read,
    "regridding weights": lambda path: read_weights(str(path)),
}


def make(path: Path, kind: str) -> Path:
    if kind == "folder":
        path.mkdir()
    elif kind == "garbage":
        path.write_bytes(b"\xff: [\n\x00")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind in YAML:
        path.write_text(YAML[kind])
    return path


YAML = {"date": "a: 2000-13-45\n", "digits": f"a: {'1' * 5000}\n", "nesting": "[" * 3000, "key": "{a: {[1]: 2}}\n"}
"""What is no syntax error, and no value either."""


@pytest.mark.parametrize("kind", ["nothing", "folder", "garbage", "loop", *YAML])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_file_that_cannot_be_read_is_one_line_with_its_path(tmp_path, read, kind) -> None:
    path = make(tmp_path / "file.yml", kind)
    with pytest.raises((UserError, DamagedCheckpoint)) as refused:
        read(path)
    said = str(refused.value)
    assert said.count(path.name) == 1
    assert "Errno" not in said
    assert "\n" not in said


@pytest.mark.parametrize("file", [None, "run/a.zarr/zarr.json"])
def test_what_may_not_be_read_is_not_to_be_removed(file) -> None:
    with (
        pytest.raises(
            UserError, match=f"^expected scores, got {file or 'run/a.zarr'}, which may not be read; change its"
        ),
        reading("scores", "run/a.zarr", "remove it"),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)


def test_a_folder_of_forecasts_that_may_not_be_read_is_one_message(tmp_path, monkeypatch) -> None:
    def refused(folder: Path) -> None:  # root may read anything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(UserError, match=f"a folder of forecasts, got {tmp_path}, which may not be read; change its"):
        check_folder(tmp_path)


def test_a_file_that_may_not_be_read_is_not_taken_for_another_one(tmp_path, monkeypatch) -> None:
    (tmp_path / "model.nc").write_text("scores")
    monkeypatch.setattr(os, "access", lambda path, how: how != os.R_OK)
    with pytest.raises(UserError, match=r"got .*model\.nc, which may not be read; change its permissions"):
        check_own("save_loc", tmp_path / "model.nc", "scores", lambda path: False)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "/a"), "Permission denied"),
        (OSError("no server\n answers"), "no server answers"),
        (ValueError("x" * 400), "x" * 300),
        (KeyError(), "KeyError"),
    ],
)
def test_reasons(error, text) -> None:
    assert reason(error) == text


def test_the_reason_of_a_server_is_kept():
    told = "The AWS Access Key Id you provided does not exist"
    with (
        pytest.raises(UserError, match=rf"s3://x, which may not be read: {told}; change"),
        reading("scores", "s3://x", "y"),
    ):
        raise PermissionError(told)


def test_an_exit_within_a_library_is_that_of_the_code_that_called_it():
    with pytest.raises(SystemExit) as end:
        argparse.ArgumentParser().parse_args(["--unknown"])
    assert re.search(rf"got an exit with status 2 at {re.escape(__file__)}:[0-9]+; change it", known_message(end.value))
