"""Model packages: a folder in the layout of Hugging Face's repositories, from which forecasts can be made.

README.md           model card, with front matter that model hubs read
config.json         experiment, shapes, grid and normalisation, for readers; and the SHA-256 of the other files
model.safetensors   an export, as `export.py` describes it
static.nc           the static input fields, where the data of the run were at hand
corrections.nc      what corrections of the forecast take from the fields of the training, such as a climatology; likewise
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import credit_like
from credit_like import registry
from credit_like.checkpoint.errors import DamagedCheckpoint
from credit_like.checkpoint.export import card, export, find_unread, load_export
from credit_like.checkpoint.files import digest, to_json, write_bytes
from credit_like.checkpoint.format import MANIFEST
from credit_like.data.files import netcdf_files
from credit_like.data.named import datasets
from credit_like.data.store import FieldStore, open_store
from credit_like.errors import UserError, reading, reason
from credit_like.naming import weights_text
from credit_like.outputs import check_new, draft_beside
from credit_like.schema.experiment import Experiment
from credit_like.small_files import read_small
from credit_like.variables import ROLES, Variables

CARD, CONFIG, WEIGHTS = "README.md", "config.json", "model.safetensors"
STATIC, CORRECTIONS = "static.nc", "corrections.nc"
_FORMAT = 1
_LEADS = (24, 72, 120, 240)
"""Leads in hours of the scores on the card, as far as there are any."""


@dataclass(frozen=True)
class Package:
    """The files of a package that have been compared with their SHA-256; None where it has no such file."""

    weights: Path
    static: Path | None = None
    corrections: Path | None = None
    sha256: str = ""
    """Of the weights, empty where it has not been computed."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def open_package(name: str | Path, locate: Callable[[str], str | Path] | None = None) -> Package:
    """Return the files of a package and compare them with what config.json says.

    `locate` gives the path of a file of the package, by default that in the folder `name`. Raises UserError where
    config.json is not that of a package, and DamagedCheckpoint where another file is absent or has other content.
    """
    locate = locate or (lambda file: Path(name) / file)
    try:
        config = json.loads(read_small(Path(locate(CONFIG))))
        recorded = {file: config["files"][file]["sha256"] for file in config["files"]}
        known = (
            config["format"] == _FORMAT and WEIGHTS in recorded and recorded.keys() <= {WEIGHTS, STATIC, CORRECTIONS}
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{name}: expected a model package with {CONFIG}, got {error!r}; write it with `credit-like export RUN --package "
            "FOLDER`"
        ) from error
    if not known:
        raise UserError(
            f"{name}: expected a model package of format {_FORMAT} with {WEIGHTS}, got format {config['format']} with "
            f"{', '.join(recorded)}; write it again with `credit-like export RUN --package FOLDER`"
        )
    found = {file: _verified(name, Path(locate(file)), file, recorded[file]) for file in recorded}
    return Package(found[WEIGHTS], found.get(STATIC), found.get(CORRECTIONS), recorded[WEIGHTS])


def _verified(name: str | Path, path: Path, file: str, wanted: str) -> Path:
    try:
        there = digest(path)
    except OSError as error:
        raise DamagedCheckpoint(
            f"{name}: expected {file}, which {CONFIG} lists, got {reason(error)}; copy it again"
        ) from error
    if there != wanted:
        raise DamagedCheckpoint(
            f"{name}: expected {file} with SHA-256 {wanted[:12]}…, got {there[:12]}…; copy the package again"
        )
    return path


def load_static(path: Path) -> xr.Dataset:
    """Return the static fields of a package. Raises UserError for a file that is not readable."""
    with reading("the static fields of a package", path, "copy the package again"):
        return netcdf_files.load(path)


def load_measured(path: Path) -> dict[int, dict[str, NDArray[np.float64]]]:
    """Return what the corrections of a package took from the data of its training, by their position in the experiment.

    Raises UserError for a file that is not readable.
    """
    with reading("the climatology of a package", path, "copy the package again"):
        dataset = netcdf_files.load(path)
    result: dict[int, dict[str, NDArray[np.float64]]] = {}
    for key, array in dataset.data_vars.items():
        position, name = str(key).split("_", 2)[1:]
        result.setdefault(int(position), {})[name] = array.values
    return result


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_package(save_loc: str | Path, folder: Path, weights: str = "ema", licence: str | None = None) -> list[str]:
    """Write the newest intact checkpoint of a run, or a checkpoint, as a package; return what is missing in it, as sentences.

    The card has the scores of the run if they are those of these weights. The folder appears when it is complete.

    Raises UserError if there is no checkpoint or something is at `folder`.
    """
    save_loc = Path(save_loc)
    run = save_loc.absolute().parent.parent if (save_loc / MANIFEST).is_file() else save_loc
    check_new("--package", folder)
    draft = draft_beside(folder)
    draft.mkdir(parents=True)
    try:
        weights_file = export(save_loc, draft / WEIGHTS, weights)
        weights_file.with_suffix(".md").unlink()
        made = load_export(weights_file)
        experiment = Experiment.model_validate(made.metadata["experiment"])
        missing = _write_fields(experiment, draft)
        usage = _usage(needs_static=bool(Variables(experiment.data).role("static")) and not (draft / STATIC).exists())
        files = [draft / name for name in (WEIGHTS, STATIC, CORRECTIONS) if (draft / name).exists()]
        config = {
            "format": _FORMAT,
            "credit_like_version": credit_like.__version__,
            **made.metadata,
            "files": {file.name: {"bytes": file.stat().st_size, "sha256": digest(file)} for file in files},
        }
        write_bytes(draft / CONFIG, to_json(config))
        exported = made.metadata["checkpoint"]
        has_average = bool(find_unread(save_loc).names("ema/"))
        kinds = [exported["weights"]] if has_average else ["raw", "ema"]
        table, without = _scores_of(run / "evaluation", [weights_text(exported["name"], kind) for kind in kinds])
        missing += [f"no scores on the card: {without}"] if without else []
        if licence is None:
            missing.append(f"no licence: name one with --licence or in {CARD}")
        lines = [*_data_lines(experiment), *table]
        text = card(weights_file, made.metadata, made.weights, lines, usage)
        write_bytes(draft / CARD, (_front_matter(experiment, licence) + text).encode())
        check_new("--package", folder)  # another process may have been faster
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return missing


def _write_fields(experiment: Experiment, folder: Path) -> list[str]:
    """Write the static fields on the model's grid and what corrections need; return why some are absent although needed."""
    variables = Variables(experiment.data)
    # Corrections that may have a climatology and have none measure nothing.
    measured = [config for config in experiment.physics if hasattr(registry.of("physics", config), "measure")]
    wanted = {
        "static fields": bool(variables.role("static")),
        "climatology": any(getattr(config, "climatology", True) for config in measured),
    }
    if not any(wanted.values()):
        return []
    try:
        store = open_store(experiment.data, variables)
    except UserError as error:
        first = str(error).splitlines()[0]
        absent = " and no ".join(name for name, needed in wanted.items() if needed)
        return [f"no {absent}, because the data of the run do not open ({first}): give them as `forecast --from`"]
    made: dict[str, tuple[str, Callable[[FieldStore], xr.Dataset]]] = {
        "static fields": (STATIC, _static),
        "climatology": (CORRECTIONS, partial(_measured, experiment)),
    }
    missing = []
    try:
        for name, (file, fields) in made.items():
            try:
                if wanted[name]:
                    netcdf_files.save(fields(store), folder / file)
            except UserError as error:
                missing.append(f"no {name}: {error}")
    finally:
        store.close()
    return missing


def _measured(experiment: Experiment, store: FieldStore) -> xr.Dataset:
    """Return what corrections take from the data, each array on dimensions of its own."""
    result = xr.Dataset()
    for i, config in enumerate(experiment.physics):
        if (measure := getattr(registry.of("physics", config), "measure", None)) is not None:
            for name, values in measure(config, store.variables, store).items():
                key = f"correction_{i}_{name}"
                result[key] = ([f"{key}_axis_{axis}" for axis in range(values.ndim)], values)
    return result


def _static(store: FieldStore) -> xr.Dataset:
    """Return the static fields on the levels that the model reads. Raises UserError for several of one name in the files."""
    axes = {"latitude": store.grid.latitude, "longitude": store.grid.longitude}
    parts = datasets(store.variables.role("static"), store.static(), axes, store.attrs, store.level_attrs)
    return xr.merge(parts, join="outer", combine_attrs="drop_conflicts")


def _front_matter(experiment: Experiment, licence: str | None) -> str:
    """Return the YAML front matter that model hubs read; without a licence, that entry is left open."""
    chosen = "# license: not chosen yet" if licence is None else f"license: {json.dumps(licence)}"
    tags = "".join(f"- {tag}\n" for tag in ("weather", "forecasting", experiment.model.type))
    return f"---\n{chosen}\nlibrary_name: credit-like\ntags:\n{tags}---\n\n"


def _data_lines(experiment: Experiment) -> Iterator[str]:
    """Yield the sections of the card on data and variables."""
    source = experiment.data.source
    yield from ("## Data", "")
    for one in source if isinstance(source, tuple | list) else (source,):
        path = getattr(one, "path", "")
        names = [p if "://" in p else Path(p).name for p in ([path] if isinstance(path, str) else path) if p]
        yield f"- {one.type}{': ' + ', '.join(f'`{name}`' for name in names) if names else ''}"
    yield from ("", "| role | variable | levels |", "|---|---|---|")
    variables = Variables(experiment.data)
    for role in ROLES:
        for variable in variables.role(role):
            levels = ", ".join(f"{level:g}" for level in variable.levels)
            computed = " (computed)" if variable.spec.compute else ""
            yield f"| {role.replace('_', ' ')} | {variable.name}{computed} | {levels} |"
    yield ""


def _scores_of(folder: Path, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the section of the card on scores, if those in `folder` are of weights with one of these names, else why not."""
    if not (folder / "scores.csv").is_file():
        return [], "`credit-like evaluate` has not been run"
    again = "run `credit-like evaluate` again"
    try:
        with reading("scores", folder / "model.nc", again):
            source = str(netcdf_files.load(folder / "model.nc", decode_times=False).attrs.get("provenance", ""))
        table = list(_scores(folder / "scores.csv"))
    except UserError as error:
        return [], str(error)
    if not any(f", {name}" in source for name in names):
        return [], f"expected those of {names[0]}, got scores of {source or 'unknown weights'}; {again}"
    return table, "" if table else f"expected the metric rmse among the scores, got others; {again}"


def _scores(path: Path) -> Iterator[str]:
    """Yield the section of the card on the RMSE of the model's forecasts over the globe."""
    with reading("scores", path, "run `credit-like evaluate` again"), path.open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["source"], row["metric"], row["region"]) == ("model", "rmse", "global")
        ]
        values = {
            (row["variable"], row["level"], row["units"], float(row["lead_hours"])): float(row["value"]) for row in rows
        }
    there = sorted({key[-1] for key in values})
    leads = [lead for lead in _LEADS if lead in there] or there[-1:]
    if not leads:
        return
    yield from ("## Scores", "", "Root-mean-square error over the globe, on the test period.", "")
    yield f"| variable | level | units | {' | '.join(f'{lead:g} h' for lead in leads)} |"
    yield "|---" * (3 + len(leads)) + "|"
    for name, level, units in dict.fromkeys(key[:-1] for key in values):
        cells = [values.get((name, level, units, lead)) for lead in leads]
        numbers = " | ".join("" if cell is None else f"{cell:.4g}" for cell in cells)
        yield f"| {name} | {f'{float(level):g}' if level else ''} | {units} | {numbers} |"
    yield ""


def _usage(needs_static: bool) -> Sequence[str]:
    """Return the lines of the card on forecasts from the package."""
    static = " --from static.nc" if needs_static else ""
    return (
        "A forecast from the files of an analysis on the model's grid (`pip install credit-like`, in this folder):",
        "",
        "```bash",
        f"credit-like forecast . --from analysis.nc{static} --lead 10d -o forecast.nc",
        "```",
        "",
        "In Earth2Studio, `credit_like.interop.earth2studio.load_model(FOLDER)` returns a prognostic model.",
        "",
    )
