"""Models: one module or folder each, with a `Config` and `build`.

A plug-in is a module with the attributes of `ModelPlugin`; what it builds is a `Model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from credit_like import registry
from credit_like.errors import UserError, own_line, reads_values, reason
from credit_like.schema.plugin import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.schema.experiment import Experiment
    from credit_like.variables import Variables

__all__ = ["ChannelAxis", "Model", "ModelConfig", "ModelPlugin", "build_model"]


@dataclass(frozen=True)
class ChannelAxis:
    """A dimension of a parameter or buffer that has entries for channels, as `Model.channel_axes` lists them.

    A run that starts from the weights of another one takes these entries by the names of the channels.
    """

    dim: int
    side: Literal["inputs", "outputs", "hidden"]
    """Whose channels: those of the input (frames side by side, oldest first), of the output, or channels within the model
    whose number follows that of the output. Hidden channels have no names and go in order."""
    repeat: int = 1
    """Consecutive entries for each channel."""
    added: Literal["zero", "initial"] = "zero"
    """What a new channel's entries start as. An input or output must start at zero somewhere on its way."""
    key: str = ""
    """For hidden channels: the key of the experiment that sets their number."""


class Model(Protocol):
    """A torch module that maps the normalised fields of one time to those of the next.

    Tensor parallelism splits the blocks that declare `_tp_col` and `_tp_row`. Domain parallelism reads the attributes
    below. Every layer that mixes rows must have a domain-parallel version, as those of `credit_like.nn` do. An optional
    method `channel_axes()` returns the tensors with channels, by name (`dict[str, tuple[ChannelAxis, ...]]`): with it
    another run with other variables can start from the weights. Parameters that match a pattern of `identities`, if the
    model has this attribute, belong to layers that change nothing at their initial values: a source need not have them.

    A model whose `Config` has a `noise` other than None is called as `model(x_BCTHW, key_B=...)`, with an int64 key for
    each sample, from which it derives its random numbers alone (`credit_like.nn.noise`). So is a model whose `Config` has a
    true attribute `drops`; it uses the key in training alone (`credit_like.nn.dropout`).
    """

    in_channels: int
    out_channels: int
    frames: int
    height: int
    width: int

    def __call__(self, x_BCTHW: Tensor) -> Tensor:
        """Map (B, in_channels, frames, height, width) to (B, out_channels, 1, height, width)."""


class ModelPlugin(Protocol):
    """The attributes that the module of a model must define."""

    Config: type[ModelConfig]

    def build(
        self, config: ModelConfig, *, in_channels: int, out_channels: int, frames: int, height: int, width: int
    ) -> Model:
        """Return the model for a grid, created on the current default device (on meta it has no values).

        Raises UserError if the model does not fit the grid.
        """


def build_model(experiment: Experiment, variables: Variables, height: int, width: int) -> nn.Module:
    """Return the experiment's model, on the current default device (use `meta` for shapes without values).

    Raises UserError if the model does not fit the grid, or `start_from.lora` the model, and for a model that cannot be built
    without values.
    """
    from credit_like.nn.init import refuse_lost_values
    from credit_like.nn.lora import add_lora

    try:
        model: nn.Module = registry.of("model", experiment.model).build(
            experiment.model,
            in_channels=variables.in_channels,
            out_channels=variables.out_channels,
            frames=experiment.data.history_len,
            height=height,
            width=width,
        )
    except (RuntimeError, NotImplementedError) as error:
        # A model is built on the meta device, where tensors have no values to read.
        if not reads_values(error):
            raise
        raise UserError(
            f"model.type: expected a model {experiment.model.type} that is built without reading values of tensors, got "
            f"{own_line(error)}: {reason(error)}; compute numbers there with Python or numpy"
        ) from error
    if any(parameter.is_meta for parameter in model.parameters()):
        refuse_lost_values(model)
    lora = experiment.start_from.lora if experiment.start_from is not None else None
    if lora is not None:
        add_lora(model, lora.rank, lora.match, lora.scale)
    return model
