"""Which layouts a number of ranks allows, and why not the others. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from credit_like.schema.checks import layout_findings
from credit_like.schema.experiment import Experiment
from credit_like.schema.trainer import Parallelism


@dataclass(frozen=True)
class Layout:
    """world = dp × tensor × domain ranks; `replicate` copies of the sharded model, a divisor of dp."""

    dp: int
    tensor: int = 1
    domain: int = 1
    replicate: int = 1
    data: str = "fsdp2"

    @property
    def world(self) -> int:
        return self.dp * self.tensor * self.domain

    @property
    def shards(self) -> int:
        """Ranks over which parameters that are not split by tensor ranks are sharded."""
        return self.dp * self.domain // self.replicate if self.data == "fsdp2" else 1

    @property
    def parallelism(self) -> Parallelism:
        """The block `trainer.parallelism`."""
        return Parallelism.model_validate(
            {"data": self.data, "tensor": self.tensor, "domain": self.domain, "replicate": self.replicate}
        )

    def __str__(self) -> str:
        return f"dp {self.dp} × tensor {self.tensor} × domain {self.domain}" + (
            f", {self.replicate} copies" if self.replicate > 1 else ""
        )


@dataclass(frozen=True)
class Illegal:
    """A degree that cannot be, and why: `degree` is tensor, domain, dp, or `layout` for a whole one."""

    degree: str
    value: int | str
    reason: str


def with_layout(experiment: Experiment, layout: Layout) -> Experiment:
    """The experiment in another layout."""
    trainer = experiment.trainer.model_copy(update={"parallelism": layout.parallelism})
    return experiment.model_copy(update={"trainer": trainer})


def layouts(experiment: Experiment, world: int, height: int, width: int) -> tuple[list[Layout], list[Illegal]]:
    """Every layout of `world` ranks that training would accept, and the degrees that it would refuse.

    The reasons are those of the checks before a run; what only the model itself can refuse is found when it is built.
    The data mode is the experiment's; `none`, which has one replica, is planned as fsdp2 where there are more ranks.
    """
    data = experiment.trainer.parallelism.data
    if data == "none" and world > 1:
        data = "fsdp2"
    refused: dict[tuple[str, int], str] = {}
    for degree in divisors(world):
        for name in ("tensor", "domain"):
            if reason := _model_refuses(experiment, height, width, **{name: degree}):
                refused[name, degree] = reason
    legal = []
    for tensor, domain in _pairs(world):
        dp = world // (tensor * domain)
        # ddp and fsdp2 differ only in what they shard; where there is one replica and one band, fsdp2 shards nothing.
        layout = Layout(dp, tensor, domain, data=data)
        if reason := _refuses(with_layout(experiment, layout), world):
            refused.setdefault(("dp", dp), reason)
        elif ("tensor", tensor) in refused or ("domain", domain) in refused:
            continue
        elif reason := _model_refuses(experiment, height, width, tensor=tensor, domain=domain):
            refused["tensor × domain", tensor * domain] = reason
        else:
            copies = divisors(dp) if data == "fsdp2" else [1]
            legal += [Layout(dp, tensor, domain, r, data) for r in copies]
    return legal, [Illegal(*key, reason) for key, reason in refused.items()]


def divisors(number: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _pairs(world: int) -> Iterator[tuple[int, int]]:
    for tensor in divisors(world):
        for domain in divisors(world // tensor):
            yield tensor, domain


def _refuses(experiment: Experiment, world: int) -> str:
    return "; ".join(message for _, message in layout_findings(experiment.trainer, world))


def _model_refuses(experiment: Experiment, height: int, width: int, tensor: int = 1, domain: int = 1) -> str:
    check: Any = getattr(experiment.model, "check_parallel", None)
    if check is None:
        return ""
    return "; ".join(message for _, message in check(height, width, tensor=tensor, domain=domain))
