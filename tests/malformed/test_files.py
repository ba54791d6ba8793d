"""Experiment files that are no text of an experiment at all, or are made to break their reader."""

import os
import socket
import time

import pytest

from credit_like import cli
from credit_like.errors import UserError
from credit_like.schema.load import load_experiment

# Seconds of the processor: what is meant is that there is an end, and not after minutes.
PATIENCE = 5


def refused(path, *overrides):
    """The one message about a file."""
    began = time.process_time()
    with pytest.raises(UserError) as error:
        load_experiment(path, overrides)
    assert time.process_time() - began < PATIENCE
    message = str(error.value)
    assert len(message.splitlines()) <= 51
    assert max(map(len, message.splitlines())) < 1000
    return message


@pytest.mark.parametrize("nested", ["[" * 3000, "a:" + " {a:" * 3000, "- " * 3000 + "a", "[" * 3000 + "]" * 3000])
def test_deep_nesting_is_refused(tmp_path, nested):
    (tmp_path / "x.yml").write_text(nested)
    assert "expected YAML, got" in refused(tmp_path / "x.yml")


def test_aliases_that_stand_for_billions_of_values_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    (tmp_path / "x.yml").write_text("\n".join(lines))
    assert "expected at most 100000 values" in refused(tmp_path / "x.yml")


def test_aliases_of_each_other_come_to_an_end(tmp_path):
    inner = "&a12 [*a0, *a11]"
    for i in reversed(range(12)):
        inner = f"&a{i} [{inner}, *a0, {', '.join(f'*a{j}' for j in range(i))}]" if i else f"&a0 [{inner}]"
    (tmp_path / "x.yml").write_text(f"x: {inner}\ny: [*a12, *a11, *a10]\n")
    refused(tmp_path / "x.yml")


@pytest.mark.parametrize("tag", ["!env HOME", "!!python/object:os.system x", "!!binary aGk=", "!!int 5", "! x"])
def test_tags_are_refused_with_their_line(tmp_path, tag):
    (tmp_path / "x.yml").write_text(f"name: x\nsave_loc: {tag}\n")
    message = refused(tmp_path / "x.yml")
    assert tag == "! x" or f"{tmp_path}/x.yml:2: expected YAML, got the tag" in message


def test_what_is_no_file_is_refused_at_once(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "long").write_text("lorem ipsum " * 2000)
    (tmp_path / "huge").write_text("#" * (5 * 2**20))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name, wanted in {
            "loop": "expected a readable file, got",
            "dangling": "got nothing there",
            "pipe": "got a pipe, socket or device",
            "socket": "got a pipe, socket or device",
            "binary": "expected UTF-8",
            "long": "expected a mapping of sections, got 'lorem ipsum",
            "huge": "got 5 MiB",
            "nothing\0": "expected the path of a file",
            "x" * 300: "expected a readable file, got",
            "long/x.yml": "expected a readable file, got",
            ".": "got a directory",
        }.items():
            assert wanted in refused(tmp_path / name)
            (tmp_path / "includes.yml").write_text(f"include: {name}\n".replace("\0", ""))
            told = "long" if name == "long" else "includes.yml:1: include"
            assert refused(tmp_path / "includes.yml").startswith(f"{tmp_path}/{told}")
    assert "a pipe, socket or device" in refused("/dev/zero")


def test_a_long_row_of_includes_ends(tmp_path):
    for i in range(2000):
        (tmp_path / f"{i}.yml").write_text(f"include: [{i + 1}.yml]\n")
    (tmp_path / "2000.yml").write_text("name: x\n")
    assert "include one another in turn" in refused(tmp_path / "0.yml")


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path):
    (tmp_path / "x.yml").write_text('"a\\e[31m\\nb": 1\nname: "x\\e[31m"\n')
    message = refused(tmp_path / "x.yml")
    assert not [c for c in message if c != "\n" and not c.isprintable()]
    assert "\\x1b[31m" in message


@pytest.mark.parametrize(
    "override",
    [
        "data.levels.²=1",
        "seed=" + "9" * 5000,
        "a." * 3000 + "a=1",
        "data=" + "[" * 3000,
        "save_loc=!env HOME",
        "=\0",
        "x=\udcff",
    ],
)
def test_overrides_are_refused_too(tmp_path, override):
    (tmp_path / "x.yml").write_text("name: x\ndata: {levels: [1, 2]}\n")
    began = time.process_time()
    with pytest.raises(UserError):
        load_experiment(tmp_path / "x.yml", [override])
    assert time.process_time() - began < PATIENCE


@pytest.mark.parametrize("share", ["²/²", "1/²", "9" * 5000 + "/2", "0/1", "2/1", "1/1/1", "-1/2", ""])
def test_a_wrong_share_is_refused(share, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["rollout", "x.yml", "--share", share])
    assert end.value.code == 2
    assert "--share: expected I/N" in capsys.readouterr().err
