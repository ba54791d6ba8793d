"""The `trainer` section: layout, batch, optimiser, checkpoints and stopping."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from credit_like.errors import UserError
from credit_like.layout import Degrees, domain_shape
from credit_like.schema.base import Duration, DurationText, Section, format_duration, parse_duration
from credit_like.schema.inference import Lead
from credit_like.schema.plugin import plugin

_MOST = 1024
"""Largest number of processes, threads or samples read ahead; a larger one is a mistake that would exhaust any machine."""
_LONGEST_WAIT = dt.timedelta(days=365)
_Degree = Annotated[int, Field(ge=1)]


def _patience(timeout: dt.timedelta) -> dt.timedelta:
    """Return a timeout. Raises UserError for a very long one, which overflows torch's count of nanoseconds and ends at once."""
    if timeout > _LONGEST_WAIT:
        raise UserError(f"expected at most {format_duration(_LONGEST_WAIT)}, got {format_duration(timeout)}")
    return timeout


def _domain(value: Any) -> int | tuple[int, int]:
    """Return a number where rows alone are shared, so that the same layout is written in one way."""
    rows, columns = domain_shape(value)
    return (rows, columns) if columns > 1 else rows


class Parallelism(Section):
    """Degrees of the device mesh; the data-parallel degree is world // (ensemble × tensor × domain)."""

    data: Literal["fsdp2", "ddp", "none"] = "none"
    """Data parallelism: sharded (`fsdp2`), replicated (`ddp`), or `none` for a single replica."""
    tensor: int = Field(default=1, ge=1)
    """Number of ranks that split the attention heads and channels of the model; divides the heads of every stage."""
    domain: Annotated[_Degree | tuple[_Degree, _Degree], BeforeValidator(_domain)] = 1
    """Number of ranks that split the grid of a sample into bands of latitude. [rows, columns]: the ranks along either axis of the
    grid, each with a band of latitude and, of this, a band of longitude."""
    replicate: int = Field(default=1, ge=1)
    """Number of copies of the sharded model under fsdp2 (hybrid sharding); must divide the data-parallel degree."""
    ensemble: int = Field(default=1, ge=1)
    """Number of ranks that share the members of a sample; divides `trainer.members`. Forecasts do not use it."""

    @property
    def degrees(self) -> Degrees:
        """Return this block as the arithmetic of layouts takes it."""
        rows, columns = domain_shape(self.domain)
        return Degrees(self.data, self.tensor, rows * columns, self.replicate, self.ensemble, columns)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.degrees.model_ranks

    @model_validator(mode="after")
    def _replicate_needs_fsdp2(self) -> Parallelism:
        if self.replicate > 1 and self.data != "fsdp2":
            raise UserError(f"expected data: fsdp2 with replicate: {self.replicate}, got data: {self.data}")
        return self


DType = Literal["float32", "bfloat16"]  # float16 would need its loss scaled, or small gradients vanish


class MixedPrecision(Section):
    """Data types in which FSDP2 computes, reduces gradients and returns outputs."""

    param_dtype: DType = "bfloat16"
    """Data type of the gathered parameters and of computation."""
    reduce_dtype: DType = "float32"
    """Data type of the gradient reduction."""
    output_dtype: DType = "float32"
    """Data type of the model's output."""


def _every(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return parse_duration(value)
    except UserError as error:
        raise UserError(str(error).replace("a duration such as", "a number of steps, or a duration such as")) from None


Every = Annotated[
    Any,
    BeforeValidator(_every, json_schema_input_type=Annotated[int, Field(ge=1)] | DurationText),
    PlainSerializer(lambda v: v if isinstance(v, int) else format_duration(v)),
]


class CheckpointSection(Section):
    """When to save a checkpoint and how many to keep."""

    every: Every = Field(default="30min")
    """Interval between checkpoints: optimiser steps (500) or wall-clock time (30min)."""
    keep: int = Field(default=3, ge=1)
    """Number of newest checkpoints to keep, besides the one with the best validation loss."""
    async_: bool = Field(default=True, alias="async")
    """Write checkpoints in the background while training continues."""

    @model_validator(mode="after")
    def _positive(self) -> CheckpointSection:
        if isinstance(self.every, int) and self.every < 1:
            raise UserError(f"expected `every` of at least 1 step, got {self.every}")
        return self


class MonitorSection(Section):
    """Short forecasts from validation times during training, scored like those of `credit-like evaluate`."""

    every: int = Field(default=0, ge=0)
    """Interval in epochs; the forecasts follow the validation. 0 = never."""
    init: int = Field(default=4, ge=1)
    """Number of initial times, spread evenly over `data.valid`."""
    lead: Lead = Field(default=8)
    """Length of a forecast: a duration (2d) or a number of steps (8)."""
    share: float = Field(default=0.02, gt=0, le=1)
    """Largest fraction of the training time that the forecasts may take; they are skipped if they would exceed it."""


class LoaderSection(Section):
    """How samples are read ahead."""

    num_workers: int = Field(default=0, ge=0, le=_MOST)
    """Number of processes that read samples; 0 = a thread of the training process."""
    prefetch_factor: int = Field(default=2, ge=1, le=_MOST)
    """Number of micro-batches that each worker reads ahead."""


class EarlyStopping(Section):
    """When to end a training, or one of its phases, before its last epoch."""

    patience: int = Field(ge=1)
    """Number of validations in a row without a better loss after which the phase ends."""
    min_change: float = Field(default=0.0, ge=0, lt=1)
    """Smallest relative decrease below the best loss so far that counts as an improvement."""


def _absent_if_empty(value: Any) -> Any:
    return None if isinstance(value, list | tuple) and not value else value


class PhaseKeys(Section):
    """The keys that may change between the phases of a training: none of them concerns the model or the layout."""

    global_batch_size: int = Field(default=1, ge=1)
    """Samples per optimiser step, over all ranks."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Samples per forward pass of a data-parallel replica; gradients are accumulated over the rest of the global
    batch."""
    members: int = Field(default=1, ge=1)
    """Members of the ensemble that a model with noise makes of each sample, for a loss of ensembles such as `crps`. They are
    processed as additional samples, so memory and time grow in proportion to their number."""
    epochs: int = Field(default=1, ge=1)
    """Number of epochs."""
    batches_per_epoch: int = Field(default=0, ge=0)
    """Optimiser steps per epoch; 0 = all samples."""
    valid_every: int = Field(default=0, ge=0)
    """Interval in optimiser steps of validations in addition to the one after each epoch; 0 = none."""
    early_stopping: EarlyStopping | None = None
    """End the training when the validation loss no longer falls. Default: after the last epoch."""
    valid_batches: int = Field(default=0, ge=0)
    """Number of global batches per validation, from the beginning of `data.valid`; 0 = all."""
    optimizer: plugin("optimizer", default="adamw") = Field(default={"type": "adamw"})  # type: ignore[valid-type]
    """Optimiser, by its `type`, and its keys."""
    scheduler: plugin("scheduler", default="linear-warmup-cosine") = Field(default={"type": "linear-warmup-cosine"})  # type: ignore[valid-type]
    """Schedule of the learning rate, by its `type`, and its keys."""
    backprop_steps: int | None = Field(default=None, ge=1)
    """Largest number of autoregressive steps through which gradients flow. Each such part of a forecast has its own backward
    pass, and the next one begins at its end state without a gradient. Memory then grows with this number instead of
    `forecast_len`. Default: all steps."""
    random_forecast_len: bool = False
    """Take a random number of autoregressive steps, from 1 to `forecast_len`, at every optimiser step."""
    shift_longitude: bool = False
    """Shift the fields by a random number of columns in longitude at every optimiser step. This augmentation varies the
    alignment of the data with the model's windows and reduces overfitting of small data sets. Only for grids that cover
    the full circle of longitude."""
    input_noise: float = Field(default=0.0, ge=0)
    """Standard deviation of noise on the prognostic input of every training sample, as a fraction of the standard deviation of
    the change over one step. The target has no noise, so that the model learns to remove deviations from the data, which
    keeps long forecasts stable. 0 = none."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained, such as `stages.0.*`, in addition to those of `start_from.freeze`. They have
    no gradient and no optimiser state. The moving average of one that is trained in another phase is still updated."""
    grad_max_norm: float | None = Field(default=1.0, gt=0)
    """Norm to which larger gradients are clipped; null = no clipping."""
    use_ema: bool = False
    """Keep an exponential moving average of the weights, for validation and forecasts."""
    ema_decay: float = Field(default=0.9999, gt=0, lt=1)
    """Decay of the moving average per optimiser step; the first steps use a smaller one."""


class PhaseSection(PhaseKeys):
    """A phase of the training. A key that is not given has the value of the experiment outside `phases`.

    This also applies to each key of `optimizer`, `scheduler` and `loss`, unless the phase sets another `type`.
    """

    forecast_len: int = Field(default=1, ge=1)
    """Autoregressive steps per training sample, instead of `data.forecast_len`."""
    loss: plugin("loss", default="mse") = Field(default={"type": "mse"})  # type: ignore[valid-type]
    """Training loss, instead of the section `loss`."""

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys that the phase does not set."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if key in self.model_fields_set}


class TrainerSection(PhaseKeys):
    """How to train: layout, batch, optimiser, checkpoints and when to stop."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of training and forecasts; `auto` = the GPU if there is one, else the CPU."""
    threads: int | None = Field(default=None, ge=1, le=_MOST)
    """Number of threads in which each process computes on the CPU. Default: that of PyTorch, OMP_NUM_THREADS or all cores."""
    parallelism: Parallelism = Parallelism()
    """Degrees of data, ensemble, tensor and domain parallelism."""
    amp: bool = False
    """Compute in bfloat16: by FSDP2's policy where the model is sharded, by autocast elsewhere. Weights, their updates, the
    input's embedding, the head and, by default, sums of gradients over ranks stay in float32. Sums of activations over
    tensor ranks are in bfloat16."""
    fsdp2_mp_policy: MixedPrecision | None = None
    """Data types under fsdp2 with `amp: true`. Default: the defaults of its keys."""
    fsdp2_reshard_after_forward: bool = True
    """Free gathered parameters after forward; false keeps them until backward, which costs memory and saves
    messages."""
    fsdp2_cpu_offload: bool = False
    """Keep parameters, gradients and optimiser state of fsdp2 in CPU memory. It is refused on CUDA, where it has not been
    tested."""
    activation_checkpoint: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory for a third more arithmetic."""
    compile: bool | None = None
    """Compile the model's blocks; by default on CUDA."""
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    """How CUDA multiplies matrices and convolves in float32: `highest` is float32, `high` is TensorFloat-32, which rounds
    the factors of products to 10 bits of mantissa. No effect on a CPU."""
    deterministic: bool = True
    """Use deterministic algorithms on CUDA, so that a run that is repeated or continued in the same layout is bitwise
    identical; false allows others, which may be faster. On a CPU, all algorithms are deterministic."""
    phases: Annotated[tuple[PhaseSection, ...] | None, BeforeValidator(_absent_if_empty)] = None
    """Phases of the training, one after the other. Each begins at the end of an epoch with a new optimiser state and the
    start of its learning rate schedule. Default: one phase."""
    max_skipped: int = Field(default=10, ge=1)
    """Number of consecutive optimiser steps with a non-finite loss or gradient, which are skipped, before the run
    stops."""
    stop_after: Duration | None = None
    """Wall-clock time after which the run saves and stops after the current step; it can be continued."""
    timeout: Annotated[Duration, AfterValidator(_patience)] = Field(default="10min")  # type: ignore[assignment]
    """Longest wait in a collective before the run is aborted."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When to save checkpoints."""
    monitor: MonitorSection = MonitorSection()
    """Short forecasts during training."""
    loader: LoaderSection = LoaderSection()
    """Reading of samples."""
