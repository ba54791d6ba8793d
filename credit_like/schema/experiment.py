"""The experiment: everything a run depends on, in one frozen object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator

from credit_like import registry
from credit_like.schema.base import Section
from credit_like.schema.data import DataSection
from credit_like.schema.inference import EvaluationSection, InferenceSection
from credit_like.schema.launch import PbsSection, SiteSection
from credit_like.schema.plugin import ModelConfig, plugin
from credit_like.schema.trainer import TrainerSection

if TYPE_CHECKING:
    _Model = ModelConfig
else:
    _Model = plugin("model")


def _known(plugin: str) -> str:
    """From here on, the plug-ins of this folder or package are known."""
    registry.add(plugin)
    return plugin


class Experiment(Section):
    """Everything a run depends on."""

    plugins: tuple[Annotated[str, AfterValidator(_known)], ...] = ()
    """Where else there are plug-ins: folders, relative to the file that names them, or importable packages."""
    # The first field: fields are validated in order, and those below may name these plug-ins.
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(default=0, ge=0)
    save_loc: str = Field(min_length=1)
    """The run's folder: checkpoints, logs and forecasts; a run is identified by it."""
    data: DataSection
    model: _Model
    loss: plugin("loss", default="mse") = Field(default={"type": "mse"})  # type: ignore[valid-type]
    physics: tuple[plugin("physics"), ...] = ()  # type: ignore[valid-type]
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    inference: InferenceSection = Field(default_factory=InferenceSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    site: SiteSection | None = None
    pbs: PbsSection | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _with_plugins(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """What one experiment makes known is not known to the next."""
        with registry.searching():
            return validate(data)

    def to_dict(self) -> dict[str, Any]:
        """The resolved experiment as plain data, ready for YAML or JSON; loads back to an equal experiment."""
        data = self.model_dump(mode="json", by_alias=True)
        if not self.plugins:
            del data["plugins"]
        return data
