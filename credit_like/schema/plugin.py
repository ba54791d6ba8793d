"""Fields whose shape is a plug-in's own `Config`, chosen by their `type` key."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, PlainSerializer, PlainValidator, WithJsonSchema

from credit_like import registry


def plugin(kind: str) -> Any:
    """The annotation of a field that holds a `Config` of this kind of plug-in.

    A mapping is validated by the plug-in that its `type` names; its errors keep their keys (see `schema.errors`).
    """

    def validate(value: Any) -> BaseModel:
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping with a `type`, got {value!r}")
        if "type" not in value:
            raise ValueError(f"expected a `type`, one of {', '.join(registry.names(kind))}, got none")
        config: type[BaseModel] = registry.module(kind, value["type"]).Config
        return config.model_validate(value)

    def dump(value: BaseModel) -> dict[str, Any]:
        return value.model_dump(mode="json")

    return Annotated[
        Any, PlainValidator(validate), PlainSerializer(dump), WithJsonSchema({"type": "object", "x-plugin": kind})
    ]
