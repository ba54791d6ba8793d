"""The `trainer` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from credit_like.errors import UserError
from credit_like.layout import Degrees
from credit_like.schema.base import Duration, Section, format_duration, parse_duration
from credit_like.schema.inference import Lead
from credit_like.schema.plugin import plugin


class Parallelism(Section):
    """Degrees of the device mesh; the data-parallel degree is world // (tensor × domain)."""

    data: Literal["fsdp2", "ddp", "none"] = "none"
    tensor: int = Field(default=1, ge=1)
    domain: int = Field(default=1, ge=1)
    replicate: int = Field(default=1, ge=1)
    """Copies of the sharded model under fsdp2 (hybrid sharding); must divide the data-parallel degree."""

    @property
    def degrees(self) -> Degrees:
        """Return this block as the arithmetic of layouts takes it."""
        return Degrees(self.data, self.tensor, self.domain, self.replicate)

    @property
    def model_ranks(self) -> int:
        """Ranks that share one sample."""
        return self.degrees.model_ranks

    @model_validator(mode="after")
    def _replicate_needs_fsdp2(self) -> Parallelism:
        if self.replicate > 1 and self.data != "fsdp2":
            raise UserError(f"expected data: fsdp2 with replicate: {self.replicate}, got data: {self.data}")
        return self


DType = Literal["float32", "bfloat16"]  # float16 would need its loss scaled, or small gradients vanish


class MixedPrecision(Section):
    """What FSDP2 computes, reduces and returns in."""

    param_dtype: DType = "bfloat16"
    reduce_dtype: DType = "float32"
    output_dtype: DType = "float32"


def _every(value: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else parse_duration(value)


Every = Annotated[
    Any,
    BeforeValidator(_every, json_schema_input_type=int | str),
    PlainSerializer(lambda v: v if isinstance(v, int) else format_duration(v)),
]


class CheckpointSection(Section):
    """When to save and how much to keep. `every` is optimiser steps (500) or wall-clock time (30min)."""

    every: Every = Field(default="30min")
    keep: int = Field(default=3, ge=1)
    async_: bool = Field(default=True, alias="async")

    @model_validator(mode="after")
    def _positive(self) -> CheckpointSection:
        if isinstance(self.every, int) and self.every < 1:
            raise UserError(f"expected `every` of at least 1 step, got {self.every}")
        return self


class MonitorSection(Section):
    """Short forecasts from validation times during training, scored like those of `credit-like evaluate`."""

    every: int = Field(default=0, ge=0)
    """After every so many epochs, with the validation; 0 = never."""
    init: int = Field(default=4, ge=1)
    """Initial times, spread evenly over data.valid."""
    lead: Lead = Field(default=8)
    """How far: a duration (2d) or a number of steps (8)."""
    share: float = Field(default=0.02, gt=0, le=1)
    """Most of the run's time that they may take; they are left out where once more would exceed it."""


class LoaderSection(Section):
    """How samples are read ahead."""

    num_workers: int = Field(default=0, ge=0)
    """Processes that read; 0 = a thread of the training process."""
    prefetch_factor: int = Field(default=2, ge=1)


class TrainerSection(Section):
    """How to train: the layout, the batch, the optimiser, when to save and when to stop."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallelism: Parallelism = Parallelism()
    global_batch_size: int = Field(default=1, ge=1)
    """Samples per optimiser step, whatever the layout."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Samples at once on a data-parallel replica; what is left of the global batch is accumulated."""
    epochs: int = Field(default=1, ge=1)
    batches_per_epoch: int = Field(default=0, ge=0)
    """Optimiser steps in an epoch; 0 = as many as the samples give."""
    valid_every: int = Field(default=0, ge=0)
    """Validate after every so many optimiser steps too, not only at the end of each epoch; 0 = only then."""
    valid_batches: int = Field(default=0, ge=0)
    """Validation samples are taken in order; 0 = all, n = the first n global batches."""
    amp: bool = False
    """Compute in bfloat16: by FSDP2's policy where the model is sharded, by autocast elsewhere. Weights, their updates, the
    input's embedding, the head and all sums over ranks stay in float32."""
    fsdp2_mp_policy: MixedPrecision | None = None
    fsdp2_reshard_after_forward: bool = True
    fsdp2_cpu_offload: bool = False
    activation_checkpoint: bool = False
    compile: bool | None = None
    """Compile the model's blocks; by default on CUDA."""
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    """How CUDA multiplies matrices of float32: `high` is TensorFloat-32, whose products have 10 bits of mantissa. No effect on
    a CPU."""
    optimizer: plugin("optimizer", default="adamw") = Field(default={"type": "adamw"})  # type: ignore[valid-type]
    scheduler: plugin("scheduler", default="linear-warmup-cosine") = Field(default={"type": "linear-warmup-cosine"})  # type: ignore[valid-type]
    shift_longitude: bool = False
    """Turn the globe by a random number of columns at every optimiser step, so that a small data set is seen in many
    alignments with the model's windows and not learnt by heart. Grids that go all the way round only."""
    grad_max_norm: float | None = Field(default=1.0, gt=0)
    use_ema: bool = False
    ema_decay: float = Field(default=0.9999, gt=0, lt=1)
    max_skipped: int = Field(default=10, ge=1)
    """Optimiser steps skipped in a row for a loss or gradient that is not finite, before the run stops."""
    stop_after: Duration | None = None
    """Wall-clock time after which the run stops at the next step boundary, to be continued."""
    timeout: Duration = Field(default="10min")  # type: ignore[assignment]
    """Longest wait in any collective before the job is ended."""
    checkpoint: CheckpointSection = CheckpointSection()
    monitor: MonitorSection = MonitorSection()
    loader: LoaderSection = LoaderSection()
