"""Translate an experiment of NCAR CREDIT, of its first or second generation, into an experiment of this package.

Every key of the source is read, or listed with its line and what it means here: nothing is dropped silently. The names
of CREDIT's keys are facts from its published configuration files and their comments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_like.errors import UserError
from credit_like.migrate import blocks
from credit_like.migrate.absent import INSTEAD, NOT
from credit_like.migrate.corrections import corrections
from credit_like.migrate.data import first_generation, second_generation
from credit_like.migrate.document import Document, Remark, read, shell_variables
from credit_like.migrate.forecasts import inference_section
from credit_like.migrate.jobs import job_sections
from credit_like.migrate.loss import loss_section
from credit_like.migrate.model import model_section
from credit_like.migrate.text import written
from credit_like.migrate.trainer import trainer_section
from credit_like.outputs import check_new
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

if TYPE_CHECKING:
    from credit_like.checkpoint.credit import ModelArguments

__all__ = ["Document", "Remark", "Translation", "read", "report", "run", "translate", "written"]


@dataclass(frozen=True)
class Translation:
    """An experiment of this package as plain data for YAML, and the keys that it could not express."""

    experiment: dict[str, Any]
    remarks: tuple[Remark, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Channels and normalisation in the metadata of the file of weights, where the source has them."""
    arguments: ModelArguments | None = None
    """Those of CREDIT's model."""


def translate(path: Path, upsample: str | None = None, weights: tuple[Path, Path] | None = None) -> Translation:
    """Translate the experiment in `path`.

    `upsample` is the decoder of the weights that belong to it, if they are at hand, and `weights` are CREDIT's checkpoint and
    the file of its conversion. Raises UserError if the file is no experiment of CREDIT, or its model is another architecture.
    """
    source = read(path)
    try:
        return _translated(source, path, upsample, weights)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path}: expected an experiment as CREDIT's own are, got values of another kind: {error!r}; correct them"
        ) from error


def _translated(source: Document, path: Path, upsample: str | None, weights: tuple[Path, Path] | None) -> Translation:
    second = isinstance(source.get("data", "source"), dict)
    source.read.discard(("data", "source"))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-") or "credit"
    functions, logs = blocks.transforms(source)
    data = (second_generation if second else first_generation)(source, functions)
    blocks.note(source)
    metadata = blocks.of_weights(source, data, weights[0], logs) if weights else {}
    if source.get("data", "mean_path") and "normalisation" not in metadata:
        for key in ("mean_path", "std_path"):
            source.remark(
                ("data", key),
                "not read: `credit-like preprocess` fits the statistics, or name a file in `data.statistics`",
            )
    variables = Variables(DataSection.model_validate(data))
    model, arguments = model_section(source, upsample, variables, weights is not None)
    loss = loss_section(source)
    experiment: dict[str, Any] = {
        "name": name,
        "seed": source.get("seed", default=0),
        "save_loc": shell_variables(str(source.get("save_loc", default=f"runs/{name}"))).rstrip("/"),
        **({"start_from": {"path": str(weights[1])}} if weights else {}),
        "data": data,
        "model": model,
        "loss": loss,
        "physics": corrections(source, variables),
        "trainer": trainer_section(source, model, loss, weights is not None),
        "inference": inference_section(source, data),
        **job_sections(source),
    }
    for keys in list(source.rest()):
        if source.get(*keys) in (None, {}, []):  # says nothing
            continue
        instead = INSTEAD.get(str(keys[-1]))
        missing = next((NOT[key] for key in map(str, keys) if key in NOT), None)
        if source.get(*keys) is False and (missing or keys[-1] == "activate"):
            source.remark(keys, "not active", covered=True)
        elif missing:
            source.remark(keys, missing)
        else:
            meaning = instead or "unknown to this translation; see whether it matters"
            source.remark(keys, meaning, covered=instead is not None)
    remarks = sorted(set(source.remarks), key=lambda remark: (remark.line, remark.key, remark.meaning))
    made = {key: value for key, value in experiment.items() if value not in ({}, [])}
    return Translation(made, tuple(remarks), metadata, arguments)


def run(path: Path, weights: Path | None, output: Path) -> Translation:
    """Write the translation of an experiment, and of its weights beside it; return the result.

    Nothing is written before everything that can be refused has been. Raises UserError as `translate` does, if the
    output exists, or if the weights do not fit the model.
    """
    from credit_like.checkpoint.credit import check_output, decoder_of, read_checkpoint, write_weights
    from credit_like.checkpoint.files import replace_file

    check_new("--output", output)
    converted = output.with_suffix(".safetensors")
    if weights:
        check_output(weights, converted)
    state = read_checkpoint(weights) if weights else {}
    translation = translate(path, decoder_of(state) if weights else None, (weights, converted) if weights else None)
    if weights:
        if translation.arguments is None:
            raise UserError(f"{path}: expected the `model` section of the weights, got none; give their own experiment")
        write_weights(state, translation.arguments, converted, translation.metadata)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, written(translation.experiment, path).encode())
    return translation


def report(translation: Translation, path: Path, output: Path) -> str:
    """Return a report: the files written, and every key that was not translated one to one, those that need a decision first."""
    lines = [f"{output}: {len(written(translation.experiment, path).splitlines())} lines"]
    for covered, title in (
        (False, "To decide:"),
        (True, "Without a counterpart, because this package does it another way or always:"),
    ):
        found = [remark for remark in translation.remarks if remark.covered == covered]
        lines += ["", title] if found else []
        lines += [f"{path.name}:{r.line}: {r.key} ({r.value}): {r.meaning}" for r in found]
    return "\n".join(lines)
