"""Conversion of NCAR CREDIT's WXFormer: its constructor arguments, its YAML and its weights.

Weights are read with `weights_only=True` (nothing is unpickled) or from safetensors. An error lists everything that
cannot be mapped. Only weights that do not affect the result are dropped: `cube_embedding.*`, and the position bias of
windows of one token.
"""

from __future__ import annotations

import json
import pickle
import re
import reprlib
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from credit_like.checkpoint.files import replace_file
from credit_like.errors import UserError, reason
from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.outputs import begins_with, check_own, replacing
from credit_like.small_files import read_yaml, require_regular

_SAME = (
    "dim",
    "depth",
    "dim_head",
    "cross_embed_kernel_sizes",
    "cross_embed_strides",
    "attn_dropout",
    "ff_dropout",
    "interp",
    "use_spectral_norm",
)
_DEFAULTS: dict[str, Any] = {
    "image_height": 640,
    "image_width": 1280,
    "patch_height": 1,
    "patch_width": 1,
    "frames": 2,
    "output_frames": 1,
    "channels": 4,
    "surface_channels": 7,
    "input_only_channels": 3,
    "output_only_channels": 0,
    "levels": 15,
    "dim": (64, 128, 256, 512),
    "depth": (2, 2, 8, 2),
    "dim_head": 32,
    "global_window_size": (5, 5, 2, 1),
    "local_window_size": 10,
    "cross_embed_kernel_sizes": ((4, 8, 16, 32), (2, 4), (2, 4), (2, 4)),
    "cross_embed_strides": (4, 2, 2, 2),
    "attn_dropout": 0.0,
    "ff_dropout": 0.0,
    "use_spectral_norm": True,
    "interp": True,
    "padding_conf": None,
}
NO_EFFECT = frozenset(
    {
        "upsample_with_ps", "upsample_v_conv", "attention_type", "decoder_attention_type", "frame_patch_size", "type",
        "pretrained_weights", "visualization",
    }
)  # fmt: skip
"""Keys of its model section that do not change the network; which decoder weights belong to is seen from their names."""
ARGUMENTS = frozenset({*_DEFAULTS, *NO_EFFECT, "post_conf"})
TYPES = ("wxformer", "wxformer_base", "crossformer")
_SHOWN = 12
"""Weights of a kind that a message lists."""
_HEADER = "# Made by credit-like import-credit."
"""The first line of a model section, by which a file is known as one."""
_DROPPED = re.compile(r"cube_embedding\..*")


@dataclass(frozen=True)
class ModelArguments:
    """Arguments of `credit_like.models.wxformer.build`."""

    config: wxformer.Config
    in_channels: int
    out_channels: int
    frames: int
    height: int
    width: int

    def build(self) -> nn.Module:
        """Build the model, without weights."""
        return wxformer.build(
            self.config,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            frames=self.frames,
            height=self.height,
            width=self.width,
        )


def convert_model_args(model_args: Mapping[str, Any], *, upsample: str = "pixel_shuffle") -> ModelArguments:
    """Return our configuration for CREDIT's constructor arguments (or the `model` block of its YAML).

    Omitted arguments take CREDIT's defaults. `upsample` is `pixel_shuffle` or `transpose`: CREDIT's arguments do not
    specify which decoder a checkpoint has (see `decoder_of`). Raises UserError that lists every argument that is not
    supported.
    """
    known = {**_DEFAULTS, **{k: v for k, v in model_args.items() if k not in NO_EFFECT}}
    problems = [
        f"{key}: unknown argument ({reprlib.repr(model_args[key])})"
        for key in known
        if key not in (*_DEFAULTS, "post_conf")
    ]
    fixed = {"patch_height": 1, "patch_width": 1, "output_frames": 1}
    problems += [f"{k}: expected {v}, got {reprlib.repr(known[k])}" for k, v in fixed.items() if known[k] != v]
    post = known.pop("post_conf", None)
    if post is not None and post.get("activate", False):
        problems.append(
            "post_conf: what follows the network is not imported; configure physics instead and leave it out"
        )
    local = known["local_window_size"]
    if not isinstance(local, int):
        if len(set(local)) != 1:
            problems.append(f"local_window_size: expected one window for all stages, got {reprlib.repr(local)}")
        local = local[0]
    if problems:
        raise UserError("CREDIT's model arguments cannot be converted:\n" + "\n".join(problems))
    padding = dict(known["padding_conf"] or {"activate": False})
    config = wxformer.Config.model_validate(
        {
            **{key: known[key] for key in _SAME},
            "global_window_size": known["global_window_size"],
            "local_window_size": local,
            "padding_conf": padding,
            "upsample": upsample,
            "position_index": "credit",
            "predict": "state",
        }
    )
    base = known["channels"] * known["levels"] + known["surface_channels"]
    return ModelArguments(
        config=config,
        in_channels=base + known["input_only_channels"],
        out_channels=base + known["output_only_channels"],
        frames=known["frames"],
        height=known["image_height"],
        width=known["image_width"],
    )


def decoder_of(state: Mapping[str, Tensor]) -> str:
    """Return the decoder that the weights belong to: `transpose` (published weights) or `pixel_shuffle`."""
    transpose = any(key.startswith("up_block4.weight") for key in state)
    return "transpose" if transpose else "pixel_shuffle"


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a CREDIT checkpoint under CREDIT's names, without the prefix of a wrapper (`module.`).

    Raises UserError if the file does not exist or holds no weights.
    """
    path = Path(path)
    try:
        require_regular(path)
        _refuse_packed(path)
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"expected a CREDIT checkpoint, got nothing at {path}; change the path") from error
    except (
        OSError,
        SafetensorError,
        pickle.UnpicklingError,
        struct.error,
        EOFError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise UserError(
            f"{path}: expected a CREDIT checkpoint, got a file that torch cannot load ({error!r})"
        ) from error
    state = content.get("model_state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(
            f"{path}: expected `model_state_dict` with tensors under their names, got {_kind(content)}; is it a CREDIT checkpoint?"
        )
    size = path.stat().st_size
    for name, value in state.items():  # an expanded view may describe far more values than the file stores
        if value.numel() * value.element_size() > size:
            raise UserError(f"{path}: expected tensors that are in the file, got {name} of {tuple(value.shape)}")
    prefix = re.compile(r"^(?:(?:module|_orig_mod)\.)+")
    return {prefix.sub("", key).replace("_checkpoint_wrapped_module.", ""): value for key, value in state.items()}


def _refuse_packed(path: Path) -> None:
    """Raise UserError if an archive unpacks to more than its own size; torch stores tensors uncompressed."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > path.stat().st_size:
        raise UserError(f"{path}: expected an archive as torch writes it, got one that unpacks to {unpacked} bytes")


def _kind(content: object) -> str:
    return (
        f"a dict with {', '.join(map(str, list(content)[:8]))}" if isinstance(content, dict) else type(content).__name__
    )


_LAYER = r"layers\.(?P<stage>\d+)\.1\.layers\.(?P<layer>\d+)\."
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), ours)
    for pattern, ours in [
        (r"layers\.(?P<stage>\d+)\.0\.convs\.(?P<conv>\d+)(?:\.1)?", "stages.{stage}.embed.convs.{conv}"),
        (_LAYER + r"0\.norm", "stages.{stage}.layers.{layer}.short.norm"),
        (_LAYER + r"0\.to_qkv", "stages.{stage}.layers.{layer}.short.qkv"),
        (_LAYER + r"0\.to_out", "stages.{stage}.layers.{layer}.short.out"),
        (_LAYER + r"0\.dpb\.layers\.(?P<bias>\d+)", "stages.{stage}.layers.{layer}.short.bias.{bias}"),
        (_LAYER + r"1\.layers\.(?P<ff>\d+)", "stages.{stage}.layers.{layer}.short_ff.{ff}"),
        (_LAYER + r"2\.norm", "stages.{stage}.layers.{layer}.long.norm"),
        (_LAYER + r"2\.to_qkv", "stages.{stage}.layers.{layer}.long.qkv"),
        (_LAYER + r"2\.to_out", "stages.{stage}.layers.{layer}.long.out"),
        (_LAYER + r"2\.dpb\.layers\.(?P<bias>\d+)", "stages.{stage}.layers.{layer}.long.bias.{bias}"),
        (_LAYER + r"3\.layers\.(?P<ff>\d+)", "stages.{stage}.layers.{layer}.long_ff.{ff}"),
        (r"up_block(?P<up>[123])\.conv", "up{up}.up"),
        (r"up_block(?P<up>[123])\.sharp", "up{up}.sharp"),
        (r"up_block(?P<up>[123])\.b\.(?P<refine>[0134])", "up{up}.refine.{refine}"),
        (r"up_block4\.0", "head.up"),
        (r"up_block4\.2", "head.last"),
        (r"up_block4", "head.up"),
    ]
]
_PARTS: dict[str, dict[str, str]] = {
    "bias": {**{str(3 * i): f"linears.{i}" for i in range(4)}, **{str(3 * i + 1): f"norms.{i}" for i in range(3)}},
    "ff": {"0": "norm", "1": "expand", "4": "contract"},
    "refine": {"0": "convs.0", "1": "norms.0", "3": "convs.1", "4": "norms.1"},
}
_LEAVES = {
    "weight": "weight",
    "weight_orig": "weight",
    "bias": "bias",
    "g": "weight",
    "b": "bias",
    "weight_u": "spectral.u",
    "weight_v": "spectral.v",
}


def convert_name(name: str) -> str | None:
    """Return our name of CREDIT's parameter or buffer, or None if it has no counterpart."""
    module, _, leaf = name.rpartition(".")
    for pattern, ours in _RULES:
        if (match := pattern.fullmatch(module)) and leaf in _LEAVES:
            parts = {key: _PARTS.get(key, {}).get(value, value) for key, value in match.groupdict().items()}
            return f"{ours.format(**parts)}.{_LEAVES[leaf]}"
    return None


def convert_state_dict(state: Mapping[str, Tensor], config: wxformer.Config) -> dict[str, Tensor]:
    """Convert CREDIT's weights to our names and shapes.

    1 x 1 convolutions become matrices. The rows of q, k, v (three blocks, each head-major) become (head, q | k | v,
    channel), and u is reordered in the same way. Channel norms lose their unit dimensions. Raises UserError that lists
    the weights that cannot be mapped.
    """
    converted: dict[str, Tensor] = {}
    unmapped = []
    for name, value in state.items():
        if _DROPPED.fullmatch(name):
            continue
        ours = convert_name(name)
        if ours is None:
            unmapped.append(name)
        elif not _window_of_one(ours, config):
            converted[ours] = _reshape(ours, value, config.dim_head)
    if unmapped:
        names = "\n".join(sorted(unmapped))
        raise UserError(f"{len(unmapped)} names in the checkpoint have no counterpart in this model:\n{names}")
    return converted


def _window_of_one(name: str, config: wxformer.Config) -> bool:
    """Return whether this is the position bias of a window of one token, which softmax over one token cancels."""
    match = re.fullmatch(r"stages\.(\d)\.layers\.\d+\.(short|long)\.bias\..*", name)
    if match is None:
        return False
    window = config.local_window_size if match[2] == "short" else config.global_window_size[int(match[1])]
    return window == 1


def _reshape(name: str, value: Tensor, dim_head: int) -> Tensor:
    # A weight of another shape is returned as it is, so that it is listed with the shape that was expected.
    if re.search(r"\.(qkv|out|expand|contract)\.weight$", name):
        value = value.flatten(min(1, value.ndim - 1))
    elif re.search(r"(\.norm|_ff\.norm)\.(weight|bias)$", name):
        value = value.flatten()
    divides = value.ndim > 0 and value.numel() > 0 and len(value) % (3 * dim_head) == 0
    if re.search(r"\.qkv\.(weight|spectral\.u)$", name) and divides:
        return interleave_qkv(value, dim_head)
    return value


def interleave_qkv(value: Tensor, dim_head: int) -> Tensor:
    """Reorder rows from (q | k | v, head, channel) to (head, q | k | v, channel)."""
    return value.unflatten(0, (3, -1, dim_head)).transpose(0, 1).flatten(0, 2)


def load_credit_model(checkpoint_path: str | Path, model_args: Mapping[str, Any]) -> nn.Module:
    """Load CREDIT's WXFormer with the weights of a checkpoint, in evaluation mode.

    The model maps (B, C, T, H, W) to (B, C_out, 1, H, W). `model_args` are CREDIT's constructor arguments. Raises
    UserError that lists every argument or weight that does not fit.
    """
    state = read_checkpoint(checkpoint_path)
    arguments = convert_model_args(model_args, upsample=decoder_of(state))
    return _load(arguments, state).eval()


def _load(arguments: ModelArguments, state: Mapping[str, Tensor]) -> nn.Module:
    has_norm = any(name.endswith("weight_u") for name in state)
    if has_norm != arguments.config.use_spectral_norm:
        raise UserError(
            f"use_spectral_norm: expected {has_norm} as in the weights, got {arguments.config.use_spectral_norm}; change it"
        )
    with torch.device("meta"):  # the arguments come from a file and may ask for any size
        ours = arguments.build().state_dict()
    theirs = convert_state_dict(state, arguments.config)
    differences = (
        [f"{name}: not in the checkpoint" for name in ours if name not in theirs],
        [f"{name}: no such weight in the model" for name in theirs if name not in ours],
        [
            f"{name}: expected {tuple(ours[name].shape)}, got {tuple(theirs[name].shape)}"
            for name in ours
            if name in theirs and ours[name].shape != theirs[name].shape
        ],
    )
    if any(differences):
        told = [line for found in differences for line in (*found[:_SHOWN], *_more(found))]
        raise UserError("the weights do not fit the model that the arguments describe:\n" + "\n".join(told))
    model = arguments.build()
    model.load_state_dict(theirs)
    spectral_norm.refresh(model)
    return model


def _more(differences: list[str]) -> list[str]:
    left = len(differences) - _SHOWN
    return [f"and {left} more, such as {differences[-1]}"] if left > 0 else []


def import_credit(
    checkpoint: str | Path, config_yaml: str | Path | None, out: str | Path, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Convert a CREDIT checkpoint to `out`, a safetensors file of fp32 weights under our names.

    Its metadata has the key `model`: JSON with `config` (our model section), `in_channels` (of a frame),
    `out_channels`, `frames`, `height`, `width`; and the keys of `metadata`, each as JSON. The model section is also
    written to `<out stem>.model.yml` beside it, ready to be included in an experiment.

    `config_yaml` is CREDIT's YAML. Its `model` block is read, and its `data` block for channel counts that the model
    block lacks. Without it the checkpoint must fit CREDIT's default arguments. Returns the path. Raises UserError as
    `read_checkpoint`, `convert_model_args` and `convert_state_dict` do.
    """
    check_output(checkpoint, Path(out))
    state = read_checkpoint(checkpoint)
    block = {} if config_yaml is None else model_block(_yaml(Path(config_yaml)))
    arguments = convert_model_args(block, upsample=decoder_of(state))
    return write_weights(state, arguments, out, metadata)


def check_output(checkpoint: str | Path, out: Path) -> None:
    """Raise UserError if the weights of `checkpoint` cannot be written to `out`, or would replace a file that is not an import."""
    check_own("--output", _section_file(out), "the model section of such weights", begins_with(_HEADER))
    if out.exists() and Path(checkpoint).exists() and out.samefile(checkpoint):
        raise UserError(f"expected another output than the checkpoint itself, got {out}; change --output")
    check_own("--output", out, "weights that were imported before", begins_with('"model":"'))


def _section_file(out: Path) -> Path:
    return out.with_name(f"{out.stem}.model.yml")


def write_weights(
    state: Mapping[str, Tensor], arguments: ModelArguments, out: str | Path, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write CREDIT's weights as `import_credit` does; `check_output` tells before whether that is possible."""
    out = Path(out)
    model = _load(arguments, state)
    described = {
        "config": arguments.config.model_dump(mode="json"),
        "in_channels": arguments.in_channels,
        "out_channels": arguments.out_channels,
        "frames": arguments.frames,
        "height": arguments.height,
        "width": arguments.width,
    }
    weights = {name: value.float().contiguous() for name, value in model.state_dict().items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"model": described, **(metadata or {})}
    section = yaml.safe_dump({"model": described["config"]}, sort_keys=False, default_flow_style=None)
    with replacing(out) as draft:
        save_file(weights, draft, metadata={key: json.dumps(value) for key, value in about.items()})
        replace_file(_section_file(out), f"{_HEADER}\n{section}".encode())
    return out


def _yaml(path: Path) -> Any:
    try:
        return read_yaml(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected CREDIT's YAML, got a file that cannot be read: {reason(error)}") from error


def load_export(path: str | Path) -> nn.Module:
    """Load the model that `import_credit` wrote, in evaluation mode."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if "model" not in metadata:
        raise UserError(f"{path}: expected metadata `model`, got {sorted(metadata)}; was it written by import-credit?")
    described = json.loads(metadata["model"])
    config = wxformer.Config.model_validate(described.pop("config"))
    model = ModelArguments(config=config, **described).build()
    model.load_state_dict(load_file(path))
    return model.eval()


def model_block(document: Any) -> dict[str, Any]:
    """Return CREDIT's constructor arguments from its YAML.

    First-generation files give the channel counts in the model block; for second-generation files they are derived from
    the lists of variables. Raises UserError if there is no model block or its type is another architecture.
    """
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise UserError("expected a CREDIT YAML with a `model` block, got none")
    block = dict(document["model"])
    kind = block.pop("type", "wxformer")
    if kind not in TYPES:
        raise UserError(f"model.type: expected one of {', '.join(TYPES)}, got {reprlib.repr(kind)}")
    data = document.get("data")
    if isinstance(data, dict):
        derived = _second_generation(data) if isinstance(data.get("source"), dict) else _first_generation(data)
        block = {**derived, **block}
    old_pads = {key: block.pop(key) for key in ("pad_lat", "pad_lon") if key in block}
    if len(old_pads) == 2 and "padding_conf" not in block:
        block["padding_conf"] = {"activate": True, "mode": "mirror", **old_pads}
    if isinstance(block.get("padding_conf"), dict):
        block["padding_conf"] = {
            key: [value, value] if key in ("pad_lat", "pad_lon") and isinstance(value, int) else value
            for key, value in block["padding_conf"].items()
        }
    return block


def _first_generation(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the channel counts implied by flat lists of variable names, for the lists that are present."""
    counts: dict[str, Any] = {}
    if "variables" in data:
        counts["channels"] = len(data["variables"] or [])
    if "surface_variables" in data:
        counts["surface_channels"] = len(data["surface_variables"] or [])
    inputs = [key for key in ("dynamic_forcing_variables", "forcing_variables", "static_variables") if key in data]
    if inputs:
        counts["input_only_channels"] = sum(len(data[key] or []) for key in inputs)
    if "diagnostic_variables" in data:
        counts["output_only_channels"] = len(data["diagnostic_variables"] or [])
    if "history_len" in data:
        counts["frames"] = data["history_len"]
    return counts


def _second_generation(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the channel counts implied by `source.<name>.variables.<role>.vars_3D | vars_2D`."""
    counts = {"channels": 0, "surface_channels": 0, "input_only_channels": 0, "output_only_channels": 0}
    levels: dict[str, int] = {}
    for source in data["source"].values():
        source_levels = source.get("levels")
        level_count = len(source_levels) if isinstance(source_levels, list) else 0
        for role, group in (source.get("variables") or {}).items():
            three, two = (len((group or {}).get(key) or []) for key in ("vars_3D", "vars_2D"))
            if role == "prognostic":
                counts["channels"] += three
                counts["surface_channels"] += two
                if three and level_count:
                    levels["levels"] = level_count
            else:
                key = "output_only_channels" if role == "diagnostic" else "input_only_channels"
                counts[key] += three * level_count + two
    frames = {"frames": data["history_len"]} if "history_len" in data else {}
    return {**counts, **levels, **frames}
