"""The JSON Schema of experiment files, with the keys of every plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from credit_like import registry
from credit_like.schema.experiment import Experiment


def experiment_schema(plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an experiment file, of which includes may have some keys.

    `plugins` are folders (absolute paths) or packages whose plug-ins are included. Raises UserError as `registry.add`
    does.
    """
    with registry.searching(plugins):
        return _schema()


def _schema() -> dict[str, Any]:
    schema = Experiment.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    for kind in registry.KINDS:
        for name in registry.names(kind):
            config = getattr(registry.module(kind, name), "Config", None)
            if config is not None:
                definitions.update(_plugin(kind, name, config))
    filled: dict[str, Any] = _fill(schema)
    filled["properties"]["include"] = {
        "description": "Files merged in before this one, relative to it.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    metrics = filled["$defs"]["EvaluationSection"]["properties"]["metrics"]
    metrics["items"] = {"enum": registry.names("metric")}
    filled["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return filled


def _plugin(kind: str, name: str, config: Any) -> dict[str, Any]:
    """Return the definitions of one plug-in, with its nested sections under a prefix."""
    prefix = f"{kind}.{name}"
    schema = config.model_json_schema(by_alias=True, ref_template=f"#/$defs/{prefix}.{{model}}")
    nested = {f"{prefix}.{key}": value for key, value in schema.pop("$defs", {}).items()}
    if kind == "writer":
        schema["properties"]["format"] = schema["properties"]["type"]
    return {prefix: schema, **nested}


def _fill(node: Any) -> Any:
    """Replace the placeholders left by `schema.plugin` with the plug-ins of their kinds, and require no key.

    A key that is required, or the `type` by which a plug-in is chosen, may be set in an included file.
    """
    if isinstance(node, list):
        return [_fill(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "x-plugin" in node:
        kind = node["x-plugin"]
        kept = {key: value for key, value in node.items() if key not in ("x-plugin", "x-default", "type")}
        choices: list[Any] = [{"$ref": f"#/$defs/{kind}.{name}"} for name in registry.names(kind)]
        return kept | {"anyOf": choices or [False]}
    # A section may have a property that is named `required`.
    return {key: _fill(value) for key, value in node.items() if not (key == "required" and isinstance(value, list))}
