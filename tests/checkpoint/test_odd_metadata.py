"""A checkpoint that is intact by its checksum but holds other things than this release writes: one message, no traceback."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from credit_like import cli
from credit_like.checkpoint.export import load_export
from credit_like.checkpoint.files import to_json
from credit_like.checkpoint.format import seal, write_tensors
from credit_like.errors import UserError
from credit_like.inference.forecaster import load_forecaster
from tests.faults import tiny

ODD = ["absent", None, "x", -1, [], {}, {"type": "x"}, 10**30, ["a"], 1.5, True]


def places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of all values of a tree, of a list those below the first."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:1]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(body: dict, path: tuple, value: Any) -> dict:
    tree = copy.deepcopy(body)
    at = tree
    for part in path[:-1]:
        at = at[part]
    if value == "absent":
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return tree


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny.trainer(folder, epochs=1, checkpoint={"every": 1000, "keep": 1}).fit()
    return folder


def manifest_of(run: Path) -> Path:
    (path,) = (run / "checkpoints").glob("step-*/manifest.json")
    return path


def cases(finished: Path) -> list[tuple[tuple, Any]]:
    body = json.loads(manifest_of(finished).read_bytes())
    del body["checksum"]
    first = next(iter(body["tensors"]))
    return [
        (path, value) for path in places(body) if path[0] != "tensors" or path[1:2] in ((), (first,)) for value in ODD
    ]


def answer(finished: Path, tmp_path: Path, path: tuple, value: Any, capsys) -> None:
    """Every reader of a checkpoint ends with a status, or continues."""
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(finished, run)
    body = json.loads(manifest_of(run).read_bytes())
    del body["checksum"]
    manifest_of(run).write_bytes(seal(changed(body, path, value)))
    out = run / "out.safetensors"
    for line in (["checkpoints", run], ["checkpoints", run, "--verify"], ["export", run, "-o", out]):
        with pytest.raises(SystemExit) as end:
            cli.main(list(map(str, line)))
        said = capsys.readouterr().err
        assert end.value.code in (None, 0, 1, 2), (path, value)
        assert (end.value.code == 2) == bool(said.strip()), (path, value, said)
        if end.value.code == 2:
            assert not out.exists()
            assert not list(run.glob(".*.tmp"))
    with suppress(UserError):
        tiny.trainer(run, epochs=1).fit()


def test_some_odd_manifests_are_answered(finished, tmp_path, capsys) -> None:
    for path, value in random.Random(0).sample(cases(finished), 6):
        answer(finished, tmp_path, path, value, capsys)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_manifests_are_answered(finished, tmp_path, capsys, odd) -> None:
    for path, value in cases(finished):
        if value is odd:
            answer(finished, tmp_path, path, value, capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", {"type": "charm"}),
        ("trainer", {"scheduler": {"type": "charm"}}),
        ("trainer", {"optimizer": {"type": "charm"}}),
        ("model", {"type": "charm"}),
        ("data", None),
    ],
)
def test_an_export_that_names_an_unknown_part_is_one_message(finished, tmp_path, key, value, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", str(finished), "-o", str(tmp_path / "out.safetensors")])
    export = load_export(tmp_path / "out.safetensors")
    export.metadata["experiment"][key] = value
    odd = tmp_path / "odd.safetensors"
    write_tensors(odd, export.weights, {name: to_json(text).decode() for name, text in export.metadata.items()})
    with pytest.raises(UserError, match=f"expected the metadata of a checkpoint.*odd\\.safetensors.*{key}"):
        load_forecaster(odd)


@pytest.mark.parametrize(
    "metadata", [{"model": "{"}, {"model": "[]"}, {"model": "{}"}, {"model": '{"config": {"type": "x"}}'}]
)
def test_an_export_with_odd_metadata_is_one_message(tmp_path, metadata) -> None:
    write_tensors(tmp_path / "odd.safetensors", {}, metadata)
    with pytest.raises(UserError):
        load_export(tmp_path / "odd.safetensors").build()
