"""Translate CREDIT's `model` section, or put the default WXFormer in place of another architecture."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from credit_like.errors import UserError
from credit_like.migrate.document import Document
from credit_like.models.wxformer import Config as WXFormer
from credit_like.variables import Variables

if TYPE_CHECKING:
    from credit_like.checkpoint.credit import ModelArguments

_WITH_NOISE = ("crossformer-ensemble", "crossformer-style")
_NOISE = {
    "noise_latent_dim": "not translated: see `channels` of `model.noise`",
    "encoder_noise_factor": "not translated: noise enters in the decoder",
    "decoder_noise_factor": "not translated: see `scales` of `model.noise`, whose effect is zero at first",
    "encoder_noise": "noise enters in the decoder",
    "freeze": "not translated: see `freeze` of `start_from`",
    "correlated": "not translated: noise is independent at each point; see `correlation` of `model.noise`, in time",
    "pretrained_weights": "give the weights as `import-credit CONFIG --weights FILE`, and name the result in `start_from`",
}
"""Keys of these models → their counterparts here."""


def model_section(
    source: Document, upsample: str | None, variables: Variables, of_weights: bool
) -> tuple[dict[str, Any], ModelArguments | None]:
    """Return the `model` section and, of a model of CREDIT's that is here, its arguments.

    Raises UserError for another architecture with weights, or arguments that do not convert.
    """
    from credit_like.checkpoint.credit import ARGUMENTS, NO_EFFECT, TYPES, convert_model_args, model_block

    if not isinstance(source.values.get("model"), dict):
        height, width = _grid(source)
        source.absent("model", "there is no model section: the default WXFormer, padded to fit the grid, is taken")
        return _fitting(height, width), None
    kind = source.get("model", "type", default="wxformer")
    if kind in _WITH_NOISE and not of_weights:
        noise = _noise(source)
        block = model_block({**source.values, "model": {**source.values["model"], "type": "wxformer"}})
        block = {key: value for key, value in block.items() if key not in _NOISE}
    elif kind not in TYPES and not of_weights:
        return _another(source), None
    else:
        noise, block = {}, model_block(dict(source.values))
    if upsample is None:
        upsample = "pixel_shuffle" if block.get("upsample_with_ps") else "transpose"
        if "upsample_with_ps" not in block:
            source.absent(
                "model.upsample_with_ps", "the decoder of the published weights, `upsample: transpose`, is taken",
                source.lines.get(("model",), 1),
            )  # fmt: skip
    if block.get("frame_patch_size", 1) != 1:
        source.remark(("model", "frame_patch_size"), "not translated: every frame is embedded with all others")
    for key in set(block) & NO_EFFECT - {"upsample_with_ps", "pretrained_weights", "frame_patch_size"}:
        if block[key]:
            source.remark(("model", key), "not part of this architecture")
    if block.get("pretrained_weights") and not noise:
        source.remark(("model", "pretrained_weights"), _NOISE["pretrained_weights"])
    for key in set(block) - ARGUMENTS:
        source.remark(("model", key), "CREDIT's model has no argument of this name, and ignores it")
        del block[key]
    block.pop("post_conf", None)
    arguments = convert_model_args(block, upsample=upsample)
    config = arguments.config
    padding = next((key for key in ("padding_conf", "pad_lat") if key in source.section("model")), None)
    for problem in config.check(arguments.height, arguments.width):
        source.remark(("model", padding) if padding else ("model",), f"the sizes do not fit here: {problem}")
    for key in source.values["model"]:
        if key != "post_conf":
            source.get("model", key)
    for ours, theirs, what in (
        (variables.in_channels, arguments.in_channels, "input"), (variables.out_channels, arguments.out_channels, "output"),
    ):  # fmt: skip
        if ours == theirs or "channels" not in source.section("model"):
            continue
        if of_weights:
            raise UserError(
                f"expected data with the {theirs} channels of {what} of the weights, got {ours}; "
                "give their own experiment"
            )
        source.remark(("model", "channels"), f"the data have {ours} channels of {what}, the model's keys say {theirs}")
    if "frames" in source.section("model") and arguments.frames != (
        history := int(source.get("data", "history_len", default=1))
    ):
        source.remark(("model", "frames"), f"the data have {history} input states, as `data.history_len`")
    standard = WXFormer().model_dump(mode="json")
    made = {key: value for key, value in config.model_dump(mode="json").items() if value != standard[key]}
    return {"type": "wxformer", **made, "predict": "state", **noise}, arguments


def _noise(source: Document) -> dict[str, Any]:
    """Return the noise in place of CREDIT's, whose layers are others and are in the encoder too."""
    source.remark(
        ("model", "type"),
        "the noise is `model.noise`, in the decoder; compare its `channels` and `scales` with the keys below",
    )
    for key in _NOISE:
        if key in source.section("model"):
            source.remark(("model", key), _NOISE[key])
    return {"noise": {"type": "decoder"}}


def _another(source: Document) -> dict[str, Any]:
    """Return the default WXFormer in place of an architecture that is not here. Raises UserError if it does not fit the grid."""
    section = source.section("model")
    sizes = [source.get("model", key) for key in ("image_height", "image_width")]
    height, width = (int(size) for size in sizes) if all(sizes) else _grid(source)
    source.remark(
        ("model", "type"),
        "there is no such architecture: the default WXFormer, padded to fit the grid, is taken in its place",
    )
    for key in section:
        if key not in ("type", "post_conf", "image_height", "image_width"):
            source.remark(("model", key), "of the other architecture, or follows from the data", covered=True)
    return _fitting(height, width)


def _grid(source: Document) -> tuple[int, int]:
    """Return (rows, columns) according to the sources. Raises UserError if none has them."""
    for name, section in source.values["data"].get("source", {}).items():
        match = re.fullmatch(r"(\d+)x(\d+)", str(section.get("resolution", "")))
        if match:
            source.get("data", "source", name, "resolution")
            return int(match[2]), int(match[1])
    raise UserError(
        "expected a `model` section with image_height and image_width, or the resolution of a source, got neither; add one"
    )


def _fitting(height: int, width: int) -> dict[str, Any]:
    """Return the smallest padding with which the default architecture fits a grid, as a model section."""

    def padded(rows: int, columns: int) -> WXFormer:
        pads = {"pad_lat": (rows // 2, rows - rows // 2), "pad_lon": (columns // 2, columns - columns // 2)}
        return WXFormer.model_validate({"padding_conf": {"activate": True, "mode": "earth", **pads}})

    def problems(rows: int, columns: int) -> int:
        return len(padded(rows, columns).check(height, width))

    # Every stage halves the grid. What the windows require of latitude and of longitude does not depend on the other.
    factor = math.prod(WXFormer().cross_embed_strides)
    rows = min(range(-height % factor, 65, factor), key=lambda rows: (problems(rows, 0), rows))
    columns = min(range(-width % factor, 65, factor), key=lambda columns: (problems(rows, columns), columns))
    if problems(rows, columns):
        raise UserError(
            f"expected a grid that the default WXFormer fits with at most 64 rows and columns of padding, got {height} x {width}"
        )
    return {
        "type": "wxformer",
        "padding_conf": padded(rows, columns).padding_conf.model_dump(mode="json"),
        "predict": "state",
    }
