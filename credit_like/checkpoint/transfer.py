"""Weights of another run as the start of this one.

Parameters go by name, channels of the first and last layers by the names of variables and levels. What both models have
in common then gives the same forecast: the input of a variable that the source lacks has weight zero, and the output of
such a variable is zero in normalised units, which is its mean, or no change with `predict: increment`. An input that
this model lacks counts as if it were always at its mean.

The channels that both have keep the source's normalisation (`adopt`), so that weights need not be changed for other
statistics. Folding those into the weights would not be exact: a layer that pads with zeros sees another value beyond the
edge of the grid, and a layer with spectral norm has no free scale.

With spectral norm, W/σ stays the source's: u and v get zeros at new channels. Where channels are dropped, the σ of the
remaining matrix may be smaller; v is scaled so that σ starts at its old value, and the list of changes names the factor
by which the first optimiser step then enlarges the layer's weights.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from credit_like import transforms
from credit_like.checkpoint.errors import DamagedCheckpoint, reading_metadata, unreadable
from credit_like.checkpoint.export import find, find_unread
from credit_like.checkpoint.files import digest
from credit_like.checkpoint.format import MANIFEST, Piece, Reader
from credit_like.checkpoint.manager import Checkpoint
from credit_like.checkpoint.shards import named_pieces
from credit_like.data import units
from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.models import ChannelAxis, ModelConfig
from credit_like.nn import init, spectral_norm
from credit_like.nn.linear import Lora
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.origin import StartFrom
from credit_like.small_files import require_regular
from credit_like.variables import ROLES, Variables

Normalisation = Mapping[str, Mapping[str, Sequence[Any]]]
"""Per role: `channels`, `units`, `mean`, `std` and `change_std`, as exports have them."""


@dataclass(frozen=True)
class Channels:
    """Names of the channels of one input frame and of the output, in order; None where they are not known."""

    inputs: tuple[str, ...] | None
    outputs: tuple[str, ...] | None
    frames: int = 1

    @classmethod
    def of(cls, variables: Variables, frames: int, predict: str) -> Channels:
        """Return the channels of an experiment. The name of a variable with a transform includes it."""
        roles = {role: variables.role(role) for role in ROLES}
        names = {role: named(Variables.channel_names(of), transforms.names(of)) for role, of in roles.items()}
        return cls.of_roles(names, frames, predict)

    @classmethod
    def of_roles(cls, names: Mapping[str, Sequence[str]], frames: int, predict: str) -> Channels:
        """Return the channels for the names of each role."""
        inputs = (*names["prognostic"], *names["static"], *names["dynamic_forcing"])
        # A prognostic output may be a change, a diagnostic one never is: a variable that changes its role has no weights.
        kind = "change of " if predict == "increment" else ""
        outputs = (*(f"{kind}{name}" for name in names["prognostic"]), *names["diagnostic"])
        return cls(inputs, outputs, frames)


@dataclass
class Source:
    """Weights elsewhere: a checkpoint of a run, or one safetensors file."""

    path: Path
    config: dict[str, Any]
    """The `model` section."""
    channels: Channels
    normalisation: Normalisation | None
    step: int | None
    experiment: str | None
    weights: str
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the model's tensors by name."""
    checkpoint: Checkpoint | None = None
    names: dict[str, str] = field(default_factory=dict)
    """Name of each tensor in the checkpoint."""
    lora_scale: float | None = None
    """Factor of the low-rank changes that the weights have, if any."""

    @classmethod
    def open(cls, section: StartFrom, runtime: Runtime | None = None) -> Source:
        """Open the source without reading its tensors.

        With a `runtime` all ranks call this together; they share the verification of a checkpoint, of which otherwise only
        the manifest and the sizes of files are checked. Raises UserError if there is no source, or what is there has no
        weights of a model: with a `runtime` the same on all ranks.
        """
        path, alone = Path(section.path), Runtime()
        if (runtime or alone).agree(not path.exists()):
            raise UserError(
                f"start_from.path: expected a run, a checkpoint or an export, got nothing at {path}; change the path"
            )
        source, refused, cause = None, None, None
        try:
            source = cls._of_file(path) if path.is_file() else cls._of_run(path, section.weights, runtime)
        except (DamagedCheckpoint, SafetensorError, KeyError, TypeError, ValueError, OSError, RecursionError) as error:
            cause, told = error, f"no {error}" if isinstance(error, KeyError) else str(error)
            refused = f"start_from.path: expected a run, a checkpoint or an export, got {path}: {told}; change the path"
        if refused := (runtime or alone).first(refused):
            raise UserError(refused) from cause
        assert source is not None
        return source

    @classmethod
    def _of_run(cls, path: Path, weights: str, runtime: Runtime | None) -> Source:
        checkpoint = find_unread(path) if runtime is None else find(path, runtime=runtime)
        averages = checkpoint.names("ema/") if weights == "ema" else []
        names = {name.removeprefix("model/"): name for name in checkpoint.names("model/")}
        names |= {name.removeprefix("ema/"): name for name in averages}
        shapes = {name: tuple(checkpoint.manifest["tensors"][full]["shape"]) for name, full in names.items()}
        meta = checkpoint.meta
        experiment, normalisation = meta["experiment"], meta["normalisation"]
        return cls(
            checkpoint.folder,
            experiment["model"],
            channels_of(normalisation, experiment["data"].get("history_len", 1), experiment["model"]),
            normalisation,
            checkpoint.step,
            experiment["name"],
            "ema" if averages else "raw",
            shapes,
            checkpoint,
            names,
            checkpoint.lora_scale,
        )

    @classmethod
    def _of_file(cls, path: Path) -> Source:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items() if key != "format"}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if "model" not in metadata:
            raise ValueError("a file without metadata `model`, which `export` and `import-credit` write")
        model, saved = metadata["model"], metadata.get("checkpoint", {})
        normalisation, frames = metadata.get("normalisation"), model["frames"]
        channels = Channels(None, None, frames)
        if normalisation:
            channels = channels_of(normalisation, frames, model["config"])
        if "channels" in metadata:
            channels = Channels(tuple(metadata["channels"]["inputs"]), tuple(metadata["channels"]["outputs"]), frames)
        return cls(
            path,
            model["config"],
            channels,
            normalisation,
            saved.get("step"),
            metadata.get("experiment", {}).get("name"),
            saved.get("weights", "raw"),
            shapes,
        )

    def fill(self, pieces: Mapping[str, Piece]) -> None:
        """Copy the values of each piece's box; nothing else is read."""
        if self.checkpoint is not None:
            reader = Reader(self.checkpoint.folder, self.checkpoint.manifest)
            for name, piece in pieces.items():
                reader.fill(self.names[name], piece)
            return
        with safe_open(self.path, framework="pt") as file:
            for name, piece in pieces.items():
                box = piece.slices
                piece.local.copy_(file.get_slice(name)[box] if box else file.get_tensor(name))

    def read(self, name: str) -> Tensor:
        """Return a whole tensor in fp32."""
        whole = torch.empty(self.shapes[name])
        self.fill({name: Piece.whole(whole)})
        return whole

    def provenance(self) -> dict[str, Any]:
        """Return where the weights come from: path, SHA-256 of the content, step, experiment and kind of weights.

        The content of a checkpoint is that of its manifest, which has the checksums of its files. Raises DamagedCheckpoint where
        it is no longer there, and RunError where it cannot be read now.
        """
        file = self.path / MANIFEST if self.checkpoint is not None else self.path
        try:
            sha256 = digest(file)
        except OSError as error:
            raise unreadable(file, error) from error
        return {
            "path": str(self.path.resolve()),
            "sha256": sha256,
            "step": self.step,
            "experiment": self.experiment,
            "weights": self.weights,
        }


def channels_of(normalisation: Normalisation, frames: int, config: Mapping[str, Any]) -> Channels:
    """Return the channels that a checkpoint's or an export's metadata describe, of a model with this configuration."""
    names = {role: named(*_functions(normalisation[role])) for role in ROLES}
    return Channels.of_roles(names, frames, config.get("predict", "increment"))


def named(names: Sequence[str], functions: Sequence[str]) -> list[str]:
    """Return names of channels that differ where the transforms do."""
    return [f"{name} as {function}" if function else name for name, function in zip(names, functions, strict=True)]


def _functions(about: Mapping[str, Sequence[Any]]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of a role's channels and their transforms, empty for none."""
    names = about["channels"]
    return names, about.get("transform") or [""] * len(names)


@dataclass(frozen=True)
class Positions:
    """Where the entries of an axis are in the source, -1 for new ones; the source has `there` entries."""

    at: tuple[int, ...]
    there: int

    def repeated(self, count: int) -> Positions:
        """Return the positions for an axis with `count` consecutive entries for each one here."""
        at = tuple(p * count + r if p >= 0 else -1 for p in self.at for r in range(count))
        return Positions(at, self.there * count)

    @property
    def unchanged(self) -> bool:
        return self.at == tuple(range(self.there))

    @property
    def shared(self) -> bool:
        """Whether any entry is in the source."""
        return any(p >= 0 for p in self.at)

    @property
    def dropped(self) -> bool:
        """Whether entries of the source have no place."""
        return len({p for p in self.at if p >= 0}) < self.there


def by_name(wanted: Sequence[str], there: Sequence[str]) -> Positions:
    """Return where each wanted name is."""
    at = {name: i for i, name in enumerate(there)}
    return Positions(tuple(at.get(name, -1) for name in wanted), len(there))


@dataclass
class TransferPlan:
    """The origin of every tensor of a model."""

    direct: list[str] = field(default_factory=list)
    """Tensors that are the source's."""
    mapped: dict[str, tuple[tuple[ChannelAxis, Positions], ...]] = field(default_factory=dict)
    """Tensors that get the source's entries at other positions, or new ones."""
    initial: list[str] = field(default_factory=list)
    """Tensors that keep their initial values."""
    notes: list[str] = field(default_factory=list)
    """Differences between the two models, as sentences."""


def plan(source: Source, model: nn.Module, config: ModelConfig, channels: Channels, missing: str) -> TransferPlan:
    """Return how this model, which may be on meta, gets the source's weights.

    Raises UserError with everything that cannot be taken over, unless `missing` is `initial`.
    """
    model, result = get_raw_model(model), TransferPlan()
    problems = [
        f"model.{key}: expected {there!r} as in the source, got {here!r}"
        for key, (there, here) in different_keys(source.config, config).items()
    ]
    axes: Mapping[str, tuple[ChannelAxis, ...]] = getattr(model, "channel_axes", dict)()
    sides = _sides(source, channels, result.notes)
    if not axes and not all(side.unchanged for side in sides.values()):
        problems.append(f"model.type: {config.type} does not say which of its tensors have channels (`channel_axes`)")
    strange = [side for side, positions in sides.items() if not positions.shared]
    problems += [f"expected some {side} of the source, got none" for side in strange]
    shapes = {name: piece.shape for name, piece in named_pieces(model).items()}
    for name, shape in shapes.items():
        there = source.shapes.get(name)
        along = tuple((axis, _along(axis, sides, shape, there)) for axis in axes.get(name, ())) if there else ()
        if there is None:
            result.initial.append(name)
            if not any(fnmatch.fnmatch(name, pattern) for pattern in getattr(model, "identities", ())):
                problems.append(f"the source has no {name}")
        elif _mapped_shape(there, along) != shape:
            result.initial.append(name)
            problems.append(f"{name}: expected shape {shape}, got {there} in the source")
        elif any(axis.side in strange for axis, _ in along):
            result.initial.append(name)
        elif all(positions.unchanged for _, positions in along):
            result.direct.append(name)
        else:
            result.mapped[name] = along
            problems += [
                f"{axis.key}: expected at least {positions.there // axis.repeat} as in the source, whose outputs share "
                f"them, got {len(positions.at) // axis.repeat}"
                for axis, positions in along
                if axis.side == "hidden" and positions.dropped
            ]
    scales = {module.scale for module in model.modules() if isinstance(module, Lora)}
    if source.lora_scale is not None and scales - {source.lora_scale}:
        problems.append(
            f"start_from.lora.alpha: expected changes times {source.lora_scale:g} as in the source, got {min(scales):g}"
        )
    problems += [f"this model has no {name}" for name in sorted(set(source.shapes) - set(shapes))]
    problems = list(dict.fromkeys(problems))
    _keep_norms_together(model, result)
    if problems and missing == "error":
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise UserError(
            f"start_from.path: expected weights with which this model gives the source's forecasts, got {source.path}: "
            f"{shown}; change the model, or set start_from.missing to initial"
        )
    if not result.direct and not result.mapped:
        raise UserError(
            f"start_from.path: expected weights of this model, got {source.path}, in which no tensor fits it; change it"
        )
    result.notes += [f"not taken over: {problem}" for problem in problems]
    return result


def different_keys(there: Mapping[str, Any], config: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys of the model in which the functions of the two differ, with both values.

    Of models of different types, this is the type alone.
    """
    here = config.model_dump(mode="json")
    if there.get("type") != here["type"]:
        return {"type": (there.get("type"), here["type"])}
    free = getattr(config, "keys_without_weights", ())
    return {
        key: (there[key], here[key]) for key in there if key not in free and key in here and here[key] != there[key]
    }


def _sides(source: Source, channels: Channels, notes: list[str]) -> dict[str, Positions]:
    """Return the positions of inputs (of all frames) and outputs; add the channels taken over, new or dropped to `notes`."""
    assert channels.inputs is not None
    assert channels.outputs is not None
    theirs = source.channels
    inputs, outputs = theirs.inputs, theirs.outputs
    if inputs is None or outputs is None:
        inputs, outputs = channels.inputs, channels.outputs
        notes.append("the source does not name its channels: they are taken in order")
    for side, here, there in (("inputs", channels.inputs, inputs), ("outputs", channels.outputs, outputs)):
        new, gone = [n for n in here if n not in there], [n for n in there if n not in here]
        if tuple(here) != tuple(there):
            notes.append(f"{side} of the source: {', '.join(n for n in here if n in there) or 'none'}")
        notes += [f"new {side}: {', '.join(new)}"] if new else []
        notes += [f"dropped {side}: {', '.join(gone)}"] if gone else []
    # A channel's frames lie side by side, oldest first. The newest are the same; older ones are new, or dropped.
    shift, at = theirs.frames - channels.frames, by_name(channels.inputs, inputs).at
    if shift:
        notes.append(f"frames of history: {channels.frames}, {theirs.frames} in the source")
    frames = range(shift, theirs.frames)
    each = tuple(p * theirs.frames + t if p >= 0 and t >= 0 else -1 for p in at for t in frames)
    return {"inputs": Positions(each, len(inputs) * theirs.frames), "outputs": by_name(channels.outputs, outputs)}


def _along(
    axis: ChannelAxis, sides: Mapping[str, Positions], shape: tuple[int, ...], there: tuple[int, ...]
) -> Positions:
    """Return the positions of the entries along an axis of a tensor."""
    if axis.side != "hidden":
        return sides[axis.side].repeated(axis.repeat)
    count = there[axis.dim]
    return Positions(tuple(i if i < count else -1 for i in range(shape[axis.dim])), count)


def _mapped_shape(there: tuple[int, ...], along: Sequence[tuple[ChannelAxis, Positions]]) -> tuple[int, ...] | None:
    """Return the shape of a mapped tensor; None if the channels of the source's tensor do not match their names."""
    result = list(there)
    for axis, positions in along:
        if positions.there != there[axis.dim]:
            return None
        result[axis.dim] = len(positions.at)
    return tuple(result)


def _keep_norms_together(model: nn.Module, result: TransferPlan) -> None:
    """Treat weight, u and v of a spectral norm alike: all initial where one of them is, else all mapped."""
    for name, _ in spectral_norm.layers(model):
        parts = [f"{canonical_name(name)}.{leaf}" for leaf in _OF_A_NORM]
        initial = any(part in result.initial for part in parts)
        if initial or any(part in result.mapped for part in parts):
            result.direct = [name for name in result.direct if name not in parts]
            mapped = {part: result.mapped.pop(part, ()) for part in parts}
            if initial:
                result.initial += [part for part in parts if part not in result.initial]
            else:
                result.mapped |= mapped


_OF_A_NORM = ("weight", "spectral.u", "spectral.v")


def check_optimizer(section: StartFrom, source: Source, plan: TransferPlan, kind: str) -> None:
    """Raise UserError if the state of an optimiser of this kind is requested from a source that has none for these weights."""
    if not section.optimizer:
        return
    if source.checkpoint is None or plan.mapped or plan.initial:
        raise UserError(
            "start_from.optimizer: expected a checkpoint of the same model with the same variables, got "
            f"{source.path}; set it to false"
        )
    there = _optimizer_of(source.checkpoint.meta)
    if there != kind:
        raise UserError(
            f"start_from.optimizer: expected the state of {kind}, the optimiser of this training, got that of {there} in "
            f"{source.path}; set it to false, or trainer.optimizer.type to {there}"
        )


def _optimizer_of(meta: Mapping[str, Any]) -> str:
    """Return the kind of the optimiser of a checkpoint's phase."""
    trainer = meta["experiment"]["trainer"]
    phases = trainer.get("phases") or [{}]
    of_phase = (phases[meta.get("phase", 0)].get("optimizer") or {}).get("type")
    return str(of_phase or trainer["optimizer"]["type"])


@torch.no_grad()
def load(source: Source, plan: TransferPlan, model: nn.Module, seed: int) -> list[str]:
    """Fill this rank's part of a model that has its initial values; return what the first optimiser step will change.

    A rank reads the boxes that it holds, and the whole tensors of the first and last layers where channels differ. 1/σ of
    the spectral norms, which is not saved, is left to the caller's `spectral_norm.refresh`.
    """
    model = get_raw_model(model)
    pieces = named_pieces(model)
    source.fill({name: pieces[name] for name in plan.direct if pieces[name].local.numel()})
    norms = {canonical_name(name): layer for name, layer in spectral_norm.layers(model)}
    owners = {canonical_name(name): (module, leaf) for module, leaf, name, _ in init.own_parameters(model)}
    changes: list[str] = []
    # One layer at a time, so that no more than one is whole in memory.
    for layer, names in _by_layer(plan.mapped, norms).items():
        whole = {name: source.read(name) for name in names}
        mapped = dict(_mapped(whole, plan, owners, seed))
        if layer in norms:
            changes += _rescaled(whole, mapped, layer, norms[layer])
        for name, value in mapped.items():
            if pieces[name].local.numel():
                pieces[name].local.copy_(value[pieces[name].slices])
    return changes


def _by_layer(names: Iterable[str], norms: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return tensors by the layer whose spectral norm needs them together; other tensors are by themselves."""
    result: dict[str, list[str]] = {}
    for name in names:
        layer = next((of for leaf in _OF_A_NORM if (of := name.removesuffix(f".{leaf}")) in norms), name)
        result.setdefault(layer, []).append(name)
    return result


def _mapped(
    whole: Mapping[str, Tensor], plan: TransferPlan, owners: Mapping[str, tuple[nn.Module, str]], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with channels: the source's entries where it has them, else zeros or initial values."""
    for name, value in whole.items():
        for axis, positions in plan.mapped[name]:
            at = torch.tensor(positions.at)
            new = (at < 0).view([-1 if dim == axis.dim else 1 for dim in range(value.ndim)])
            value = value.index_select(axis.dim, at.clamp(min=0))
            if axis.added == "initial" and new.any():
                module, leaf = owners[name]
                initial = init.initial_value(module, leaf, name, tuple(value.shape), seed)
                v = whole.get(name.removesuffix("weight") + "spectral.v")
                value = torch.where(new, initial if v is None else _without(initial, v), value)
            else:
                value = value.masked_fill(new, 0.0)
        yield name, value


def _without(weight: Tensor, v: Tensor) -> Tensor:
    """Return the weight with rows orthogonal to v: such rows do not change the singular value of v."""
    matrix = spectral_norm.as_matrix(weight, 0)
    return spectral_norm.from_matrix(matrix - torch.outer(matrix @ v, v), weight.shape, 0)


def _rescaled(whole: Mapping[str, Tensor], mapped: dict[str, Tensor], name: str, layer: nn.Module) -> Iterator[str]:
    """Scale v of a spectral norm that lost channels so that σ is the source's; yield what that means."""
    spectral = layer.spectral
    assert isinstance(spectral, spectral_norm.SpectralNorm)
    weight, u, v = (f"{name}.{leaf}" for leaf in _OF_A_NORM)
    before, after = (spectral_norm.as_matrix(of[weight], spectral.output_dim) for of in (whole, mapped))
    sigma = torch.dot(whole[u], before @ whole[v])
    remaining = torch.dot(mapped[u], after @ mapped[v])
    if remaining < 0.1 * sigma:  # what remains has hardly a part in these singular vectors
        mapped[u], mapped[v] = _singular_vectors(after)
        remaining = torch.dot(mapped[u], after @ mapped[v])
    mapped[v] = mapped[v] * (sigma / remaining) if remaining > 0 else mapped[v]
    iterated = nn.functional.normalize(after.T @ mapped[u], dim=0)
    factor = float(sigma / (after @ iterated).norm())
    if abs(factor - 1.0) > 1e-3:
        yield f"{name}: without the dropped channels the first optimiser step scales this layer by {factor:.3g}"


def _singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and v of about the largest singular value, by power iteration from the longest row."""
    v = matrix[matrix.norm(dim=1).argmax()]
    for _ in range(20):
        u = nn.functional.normalize(matrix @ v, dim=0)
        v = nn.functional.normalize(matrix.T @ u, dim=0)
    return u, v


# ---- normalisation ---------------------------------------------------------------------------------------------------


def refuse_other_units(source: Source, store: FieldStore) -> None:
    """Raise UserError where the data have channels of the source in other units than it was trained on."""
    with reading_metadata(source.path):
        other = [
            f"{name} in {was!r} (got {now!r})" for name, was, now in other_units(source.normalisation or {}, store)
        ]
    if other:
        raise UserError(
            f"start_from.path: expected data in the units of {source.path}, got others: {', '.join(other)}; give these "
            "variables `units`, or another name where they are another quantity"
        )


def other_units(normalisation: Normalisation, store: FieldStore) -> list[tuple[str, str, str]]:
    """Return the variables that the data have in other units than those of these channels: name, the channels' and the data's.

    Units that are not known are not compared.
    """
    now = {
        (name, function): (variable.name, store.attrs(variable).get("units", ""))
        for variable in store.variables
        for name, function in zip(variable.channels, transforms.names([variable]), strict=True)
    }
    other: dict[str, tuple[str, str, str]] = {}
    for about in normalisation.values():
        for channel, was in zip(zip(*_functions(about), strict=True), about.get("units", ()), strict=False):
            name, declared = now.get(channel, ("", ""))
            if units.same(was, declared) is False:
                other[name] = name, was, declared
    return list(other.values())


def adopt(statistics: Statistics, source: Source) -> tuple[Statistics, list[str]]:
    """Return statistics with the source's mean, std and change_std of the channels that it has; and notes on them.

    A channel whose own mean or standard deviation is far from the source's may be in other units: it gets a note.
    """
    dataset, notes = statistics.dataset.copy(deep=True), []
    own = dataset["transform"].values if "transform" in dataset else [""] * len(dataset["channel"])
    at = {
        (str(name), str(function)): i
        for i, (name, function) in enumerate(zip(dataset["channel"].values, own, strict=True))
    }
    for about in (source.normalisation or {}).values():
        channels = zip(*_functions(about), strict=True)
        for channel, mean, std, change in zip(channels, *(about[k] for k in _MOMENTS), strict=True):
            if channel not in at:
                continue
            name = channel[0]
            own_mean, own_std = (float(dataset[key].values[at[channel]]) for key in ("mean", "std"))
            if abs(own_mean - mean) > 5 * max(std, own_std) or not 0.05 < own_std / std < 20:
                notes.append(
                    f"{name}: mean {own_mean:.4g} and std {own_std:.4g} here, {mean:.4g} and {std:.4g} in the source; "
                    "compare their units"
                )
            for key, value in zip(_MOMENTS, (mean, std, change), strict=True):
                if value is not None:
                    dataset[key].values[at[channel]] = value
    dataset.attrs["adopted_from"] = str(source.path)
    return Statistics(dataset), notes


_MOMENTS = ("mean", "std", "change_std")
