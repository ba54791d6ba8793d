"""Fields whose shape is a plug-in's own `Config`, chosen by their `type` key."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, PlainSerializer, PlainValidator, ValidationError, WithJsonSchema

from credit_like import registry
from credit_like.errors import UserError


class ModelConfig(Protocol):
    """The `Config` of a model: a frozen `Section` whose defaults form a tiny valid instance.

    It may also have

    - `check(height, width, *, in_channels, out_channels) -> list[str]`: what keeps it from working on a grid, each
      `key: expected …, got …; change …`;
    - `check_parallel(height, width, *, tensor, domain) -> list[tuple[str, str]]`: (degree, problem).
    """

    model_fields: ClassVar[dict[str, Any]]

    @property
    def type(self) -> str:
        """The plug-in's name."""

    @property
    def predict(self) -> Literal["increment", "state"]:
        """`increment` or `state`: what the prognostic outputs are."""


class PluginError(UserError):
    """The validation error of a plug-in's own `Config`, kept whole so that its keys can be named."""

    def __init__(self, config: type[BaseModel], error: ValidationError) -> None:
        super().__init__(str(error))
        self.config, self.error = config, error


class UnknownPluginError(UserError):
    """No plug-in of this kind has this name."""


def plugin(kind: str, default: str | None = None) -> Any:
    """The annotation of a field that holds a `Config` of this kind of plug-in.

    A mapping is validated by the plug-in that its `type` names, or `default` where it names none; its errors keep their
    keys (see `schema.errors`).
    """

    def validate(value: Any) -> BaseModel:
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, dict):
            raise UserError(f"expected a mapping with a `type`, got {value!r}")
        if "type" not in value and default is not None:
            value = {"type": default, **value}
        if "type" not in value:
            raise UserError(f"expected a `type`, one of {', '.join(registry.names(kind))}, got none")
        if value["type"] not in registry.names(kind):
            raise UnknownPluginError(registry.unknown(kind, value["type"]))
        config: type[BaseModel] = registry.module(kind, value["type"]).Config
        try:
            return config.model_validate(value)
        except ValidationError as error:
            raise PluginError(config, error) from error

    def dump(value: BaseModel) -> dict[str, Any]:
        return value.model_dump(mode="json", by_alias=True)

    return Annotated[
        Any,
        PlainValidator(validate),
        PlainSerializer(dump),
        WithJsonSchema({"type": "object", "x-plugin": kind, "x-default": default}),
    ]
