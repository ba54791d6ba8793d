"""The experiment: everything a run depends on, in one frozen object."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from credit_like.schema.base import Section
from credit_like.schema.data import DataSection
from credit_like.schema.inference import EvaluationSection, InferenceSection
from credit_like.schema.launch import PbsSection, SiteSection
from credit_like.schema.plugin import plugin
from credit_like.schema.trainer import TrainerSection


class Experiment(Section):
    """Everything a run depends on."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(default=0, ge=0)
    save_loc: str = Field(min_length=1)
    """The run's folder: checkpoints, logs and forecasts; a run is identified by it."""
    data: DataSection
    model: plugin("model")  # type: ignore[valid-type]
    loss: plugin("loss", default="mse") = Field(default={"type": "mse"})  # type: ignore[valid-type]
    physics: tuple[plugin("physics"), ...] = ()  # type: ignore[valid-type]
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    inference: InferenceSection = Field(default_factory=InferenceSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    site: SiteSection | None = None
    pbs: PbsSection | None = None

    def to_dict(self) -> dict[str, Any]:
        """The resolved experiment as plain data, ready for YAML or JSON; loads back to an equal experiment."""
        return self.model_dump(mode="json", by_alias=True)
