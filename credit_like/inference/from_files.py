"""A forecast of an exported model from the files of an analysis: `credit-like forecast`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import xarray as xr
import yaml

from credit_like import registry
from credit_like.checkpoint.files import digest
from credit_like.data import times as calendar
from credit_like.data.files.find import source_type
from credit_like.errors import UserError
from credit_like.inference.forecast import write_forecasts
from credit_like.inference.forecaster import load_forecaster, without_keys
from credit_like.outputs import check_new, draft_beside
from credit_like.parallel.device import pick_device
from credit_like.schema.load import dump_experiment, load_experiment

_OPTIONS = {
    "init": "--init",
    "lead": "--lead",
    "output.path": "--output",
    **dict.fromkeys(("output.type", "output.format"), "an --output with the suffix of the format"),
    "checkpoint": "an export of that checkpoint",
    "weights": "an export of those weights",
}
"""Keys of `inference` that options set, or that an export has settled."""
_FORMATS = {".zarr": "zarr", ".nc": "netcdf", ".grib": "grib", ".grib2": "grib"}


def forecast_from_files(
    export: str | Path,
    sources: Sequence[str],
    output: str | Path,
    *,
    lead: str,
    init: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
) -> Path:
    """Forecast with the model of an export from the newest time of `sources`, or from `init`, and write `output`.

    `export` is a file or a package. `sources` are files, stores or templates of them, which together hold what the model
    needs, except for the static fields of a package; `output` is a path that does
    not exist yet and whose suffix gives the format. `overrides` change keys of `inference`, as in `KEY=VALUE`. What was
    interrupted is repeated as a whole.

    Returns `output`. Raises UserError for files that do not open, variables, levels, times or forcing that are not there,
    and an `output` that exists or has another suffix.
    """
    output = Path(output)
    kind = _FORMATS.get(output.suffix)
    if kind is None or kind not in registry.names("writer"):
        usable = [suffix for suffix, of in _FORMATS.items() if of in registry.names("writer")]
        raise UserError(f"--output: expected a path that ends in {', '.join(usable)}, got {output}; change it")
    check_new("--output", output)
    if other := [override for override in overrides if not override.startswith("inference.")]:
        raise UserError(f"--set: expected keys of inference, got {other[0]}; change the experiment and train instead")
    for override in overrides:
        for key in _keys(override):
            if found := next((name for name in _OPTIONS if f"{key}.".startswith(f"inference.{name}.")), None):
                raise UserError(
                    f"--set: expected other keys of inference than {found}, got {override}; give {_OPTIONS[found]} instead"
                )
    forecaster = load_forecaster(export, pick_device(device))
    datasets = [open_source(source) for source in sources]
    store = forecaster.open(datasets, sources)
    init = init or calendar.to_text(store.times[-1])
    draft = draft_beside(output)
    settings = [f"inference.init=[{init}]", f"inference.lead={lead}", *overrides]
    # A path of the command line is as it stands: `~` and `$` have a meaning in the values of an experiment alone.
    literal = json.dumps(str(draft.absolute()).replace("$", "$$"))
    settings += [f"inference.output.type={kind}", f"inference.output.path={literal}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.yml"
        file.write_text(dump_experiment(forecaster.experiment), encoding="utf-8")
        forecaster.experiment = load_experiment(file, settings)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        weights = forecaster.sha256 or digest(Path(export))
        outcome = write_forecasts(forecaster.context(store, init), f"export {weights[:12]}")
        made = outcome.path if kind == "zarr" else next(outcome.path.iterdir())
        check_new("--output", output)  # another process may have been faster
        os.rename(made, output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        store.close()
    return output


def _keys(override: str) -> list[str]:
    """Return the keys that an override `KEY=VALUE` sets: those of the mapping where the value is one."""
    key, _, text = override.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:  # reported when the experiment is loaded
        value = None

    def keys(prefix: str, value: object) -> list[str]:
        if not isinstance(value, dict) or not value:
            return [prefix]
        return [name for child, inner in value.items() for name in keys(f"{prefix}.{child}", inner)]

    return keys(key.strip(), value)


def open_source(path: str) -> xr.Dataset:
    """Open a file, a store, or the files of a template as the data source of its format does, lazily.

    Raises UserError if there is nothing at the path or it has another format.
    """
    try:
        plugin = registry.module("source", source_type(path))
        dataset: xr.Dataset = plugin.open_dataset(plugin.Config(path=path))
    except UserError as error:
        raise UserError(without_keys(str(error))) from error
    return dataset
