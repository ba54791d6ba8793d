"""The `start_from` section: the weights with which a run starts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from credit_like.schema.base import Section, UserPath


class LoraConf(Section):
    """Low-rank changes of the weights of linear layers; nothing else is trained."""

    rank: int = Field(8, ge=1)
    """Rank of the change of each weight."""
    match: tuple[str, ...] = Field(("*.qkv", "*.out", "*.expand", "*.contract"), min_length=1)
    """Patterns of names of linear layers, such as `stages.3.*.qkv`; by default those of attention and feed-forward. Linear
    layers are those of `credit_like.nn.linear`, also in a model of your own."""
    alpha: float | None = Field(None, gt=0)
    """The change is multiplied by alpha / rank; by default by 1."""

    @property
    def scale(self) -> float:
        """Return the factor of the change."""
        return (self.alpha or self.rank) / self.rank


class StartFrom(Section):
    """The weights with which a new run starts; in a file also just the path."""

    shorthands = ({"type": "string"},)

    path: UserPath = Field(min_length=1)
    """A run, one of its checkpoints, an export (.safetensors) or a file that `import-credit` wrote."""
    weights: Literal["ema", "raw"] = "ema"
    """Take the moving average of the weights where the source has one (`ema`), or the trained weights (`raw`)."""
    optimizer: bool = False
    """Take over the state of the optimiser as well; only from a checkpoint of the same model and variables."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as `stages.0.*`."""
    lora: LoraConf | None = None
    """Train low-rank changes of weights (LoRA) instead of the weights."""
    missing: Literal["error", "initial"] = "error"
    """What happens to parameters that cannot be taken over: an error, or they keep their initial values."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value
