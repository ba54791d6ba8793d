"""Export of a run's weights to one safetensors file that is independent of the trainer and its layout.

Tensors: fp32, whole, under the model's own names. Metadata, each a JSON text:
    model           config, in_channels, out_channels, frames, height, width: arguments that build the module
    experiment      the resolved experiment
    normalisation   per role: channel names in order, units (also of their levels), mean, std, change_std
    grid            latitude, longitude
    checkpoint      step, weights (ema | raw), validation score, format version, code version
    origin          of a run that started from another one: path, sha256, step, experiment and kind of those weights
    plugins         per folder or package of plug-ins: name, path, version, sha256 of its files
Beside the file lies a model card, `<stem>.md`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from credit_like import registry
from credit_like.checkpoint.errors import DamagedCheckpoint, reading_metadata
from credit_like.checkpoint.files import replace_file
from credit_like.checkpoint.format import MANIFEST, write_tensors
from credit_like.checkpoint.manager import Checkpoint, CheckpointManager, examined, is_removed, none_intact, steps
from credit_like.checkpoint.shards import first_names, refuse_apart
from credit_like.derive.levels import SHIPPED, read_levels
from credit_like.errors import UserError, reason
from credit_like.nn import spectral_norm
from credit_like.nn.init import reset_buffers
from credit_like.nn.lora import merged
from credit_like.outputs import begins_with, check_own, replacing
from credit_like.parallel.runtime import Runtime
from credit_like.small_files import require_regular

_PURPOSE = "that steps the atmosphere forward by"
"""Words of every model card."""
_TRANSFORMED = (
    "Of a channel with a transform, x is that function of the value, of which mean and std are: with u = |value| / scale,",
    "`log1p` is log(1 + u), `sqrt` is sqrt(1 + u) - 1 and `asinh` is asinh(u), each with the sign of the value.",
)
"""Lines of the cards of models with transforms of variables."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Export:
    """An exported (or imported) model: its weights and metadata."""

    path: Path
    metadata: dict[str, Any]
    weights: dict[str, Tensor]

    def build(self, plugins: Sequence[str] | None = None) -> nn.Module:
        """Return the model on the host in evaluation mode.

        `plugins` gives folders (absolute paths) or packages of plug-ins, if they have moved since the run.
        """
        with reading_metadata(self.path):
            described = dict(self.metadata["model"])
            config = described.pop("config")
            if plugins is None:
                plugins = self.metadata.get("experiment", {}).get("plugins", ())
            with registry.searching(plugins):
                plugin = registry.module("model", config["type"])
            if changed := registry.changed(self.metadata.get("plugins", []), registry.record(plugins)):
                log.warning("plug-ins changed since the export of %s: %s", self.path.name, "; ".join(changed))
            config = plugin.Config.model_validate(config)
        model: nn.Module = plugin.build(config, **described)
        reset_buffers(model)
        refuse_apart(model, self.weights, self.path)
        names = first_names(model.state_dict(keep_vars=True))
        model.load_state_dict(
            {**{n: self.weights[of] for n, of in names.items() if of in self.weights}, **self.weights}
        )
        spectral_norm.refresh(model)
        return model.eval()


def find(save_loc: Path, step: int | None = None, runtime: Runtime | None = None) -> Checkpoint:
    """Return the newest intact checkpoint of a run, or the one of `step`; `save_loc` may also be a checkpoint folder.

    With a `runtime` of several ranks all of them call this together and share the reading of all bytes. Raises UserError
    if there is no checkpoint, and DamagedCheckpoint if the requested one is damaged, on all ranks; RunError as
    `CheckpointManager.latest`.
    """
    runtime, folder = runtime or Runtime(), save_loc / "checkpoints"
    if (save_loc / MANIFEST).is_file():
        return _intact(save_loc, runtime)
    if step is not None:
        if step not in steps(folder):
            raise UserError(f"expected one of the steps {steps(folder)} in {folder}, got {step}")
        return _intact(folder / f"step-{step}", runtime)
    newest = CheckpointManager(folder, runtime=runtime).latest()
    if newest is None:
        raise none_intact(folder, ())
    return newest


def _intact(folder: Path, runtime: Runtime) -> Checkpoint:
    checkpoint, damage = examined(folder, runtime)
    if checkpoint is None:
        raise DamagedCheckpoint(runtime.first(damage or None))
    return checkpoint


def find_unread(save_loc: Path) -> Checkpoint:
    """Return what `find` does, except that of the tensors' files only the sizes are checked.

    Other damage goes unnoticed: use it for facts of the manifest alone.
    """
    if (save_loc / MANIFEST).is_file():
        checkpoint = Checkpoint.open(save_loc)
        checkpoint.verify_sizes()
        return checkpoint
    folder = save_loc / "checkpoints"
    left = there = steps(folder)
    while left:
        *left, step = left
        try:
            checkpoint = Checkpoint.open(folder / f"step-{step}")
            checkpoint.verify_sizes()
        except DamagedCheckpoint:
            if is_removed(folder / f"step-{step}"):  # by a training, which has a newer one
                left = there = steps(folder)
            continue
        return checkpoint
    raise none_intact(folder, there)


def full_weights(checkpoint: Checkpoint, weights: str = "ema") -> dict[str, Tensor]:
    """Return parameters and buffers by their canonical names, in fp32 if floating; averages (`ema`) where available.

    Low-rank changes are added to their weights. Raises UserError for metadata that are not of this release.
    """
    averaged = {name.removeprefix("ema/") for name in checkpoint.names("ema/")} if weights == "ema" else set()
    result = {}
    for full_name in checkpoint.names("model/"):
        name = full_name.removeprefix("model/")
        tensor = checkpoint.read(f"ema/{name}" if name in averaged else full_name)
        result[name] = tensor.float() if tensor.is_floating_point() else tensor
    with reading_metadata(checkpoint.folder):
        scale = checkpoint.lora_scale
    return result if scale is None else merged(result, scale)


def _found_weights(save_loc: Path, weights: str, step: int | None) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return what `find` finds, and its weights; where a training removes it before they are read, another one.

    Raises as `find` and `full_weights`.
    """
    while True:
        checkpoint = find(save_loc, step)
        try:
            return checkpoint, full_weights(checkpoint, weights)
        except DamagedCheckpoint:
            if not is_removed(checkpoint.folder):
                raise


def export(save_loc: Path, out: Path, weights: str = "ema", step: int | None = None) -> Path:
    """Write the weights of a run's newest intact checkpoint (or of `step`) to `out`, with a model card beside it.

    Raises UserError if there is no checkpoint, `out` does not end in .safetensors, or something else is there or has the
    card's name.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise UserError(f"expected an output file that ends in .safetensors, got {out}; change its name")
    if (out.parent / MANIFEST).exists():
        raise UserError(f"expected an output file outside the folder of a checkpoint, got {out}; change its folder")
    check_own("--output", out, "an earlier export", begins_with('"experiment": "'))
    check_own("--output", out.with_suffix(".md"), "the card of an earlier export", begins_with(_PURPOSE))
    checkpoint, tensors = _found_weights(Path(save_loc), weights, step)
    if weights == "ema" and not checkpoint.names("ema/"):
        weights = "raw"
    with reading_metadata(checkpoint.folder):
        metadata = describe(checkpoint, weights)
        text = card(out, metadata, tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as draft:
        write_tensors(draft, tensors, {key: json.dumps(value) for key, value in metadata.items()})
    replace_file(out.with_suffix(".md"), text.encode())
    return out


def with_coefficients(experiment: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment with the coefficients of hybrid levels in place of their file, which other machines lack.

    The path of a file that is no longer there remains.
    """
    result = deepcopy(experiment)
    for section in ("inference", "evaluation"):
        derive = (result.get(section) or {}).get("derive")
        if not isinstance(derive, dict):
            continue
        where = derive.get("model_levels")
        if isinstance(where, str) and where not in (*SHIPPED, "pressure") and Path(where).is_file():
            levels = read_levels(where)
            parts = {"a": levels.a, "b": levels.b, "lev": levels.lev}
            derive["model_levels"] = {name: part.tolist() for name, part in parts.items() if part is not None}
    return result


def describe(checkpoint: Checkpoint, weights: str) -> dict[str, Any]:
    """Return the metadata of an export."""
    meta = checkpoint.meta
    experiment, channels, grid = with_coefficients(meta["experiment"]), meta["normalisation"], meta["grid"]
    count = {role: len(channels[role]["channels"]) for role in channels}
    return {
        "model": {
            "config": experiment["model"],
            "in_channels": count["prognostic"] + count["static"] + count["dynamic_forcing"],
            "out_channels": count["prognostic"] + count["diagnostic"],
            "frames": experiment["data"].get("history_len", 1),
            "height": len(grid["latitude"]),
            "width": len(grid["longitude"]),
        },
        "experiment": experiment,
        "normalisation": channels,
        "grid": grid,
        "checkpoint": {
            "step": checkpoint.step,
            "name": checkpoint.name,
            "weights": weights,
            "score": checkpoint.score,
            "format": checkpoint.manifest["format"],
            "version": meta["version"],
        },
        "plugins": meta.get("plugins", []),
        **({"origin": meta["origin"]} if "origin" in meta else {}),
    }


def load_export(path: str | Path) -> Export:
    """Read a file that `export` or `import-credit` wrote.

    Raises DamagedCheckpoint for an incomplete file, ValueError for a safetensors file with other contents.
    """
    path = Path(path)
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is not readable: {reason(error, path)}") from error
    if "model" not in metadata:
        raise UserError(
            f"{path}: expected metadata `model`, got {sorted(metadata)}; write it with `credit-like export`"
        )
    with reading_metadata(path):
        return Export(path, {key: json.loads(value) for key, value in metadata.items() if key != "format"}, weights)


def card(
    out: Path,
    metadata: dict[str, Any],
    tensors: dict[str, Tensor],
    sections: Sequence[str] = (),
    usage: Sequence[str] = (),
) -> str:
    """Return the model card in Markdown: the model, its training data and how to use the file.

    `sections` are lines before the table of channels, and `usage` lines on other uses than as a torch module.
    """
    experiment, model, checkpoint = metadata["experiment"], metadata["model"], metadata["checkpoint"]
    data, latitude = experiment["data"], metadata["grid"]["latitude"]
    points = f"{model['height']}, {model['width']}"
    parameters = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    score = "not known" if checkpoint["score"] is None else f"{checkpoint['score']:.6g}"
    averages = (
        "moving average of the trained weights" if checkpoint["weights"] == "ema" else "trained weights as they are"
    )
    periods = {
        name: ", ".join(f"{p['start']} to {p['end']}" for p in data[name]) for name in ("train", "valid", "test")
    }
    transformed = any("transform" in about for about in metadata["normalisation"].values())
    lines = [
        f"# {experiment['name']}",
        "",
        f"A `{model['config']['type']}` {_PURPOSE} {data['timestep']}.",
        "",
        "| | |",
        "|---|---|",
        f"| numbers in the file | {parameters:,} (fp32) |",
        f"| weights | {averages}, optimiser step {checkpoint['step']} |",
        f"| validation loss | {score} |",
        f"| grid | {model['height']} x {model['width']}, latitude {latitude[0]:g} to {latitude[-1]:g} |",
        f"| frames of history | {model['frames']} |",
        f"| trained on | {periods['train']} |",
        f"| validated on | {periods['valid']} |",
        f"| kept for tests | {periods['test']} |",
        f"| written by | credit-like {checkpoint['version']} |",
        "",
        *sections,
        "## Channels",
        "",
        f"| role | channel | {'transform | ' * transformed}mean | std | std of the change per step |",
        f"|---|---|{'---|' * transformed}---|---|---|",
    ]
    for role, about in metadata["normalisation"].items():
        functions = about.get("transform", [""] * len(about["channels"]))
        numbers = zip(*(about[k] for k in ("mean", "std", "change_std")), strict=True)
        for name, function, some in zip(about["channels"], functions, numbers, strict=True):
            texts = [function] * transformed + ["" if number is None else f"{number:.6g}" for number in some]
            lines.append(f"| {role} | {name} | {' | '.join(texts)} |")
    lines += [
        "",
        "Input channels: prognostic, static, dynamic forcing, in this order, each (x - mean) / std. Output channels:",
        "prognostic, diagnostic. With `predict: increment` a prognostic output is the change over a step in units of",
        "its standard deviation; with `predict: state`, and for diagnostics, it is (x - mean) / std.",
        *(_TRANSFORMED if transformed else ()),
        "",
        "## Use",
        "",
        *usage,
        "```python",
        "from credit_like.checkpoint.export import load_export",
        f'model = load_export("{out.name}").build()',
        f"# a torch module: (B, {model['in_channels']}, {model['frames']}, {points})",
        f"# -> (B, {model['out_channels']}, 1, {points})",
        "```",
        "",
        "The tensors and the JSON metadata can be read by any safetensors reader.",
        "",
    ]
    return "\n".join(lines)
