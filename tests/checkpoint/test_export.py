"""Exports and commands on a run of the tiny model, and of a real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit_like import cli
from credit_like.checkpoint import commands
from credit_like.checkpoint.errors import DamagedCheckpoint
from credit_like.checkpoint.export import Export, card, export, load_export
from credit_like.checkpoint.format import write_tensors
from credit_like.checkpoint.manager import Checkpoint
from credit_like.checkpoint.transfer import Source
from credit_like.errors import RunError
from credit_like.lock import Locked, RunLock
from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.nn.init import initialise
from credit_like.schema.origin import StartFrom
from tests.faults import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny.trainer(folder, epochs=1, checkpoint={"every": 3, "keep": 5}).fit()
    return folder


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_an_export_is_the_checkpoint_in_one_plain_file(run, tmp_path, weights) -> None:
    out = export(run, tmp_path / "out" / "model.safetensors", weights)
    checkpoint = Checkpoint.open(run / "checkpoints" / "step-9")
    loaded = load_file(out)
    assert set(loaded) == {name.removeprefix("model/") for name in checkpoint.names("model/")}
    for name, x in loaded.items():
        source = f"ema/{name}" if weights == "ema" and f"ema/{name}" in checkpoint.names() else f"model/{name}"
        assert torch.equal(x, checkpoint.read(source)), name
    assert not torch.equal(checkpoint.read("ema/conv.weight"), checkpoint.read("model/conv.weight"))
    found = load_export(out).metadata
    assert found["checkpoint"]["weights"] == weights
    assert found["checkpoint"]["step"] == 9
    assert found["experiment"] == checkpoint.meta["experiment"]
    assert found["normalisation"]["prognostic"] == {
        "channels": ["u", "v"],
        "units": ["m s-1", "m s-1"],
        "level_units": ["", ""],
        "mean": [0.0, 0.0],
        "std": [1.0, 1.0],
        "change_std": [0.5, 0.5],
    }
    assert len(found["grid"]["latitude"]) == tiny.HEIGHT
    card = out.with_suffix(".md").read_text()
    assert "| prognostic | v | 0 | 1 | 0.5 |" in card
    assert not list(out.parent.glob(".*"))


def test_a_card_names_the_transforms_of_which_the_numbers_are(run, tmp_path) -> None:
    metadata = load_export(export(run, tmp_path / "model.safetensors")).metadata
    assert "transform" not in card(tmp_path / "model.safetensors", metadata, {})
    metadata["normalisation"]["prognostic"]["transform"] = ["", "log1p of x / 0.001"]
    text = card(tmp_path / "model.safetensors", metadata, {})
    assert "| role | channel | transform | mean | std | std of the change per step |\n|---|---|---|---|---|---|" in text
    assert "| prognostic | u |  | 0 | 1 | 0.5 |" in text
    assert "| prognostic | v | log1p of x / 0.001 | 0 | 1 | 0.5 |" in text
    assert "`log1p` is log(1 + u)" in text


def test_a_model_comes_back_and_computes_the_same(tmp_path) -> None:
    """With spectral norm, whose 1/σ is not saved: it is found again from u and v."""
    config = wxformer.Config(use_spectral_norm=True)
    shape = {"in_channels": 3, "out_channels": 2, "frames": 1, "height": 32, "width": 64}
    model = initialise(wxformer.build(config, **shape), 0).eval()
    spectral_norm.before_step(model)
    x = torch.randn(1, 3, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
        write_tensors(
            tmp_path / "m.safetensors",
            model.state_dict(),
            {"model": json.dumps({"config": config.model_dump(mode="json"), **shape})},
        )
        again = load_export(tmp_path / "m.safetensors").build()
        assert isinstance(again, torch.nn.Module)
        # Found again from the saved vectors, σ differs from that of the power iteration in its last bits.
        torch.testing.assert_close(again(x), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    for (_, before), (_, after) in zip(spectral_norm.layers(model), spectral_norm.layers(again), strict=True):
        torch.testing.assert_close(after.spectral.inv_sigma, before.spectral.inv_sigma, rtol=1e-6, atol=0)


def test_what_is_not_an_export_is_refused(run, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"ends in .safetensors, got .*model.pt"):
        export(run, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"expected a checkpoint in .* train first"):
        export(tmp_path, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected one of the steps \[3, 6, 9\].* got 4"):
        export(run, tmp_path / "model.safetensors", step=4)
    write_tensors(tmp_path / "other.safetensors", {"w": torch.zeros(2)}, {"of": "something"})
    with pytest.raises(ValueError, match="expected metadata `model`"):
        load_export(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"expected an earlier export .*other.safetensors"):
        export(run, tmp_path / "other.safetensors")
    whole = export(run, tmp_path / "model.safetensors")
    whole.write_bytes(whole.read_bytes()[:-5])
    with pytest.raises(DamagedCheckpoint, match=r"model.safetensors is not readable"):
        load_export(whole)
    assert isinstance(load_export(export(run, whole)), Export)


def test_list_and_verify_name_what_is_damaged(run, tmp_path, capsys, monkeypatch) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    assert [entry.step for entry in commands.entries(copy)] == [3, 6, 9]
    assert [entry.best for entry in commands.entries(copy)] == [False, False, True]
    assert commands.list_checkpoints(copy) == 0
    assert commands.list_checkpoints(copy, verify=True) == 0
    path = copy / "checkpoints" / "step-6" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert commands.list_checkpoints(copy) == 0  # manifests alone
    capsys.readouterr()
    assert commands.list_checkpoints(copy, verify=True, json=True) == 1
    told = {entry["step"]: entry["damage"] for entry in json.loads(capsys.readouterr().out)}
    assert {step for step, damage in told.items() if damage} == {6}
    assert str(path) in next(entry.damage for entry in commands.entries(copy, verify=True) if entry.step == 6)
    (copy / "checkpoints" / "step-3" / "manifest.json").unlink()
    (copy / "checkpoints" / "step-3" / "manifest.json").mkdir()
    real = commands.Checkpoint.verify

    def verify(checkpoint, *arguments):
        if checkpoint.step == 9:
            raise RunError("Input/output error")
        real(checkpoint, *arguments)

    monkeypatch.setattr(commands.Checkpoint, "verify", verify)
    told = [entry.damage.partition(":")[0] for entry in commands.entries(copy, verify=True)]
    assert told == ["damaged", "damaged", "unreadable"]
    assert commands.list_checkpoints(copy, verify=True) == 1


@pytest.mark.parametrize("verify", [False, True])
def test_what_a_training_prunes_meanwhile_is_not_listed(run, tmp_path, monkeypatch, verify) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    real = Checkpoint.open.__func__

    def opened(cls, folder):
        if folder.name == "step-3":
            shutil.rmtree(folder)
        checkpoint = real(cls, folder)
        if folder.name == "step-6":
            shutil.rmtree(folder)
        return checkpoint

    monkeypatch.setattr(Checkpoint, "open", classmethod(opened))
    assert [(entry.step, entry.damage) for entry in commands.entries(copy, verify)] == [(9, "")]


def test_what_a_training_prunes_before_it_is_read_is_not_exported(run, tmp_path, monkeypatch) -> None:
    copy, real = tmp_path / "run", Checkpoint.read
    shutil.copytree(run, copy)

    def removed_first(checkpoint, name):
        shutil.rmtree(copy / "checkpoints" / "step-9", ignore_errors=True)
        return real(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "read", removed_first)
    out = export(copy, tmp_path / "model.safetensors")
    assert load_export(out).metadata["checkpoint"]["step"] == 6


def test_what_a_training_prunes_once_its_file_is_open_is_not_exported(run, tmp_path, monkeypatch) -> None:
    """safetensors has torch open it by its name once more."""
    copy, real = tmp_path / "run", torch.UntypedStorage.from_file
    shutil.copytree(run, copy)

    def removed_first(path, **options):
        shutil.rmtree(copy / "checkpoints" / "step-9", ignore_errors=True)
        return real(path, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", removed_first)
    out = export(copy, tmp_path / "model.safetensors")
    assert load_export(out).metadata["checkpoint"]["step"] == 6


def test_a_source_that_a_training_prunes_before_it_is_named_is_said(run, tmp_path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    source = Source.open(StartFrom(path=str(copy)))
    shutil.rmtree(copy / "checkpoints" / "step-9")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is not readable"):
        source.provenance()


def test_prune_spares_the_best_and_respects_the_lock(run, tmp_path, capsys) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with RunLock(copy), pytest.raises(Locked):
        commands.prune_checkpoints(copy, 1)
    assert commands.prune_checkpoints(copy, 1) == 0
    assert "removed step-3, step-6" in capsys.readouterr().out
    assert [entry.step for entry in commands.entries(copy)] == [9]


def test_diff_says_what_differs(run, capsys) -> None:
    folder = run / "checkpoints"
    assert commands.differences(folder / "step-3", folder / "step-3") == []
    assert commands.diff_checkpoints(folder / "step-3", folder / "step-3") == 0
    rows = {row[0]: row[1:] for row in commands.differences(folder / "step-3", folder / "step-6")}
    assert rows["progress.step"] == ("3", "6")
    assert "differs by up to" in rows["model/conv.weight"][1]
    assert "model/never" not in rows
    assert commands.diff_checkpoints(folder / "step-3", folder / "step-6") == 1
    assert "progress.step" in capsys.readouterr().out


def test_the_command_line_compares_two_steps_of_a_run(run, capsys) -> None:
    assert _checkpoints(run, "--diff", "3", "3") == 0
    assert "no difference" in capsys.readouterr().out
    assert _checkpoints(run, "--diff", "3", "6") == 1
    assert "model/conv.weight" in capsys.readouterr().out
    assert _checkpoints(run, "--diff", "3", "4") == 2
    assert "expected a step that was saved (3, 6, 9), got 4" in capsys.readouterr().err


def _checkpoints(*arguments: object) -> int:
    try:
        return cli.main(["checkpoints", *map(str, arguments)]) or 0
    except SystemExit as end:
        return int(end.code or 0)
