"""Translate CREDIT's `loss` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from credit_like.migrate.document import Document, Keys

_LOSSES = {"mse": "mse", "mae": "mae", "l1": "mae", "huber": "huber", "logcosh": "log-cosh"}
_SCORES = ("KCRPS", "almost-fair-crps", "ring-crps")
"""Losses of ensembles; all of them are fair unless told otherwise."""


def loss_section(source: Document) -> dict[str, Any]:
    """Return the `loss` section; CREDIT compares normalised states."""
    by_variable = isinstance(source.get("loss", "args"), dict)
    at: Keys = ("loss", "args") if by_variable else ("loss",)
    source.read.discard(("loss", "args"))
    kind = str(source.get(*at, "training_loss", default=source.get("loss", "type") or "mse"))
    kind = "mse" if kind == "base" else kind
    parameters: Keys = (*at, "base_loss_parameters" if by_variable else "training_loss_parameters")
    made: dict[str, Any] = {"type": "mse", "scale": "state", **_function(source, at, kind, parameters)}
    # CREDIT's loss by variable weights rows only if this is requested.
    if not source.get(*at, "use_latitude_weights", default=not by_variable):
        made["latitude_weights"] = False
    _remark_on_others(source, at)
    if weights := _variable_weights(source, at, by_variable):
        made["variable_weights"] = weights
    return made


def _function(source: Document, at: Keys, kind: str, parameters: Keys) -> dict[str, Any]:
    """Return the type of the loss and its parameters."""
    made: dict[str, Any] = {"type": _LOSSES.get(kind, "mse")}
    if kind == "huber" and (delta := source.get(*parameters, "delta")) is not None:
        made["delta"] = float(delta)
    elif kind in _SCORES and int(source.get("trainer", "ensemble_size", default=1)) < 2:
        made["type"] = "mae"
        source.remark(
            (*at, "training_loss"), "of one member it is the mean absolute error, which is taken; see `trainer.members`"
        )
        source.get(*parameters)
    elif kind in _SCORES:
        made |= {"type": "crps", "alpha": 1.0}
        if source.get(*parameters, "biased"):
            made["alpha"] = 0.0
        if (alpha := source.get(*parameters, "alpha")) is not None:
            made["alpha"] = float(alpha)
    elif kind not in _LOSSES:
        place: Keys = (*at, "training_loss") if "training_loss" in source.section(*at) else ("loss", "type")
        source.remark(place, "not translated: the mean squared error is taken")
    return made


def _remark_on_others(source: Document, at: Keys) -> None:
    """Remark on the losses and weights that are not translated."""
    for key in ("validation_loss", "validation_loss_parameters"):
        if source.get(*at, key):
            source.remark((*at, key), "validations use the loss of training; `trainer.monitor` scores short forecasts")
    for key, used, meaning in (
        ("use_power_loss", bool, "not translated: there is no power loss"),
        ("use_spectral_loss", bool, "not translated: choose `loss: {type: sum, …}` with a term `spectral`"),
        ("spectral_lambda_reg", bool, "the `weight` of such a term"),
        ("spectral_wavenum_init", bool, "a term `spectral` compares all wavenumbers"),
        ("include_computed_diagnostics", bool, "not translated: the loss is that of the predicted variables"),
        ("normalize_weights", lambda value: value is False, "weights are divided by their sum"),
    ):
        if used(value := source.get(*at, key)):
            source.remark((*at, key), meaning, covered=key == "normalize_weights")
        elif value is not None and key.startswith("use_"):  # then its parameters have no effect
            for part in ("spectral_lambda_reg", "spectral_wavenum_init"):
                source.get(*at, part)


def _variable_weights(source: Document, at: Keys, by_variable: bool) -> dict[str, Any]:
    """Return the weights of variables, and remark on others by which errors are divided."""
    weighted = source.get(*at, "use_variable_weights", default=by_variable)
    weighting = source.get(*at, "var_weighting", default="inverse_variance" if by_variable else None)
    if weighting == "inverse_variance":
        if source.section("loss", "args").get("var_weighting"):
            source.remark(
                (*at, "var_weighting"), "errors are divided by the standard deviation of each variable", covered=True
            )
    elif weighting and weighting != "manual":
        source.remark(
            (*at, "var_weighting"), "errors are divided by the standard deviation of each variable; see `variable_weights`"
        )  # fmt: skip
    if source.get(*at, "scaler_path"):
        source.remark((*at, "scaler_path"), "errors are divided by the numbers of the statistics", covered=True)
    weights = source.get(*at, "variable_weights", default={})
    if not isinstance(weights, Mapping) or not weights:
        return {}
    if weighted:
        return {name.rpartition("/")[2]: _weight(value) for name, value in weights.items()}
    source.remark((*at, "variable_weights"), "not used, as in CREDIT", covered=True)
    return {}


def _weight(value: Any) -> Any:
    """Return the weight of a variable: one number, or one for each level unless these are the same."""
    values = [float(each) for each in (value if isinstance(value, list) else [value])]
    return values if len(set(values)) > 1 else values[0]
