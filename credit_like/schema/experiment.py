"""The `Experiment`: everything a run depends on, in one frozen object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator

from credit_like import registry
from credit_like.schema.base import Section
from credit_like.schema.data import DataSection
from credit_like.schema.inference import EvaluationSection, InferenceSection
from credit_like.schema.launch import PbsSection, SiteSection
from credit_like.schema.origin import StartFrom
from credit_like.schema.plugin import ModelConfig, plugin
from credit_like.schema.trainer import TrainerSection

if TYPE_CHECKING:
    _Model = ModelConfig
else:
    _Model = plugin("model")


def _known(plugin: str) -> str:
    """Make the plug-ins of this folder or package known to the fields validated after it."""
    registry.add(plugin)
    return plugin


class Experiment(Section):
    """Everything a run depends on, in sections."""

    plugins: tuple[Annotated[str, AfterValidator(_known)], ...] = ()
    """Further plug-ins: folders, relative to the file that names them, or importable packages."""
    # This is the first field because fields are validated in order and those below may name these plug-ins.
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the experiment, shown in reports and used in job names."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random numbers: initial weights, order of samples, augmentation."""
    save_loc: str = Field(min_length=1)
    """Folder of the run, with its checkpoints, logs and forecasts. A run is identified by this folder."""
    data: DataSection
    model: _Model
    start_from: StartFrom | None = None
    """Weights of another run, with which a run begins that has no checkpoint yet. Default: initial weights of `seed`."""
    loss: plugin("loss", default="mse") = Field(default={"type": "mse"})  # type: ignore[valid-type]
    """Training loss, by its `type`, and its keys."""
    physics: tuple[plugin("physics"), ...] = ()  # type: ignore[valid-type]
    """Corrections applied to the output of every step, in this order."""
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    """Layout, batch, optimiser, checkpoints and stopping."""
    inference: InferenceSection = Field(default_factory=InferenceSection)
    """Forecasts: initial times, length and output."""
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    """Scores: metrics, regions and baselines."""
    site: SiteSection | None = None
    """Batch system: the name of a profile, or its keys. Default: this machine."""
    pbs: PbsSection | None = None
    """Resources that jobs request, whatever the batch system."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_plugins(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate with this experiment's plug-ins only, not those of experiments loaded before."""
        with registry.searching():
            return validate(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved experiment as plain data for YAML or JSON; it loads back to an equal experiment."""
        data = self.model_dump(mode="json", by_alias=True)
        for key in ("plugins", "start_from"):
            if not data.get(key):
                data.pop(key, None)
        return data
