"""The `Experiment`: everything a run depends on, in one frozen object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator

from credit_like import registry
from credit_like.schema.base import Section, UserPath
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
    save_loc: UserPath = Field(min_length=1)
    """Folder of the run, with its checkpoints, logs and forecasts. A run is identified by this folder."""
    data: DataSection
    """Files, variables with their roles, and periods."""
    model: _Model
    """Architecture, by its `type`, and its keys; channels and grid follow from the data."""
    start_from: StartFrom | None = None
    """Weights of another run, with which a run begins that has no checkpoint yet. Default: initial weights of `seed`."""
    loss: plugin("loss", default="mse") = Field(default={"type": "mse"})  # type: ignore[valid-type]
    """Training loss, by its `type`, and its keys."""
    physics: tuple[plugin("physics"), ...] = ()  # type: ignore[valid-type]
    """Corrections applied to the output of every step, in this order."""
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    """Layout, batch, optimiser, checkpoints and stopping."""
    tracking: Literal["mlflow", "wandb"] | None = None
    """Tracker to which a training sends its metrics, beside TensorBoard. Without a server, files in `save_loc`/tracking."""
    inference: InferenceSection = Field(default_factory=InferenceSection)
    """Forecasts: initial times, length and output."""
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    """Scores: metrics, regions and baselines."""
    site: SiteSection | None = None
    """Batch system: the name of a profile, or its keys. Default: this machine."""
    pbs: PbsSection | None = None
    """Resources that jobs request, on any batch system."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_plugins(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate with this experiment's plug-ins only, not those of experiments loaded before."""
        with registry.searching():
            return validate(_with_whole_phases(data))

    @property
    def preprocessed_statistics(self) -> Path:
        """Return the file of statistics that `preprocess` writes; `save_loc` has it, unless `data.statistics` names another."""
        return Path(self.data.statistics or Path(self.save_loc) / "statistics.nc")

    @property
    def statistics_file(self) -> Path:
        """Return the file of statistics that the run reads.

        A run that starts from another one always has its own, since that also holds what the source was normalised by.
        """
        return self.preprocessed_statistics if self.start_from is None else Path(self.save_loc) / "statistics.nc"

    @property
    def forecast_folder(self) -> Path:
        """Return the folder of this experiment's forecasts."""
        return Path(self.inference.output.path or Path(self.save_loc) / "forecasts")

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved experiment as plain data for YAML or JSON; it loads back to an equal experiment."""
        data = self.model_dump(mode="json", by_alias=True)
        for key in ("plugins", "start_from", "tracking"):
            if not data.get(key):
                data.pop(key, None)
        for phase in data["trainer"].get("phases", ()):
            for key, common in _common(data).items():
                if key in phase and phase[key]["type"] == common["type"]:
                    # A key that is absent from the phase alone would be taken from the common section when loaded.
                    phase[key] = dict.fromkeys(common) | phase[key]
        return data


_PARTLY: dict[str, dict[str, Any]] = {
    "optimizer": TrainerSection.model_fields["optimizer"].default,
    "scheduler": TrainerSection.model_fields["scheduler"].default,
    "loss": Experiment.model_fields["loss"].default,
}
"""The plug-ins of which a phase may change some keys, by default as here."""


def _common(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of the keys of `_PARTLY` outside the phases, of an experiment as plain data."""
    trainer = data.get("trainer")
    found = {**(trainer if isinstance(trainer, dict) else {}), "loss": data.get("loss")}
    given = {key: found.get(key) for key in _PARTLY}
    return {key: {**_PARTLY[key], **(value if isinstance(value, dict) else {})} for key, value in given.items()}


def _with_whole_phases(data: Any) -> Any:
    """Return an experiment's plain data with the optimiser, scheduler and loss of each phase completed."""
    trainer = data.get("trainer") if isinstance(data, dict) else None
    if not isinstance(trainer, dict) or not isinstance(trainer.get("phases"), list | tuple):
        return data
    common = _common(data)

    def whole(phase: Any) -> Any:
        if not isinstance(phase, dict):
            return phase
        own = {key: value for key, value in phase.items() if key in common and isinstance(value, dict)}
        return phase | {
            key: common[key] | value if value.get("type", common[key]["type"]) == common[key]["type"] else value
            for key, value in own.items()
        }

    return data | {"trainer": trainer | {"phases": [whole(phase) for phase in trainer["phases"]]}}
