"""Fields that are validated by the `Config` of the plug-in that their `type` names."""

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
    - `trains`: false for a model without weights, which no training can begin with;
    - `keys_without_weights`: names of keys in which two models with the same weights may differ, for `start_from` and in a
      continued run;
    - `check_parallel(height, width, *, tensor, domain, columns) -> list[tuple[str, str]]`: (degree, problem) of sharing
      rows over `domain` ranks and columns over `columns`; the latter is given only where columns are shared.
    """

    model_fields: ClassVar[dict[str, Any]]

    @property
    def type(self) -> str:
        """The plug-in's name."""

    @property
    def predict(self) -> Literal["increment", "state"]:
        """`increment` or `state`: what the prognostic outputs are."""

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]:
        """Return the keys and their values, as pydantic's models do."""


class PluginError(UserError):
    """The validation error of a plug-in's own `Config`, kept whole so that messages can name its keys."""

    def __init__(self, config: type[BaseModel], error: ValidationError) -> None:
        super().__init__(str(error))
        self.config, self.error = config, error


class UnknownPluginError(UserError):
    """A name for which there is no plug-in of the kind."""


def plugin(kind: str, default: str | None = None) -> Any:
    """Return the annotation of a field that holds the `Config` of a plug-in.

    A mapping is validated by the plug-in named by its `type`, or by `default` if it has none. Errors keep their keys
    (see `schema.errors`).
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
