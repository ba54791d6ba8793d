"""CREDIT's weights and arguments: recorded outputs and gradients, round trips of the conversion, and what is refused."""

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from credit_like import cli
from credit_like.checkpoint import credit
from credit_like.checkpoint.credit import read_checkpoint
from credit_like.errors import UserError
from credit_like.models import wxformer
from credit_like.nn.init import initialise

RECORDINGS = os.environ.get("CREDIT_LIKE_PARITY", "")
CASES = ["pixelshuffle", "transpose"]
needs_recordings = pytest.mark.skipif(
    not Path(RECORDINGS, "pixelshuffle_io.pt").exists(), reason="CREDIT_LIKE_PARITY unset"
)
ARGUMENTS = {
    "image_height": 32,
    "image_width": 64,
    "frames": 1,
    "channels": 2,
    "levels": 3,
    "surface_channels": 3,
    "input_only_channels": 1,
    "output_only_channels": 2,
    "dim": [8, 16, 32, 64],
    "depth": [1, 1, 1, 1],
    "dim_head": 8,
    "global_window_size": [4, 4, 2, 1],
    "local_window_size": 2,
    "cross_embed_kernel_sizes": [[4, 8], [2, 4], [2, 4], [2, 4]],
    "cross_embed_strides": [2, 2, 2, 2],
    "use_spectral_norm": True,
}


def recorded(case):
    folder = Path(RECORDINGS)
    model = credit.load_credit_model(
        folder / f"{case}_checkpoint.pt", json.loads((folder / f"{case}.json").read_text())
    )
    return model, torch.load(folder / f"{case}_io.pt", weights_only=True)


@needs_recordings
@pytest.mark.parametrize("case", CASES)
def test_recorded_outputs_and_gradients_are_reproduced(case):
    model, io = recorded(case)
    y = model(io["x"])
    assert y.shape == io["y"].shape
    assert (y - io["y"]).norm() < 1e-5 * io["y"].norm()
    assert (y - io["y"]).abs().max() < 1e-5 * io["y"].abs().max()
    (y * io["cotangent"]).sum().backward()
    parameters = dict(model.named_parameters())
    largest = max(gradient.norm() for gradient in io["grads"].values())
    for name, gradient in io["grads"].items():
        ours = credit.convert_state_dict({name: gradient}, model.config)
        if not ours:  # the bias of a window of one token: it has no effect
            assert gradient.abs().max() == 0
            continue
        ((our_name, expected),) = ours.items()
        got = parameters[our_name].grad
        # Position biases sum terms over all windows that nearly cancel: in the recording too such a gradient is up to
        # 3e-5 of itself away from the same function in fp64, so small ones are held to a share of the largest.
        assert (got - expected).norm() <= 1e-5 * max(expected.norm(), 4e-3 * largest), our_name


@needs_recordings
@pytest.mark.parametrize("case", CASES)
def test_every_stored_weight_is_used(case):
    model, _ = recorded(case)
    state = credit.read_checkpoint(Path(RECORDINGS, f"{case}_checkpoint.pt"))
    kept = credit.convert_state_dict(state, model.config)
    assert set(kept) == set(model.state_dict())


def credit_state(config, arguments, *, old_keys, spectral=True, seed=0):
    """A state dict as CREDIT writes it, made from a model of ours by the inverse of the conversion."""
    model = initialise(arguments.build(), seed)
    inverse = {}
    for stage in range(4):
        for i in range(len(config.cross_embed_kernel_sizes[stage])):
            inverse[f"stages.{stage}.embed.convs.{i}"] = f"layers.{stage}.0.convs.{i}" + ("" if old_keys else ".1")
        for layer in range(config.depth[stage]):
            for at, reach in ((0, "short"), (2, "long")):
                ours, theirs = f"stages.{stage}.layers.{layer}.{reach}", f"layers.{stage}.1.layers.{layer}.{at}"
                inverse |= {
                    f"{ours}.norm": f"{theirs}.norm",
                    f"{ours}.qkv": f"{theirs}.to_qkv",
                    f"{ours}.out": f"{theirs}.to_out",
                }
                inverse |= {f"{ours}.bias.linears.{i}": f"{theirs}.dpb.layers.{3 * i}" for i in range(4)}
                inverse |= {f"{ours}.bias.norms.{i}": f"{theirs}.dpb.layers.{3 * i + 1}" for i in range(3)}
                ff = f"layers.{stage}.1.layers.{layer}.{at + 1}.layers"
                for i, part in ((0, "norm"), (1, "expand"), (4, "contract")):
                    inverse[f"{ours}_ff.{part}"] = f"{ff}.{i}"
    for up in (1, 2, 3):
        inverse |= {f"up{up}.up": f"up_block{up}.conv", f"up{up}.sharp": f"up_block{up}.sharp"}
        for i, at in ((0, 0), (1, 3)):
            inverse |= {f"up{up}.refine.convs.{i}": f"up_block{up}.b.{at}"}
            inverse |= {f"up{up}.refine.norms.{i}": f"up_block{up}.b.{at + 1}"}
    if config.upsample == "transpose":
        inverse["head.up"] = "up_block4"
    else:
        inverse |= {"head.up": "up_block4.0", "head.last": "up_block4.2"}
    state = {"cube_embedding.proj.weight": torch.zeros(1)}
    for name, value in model.state_dict().items():
        module, leaf = name.rsplit(".", 1)
        if module.endswith(".spectral"):
            module, leaf = module.removesuffix(".spectral"), f"weight_{leaf}"
        elif leaf == "weight" and spectral and f"{module}.spectral.u" in model.state_dict():
            leaf = "weight_orig"
        if module.endswith("qkv") and leaf != "weight_v":
            value = value.unflatten(0, (-1, 3, config.dim_head)).transpose(0, 1).flatten(0, 2)
        if leaf in ("weight", "weight_orig") and module.rsplit(".", 1)[1] in ("qkv", "out", "expand", "contract"):
            value = value[:, :, None, None]
        if ".layers." in name and module.endswith(".norm"):
            value, leaf = value[None, :, None, None], {"weight": "g", "bias": "b"}[leaf]
        state[f"{inverse[module]}.{leaf}"] = value
    return model, state


@pytest.mark.parametrize("upsample", ["pixel_shuffle", "transpose"])
@pytest.mark.parametrize("old_keys", [True, False])
@pytest.mark.parametrize("spectral", [True, False])
def test_both_decoders_key_generations_and_norms_are_converted(tmp_path, upsample, old_keys, spectral):
    arguments = {**ARGUMENTS, "use_spectral_norm": spectral}
    converted = credit.convert_model_args(arguments, upsample=upsample)
    model, state = credit_state(converted.config, converted, old_keys=old_keys, spectral=spectral)
    torch.save({"model_state_dict": state, "epoch": 3}, tmp_path / "checkpoint.pt")
    loaded = credit.load_credit_model(tmp_path / "checkpoint.pt", arguments)
    x = torch.randn(1, 10, 1, 32, 64)
    torch.testing.assert_close(loaded(x), model.eval()(x))


def test_import_writes_what_load_export_reads(tmp_path):
    converted = credit.convert_model_args(ARGUMENTS, upsample="transpose")
    model, state = credit_state(converted.config, converted, old_keys=False)
    torch.save({"model_state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "checkpoint.pt")
    (tmp_path / "credit.yml").write_text(yaml.safe_dump({"model": {"type": "wxformer", **ARGUMENTS}}))
    out = credit.import_credit(tmp_path / "checkpoint.pt", tmp_path / "credit.yml", tmp_path / "ours.safetensors")
    x = torch.randn(1, 10, 1, 32, 64)
    torch.testing.assert_close(credit.load_export(out)(x), model.eval()(x))
    section = yaml.safe_load((tmp_path / "ours.model.yml").read_text())["model"]
    assert wxformer.Config.model_validate(section) == converted.config


def test_unmapped_weights_are_listed():
    converted = credit.convert_model_args(ARGUMENTS)
    _, state = credit_state(converted.config, converted, old_keys=False)
    state |= {"postblock.skebs.weight": torch.zeros(2), "layers.0.1.layers.0.4.gate": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"(?s)2 names.*layers\.0\.1\.layers\.0\.4\.gate.*postblock\.skebs\.weight"):
        credit.convert_state_dict(state, converted.config)


def test_weights_of_another_shape_or_missing_are_listed(tmp_path):
    converted = credit.convert_model_args(ARGUMENTS)
    _, state = credit_state(converted.config, converted, old_keys=False)
    torch.save({"model_state_dict": state}, tmp_path / "checkpoint.pt")
    wrong = {**ARGUMENTS, "levels": 4, "depth": [1, 1, 2, 1]}
    with pytest.raises(
        ValueError, match=r"(?s)stages\.2\.layers\.1\.short\.norm\.weight: not in the checkpoint.*expected \("
    ):
        credit.load_credit_model(tmp_path / "checkpoint.pt", wrong)
    with pytest.raises(UserError, match=r"qkv\.weight: expected \("):
        credit.load_credit_model(tmp_path / "checkpoint.pt", {**ARGUMENTS, "dim_head": 32, "dim": [32, 64, 128, 256]})
    with pytest.raises(ValueError, match="use_spectral_norm: expected True"):
        credit.load_credit_model(tmp_path / "checkpoint.pt", {**ARGUMENTS, "use_spectral_norm": False})


def test_pickles_are_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"model_state_dict": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        credit.load_credit_model(tmp_path / "bomb.pt", ARGUMENTS)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimm": [1]}, "dimm: unknown argument"),
        ({"patch_height": 2}, "patch_height: expected 1, got 2"),
        ({"output_frames": 2}, "output_frames: expected 1"),
        ({"ff_dropout": 1.5}, r"ff_dropout\n +Input should be less than 1"),
        ({"post_conf": {"activate": True}}, "post_conf"),
    ],
)
def test_arguments_that_are_not_understood_are_listed(change, message):
    with pytest.raises(ValueError, match=message):
        credit.convert_model_args({**ARGUMENTS, **change})


def test_counts_come_from_either_generation_of_yaml():
    model = {key: value for key, value in ARGUMENTS.items() if "channels" not in key and key != "levels"}
    first = {
        "model": {"type": "crossformer", "levels": 3, **model},
        "data": {
            "variables": ["U", "V"],
            "surface_variables": ["SP", "t2m", "Q500"],
            "dynamic_forcing_variables": ["tsi"],
            "static_variables": ["z", "lsm"],
            "diagnostic_variables": ["precip"],
            "history_len": 1,
        },
    }
    second = {
        "model": {"type": "wxformer", **model},
        "data": {
            "source": {
                "ERA5": {
                    "levels": [10, 20, 30],
                    "variables": {
                        "prognostic": {"vars_3D": ["U", "V"], "vars_2D": ["SP", "t2m", "Q500"]},
                        "dynamic_forcing": {"vars_2D": ["tsi"]},
                        "static": {"vars_2D": ["z", "lsm"]},
                        "diagnostic": {"vars_2D": ["precip"]},
                    },
                }
            },
            "history_len": 1,
        },
    }
    for document in (first, second):
        converted = credit.convert_model_args(credit.model_block(document))
        assert (converted.in_channels, converted.out_channels, converted.frames) == (12, 10, 1)
    with pytest.raises(ValueError, match=r"model\.type: expected one of .*, got 'fuxi'"):
        credit.model_block({"model": {"type": "fuxi"}})
    with pytest.raises(ValueError, match="`model` block"):
        credit.model_block({"data": {}})


@pytest.mark.parametrize("name", ["absent.pt", "junk.pt", "junk.safetensors", "empty.pt", "cut.pt"])
def test_what_is_no_checkpoint_is_one_message_and_changes_nothing(tmp_path, name, capsys):
    torch.save({"model_state_dict": {"w": torch.zeros(100)}}, tmp_path / "whole.pt")
    contents = {"junk": b"junk", "empty": b"", "cut": (tmp_path / "whole.pt").read_bytes()[:700]}
    if (tmp_path / name).stem in contents:
        (tmp_path / name).write_bytes(contents[(tmp_path / name).stem])
    with pytest.raises(SystemExit) as end:
        cli.main(["import-credit", str(tmp_path / name), "-o", str(tmp_path / "out")])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "expected a CREDIT checkpoint, got" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_archives_that_unpack_to_more_than_they_are_and_odd_keys_are_refused(tmp_path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", b"\0" * 10_000_000)
    torch.save({3: torch.ones(2)}, tmp_path / "keys.pt")
    torch.save({"x": torch.ones(1).expand(10**9)}, tmp_path / "view.pt")
    for name, message in (("bomb", "unpacks to"), ("keys", "under their names"), ("view", "that are in the file")):
        with pytest.raises(UserError, match=message):
            read_checkpoint(tmp_path / f"{name}.pt")
