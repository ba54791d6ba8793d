"""Ranks, device and mesh of this process, and the few collectives on which control decisions depend."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from credit_like import ops
from credit_like.errors import UserError
from credit_like.layout import divide
from credit_like.parallel import blame, collectives
from credit_like.parallel.environment import Environment, device_index, read_environment
from credit_like.parallel.mesh import build_device_mesh, flat_gradient_mesh, gradient_mesh
from credit_like.parallel.rendezvous import join, leave
from credit_like.schema.trainer import Parallelism

_SHORT = 60
"""The length up to which a fact is shown as it is."""


def _digest(text: str) -> str:
    return f"digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass
class Runtime:
    """Ranks and mesh of this process; the defaults describe a run of one process.

    Samples are split over `dp`; `tensor` ranks have the same loss; `ensemble` ranks hold some of the members and `domain`
    ranks bands of rows or boxes of rows and columns, and both hold parts of the loss.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    submeshes: dict[str, DeviceMesh] = field(default_factory=dict)
    dp_rank: int = 0
    dp_size: int = 1
    ensemble_rank: int = 0
    ensemble_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    domain_rank: int = 0
    domain_size: int = 1
    domain_shape: tuple[int, int] = (1, 1)
    """The domain ranks along the rows and along the columns of the grid."""

    def __post_init__(self) -> None:
        ops.cpu.policy.configure()

    @classmethod
    def start(
        cls,
        parallelism: Parallelism,
        device: torch.device | None = None,
        timeout: dt.timedelta = dt.timedelta(minutes=10),
        environment: Environment | None = None,
    ) -> Runtime:
        """Join the other processes, if any, and create the mesh.

        `device`: a CUDA device without index becomes the `local_rank`-th visible one, or the only one. Every collective
        fails after `timeout`. Raises UserError, on every rank, if the degrees do not fit the number of processes.
        """
        place = environment or read_environment()
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            if device.index is None:
                device = torch.device("cuda", device_index(place.local_rank, torch.cuda.device_count()))
            torch.cuda.set_device(device)
        layout = divide(parallelism.degrees, place.world)
        if place.world == 1:
            return cls(device)
        if not dist.is_initialized():
            join(place, device, timeout)
        mesh, submeshes = build_device_mesh(parallelism.model_dump(), device.type)
        dp_rank, ensemble_rank, tensor_rank, domain_rank = layout.coordinates(place.rank)
        return cls(
            device=device,
            rank=place.rank,
            world=place.world,
            mesh=mesh,
            submeshes=submeshes,
            dp_rank=dp_rank,
            dp_size=layout.data,
            ensemble_rank=ensemble_rank,
            ensemble_size=layout.ensemble,
            tensor_rank=tensor_rank,
            tensor_size=layout.tensor,
            domain_rank=domain_rank,
            domain_size=layout.domain,
            domain_shape=layout.shape,
        )

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the log and the files that are written once."""
        return self.rank == 0

    @cached_property
    def gradient_mesh(self) -> DeviceMesh | None:
        """Return the mesh over which gradients are averaged (see `mesh.gradient_mesh`); first called by all ranks."""
        return gradient_mesh(self.mesh)

    @cached_property
    def flat_gradient_mesh(self) -> DeviceMesh | None:
        """Return `gradient_mesh` in one dimension; first called by all ranks."""
        return flat_gradient_mesh(self.mesh)

    @property
    def gradient_scale(self) -> float:
        """Return the factor by which the local loss is multiplied before backward.

        The wrappers average gradients over data × ensemble × domain ranks, but the gradient is the mean over data and the
        sum over ensemble and domain.
        """
        return float(self.ensemble_size * self.domain_size)

    @property
    def models(self) -> tuple[int, int]:
        """Return the position of this rank's copy of the model, and the number of copies: data × ensemble."""
        return self.dp_rank * self.ensemble_size + self.ensemble_rank, self.dp_size * self.ensemble_size

    def members(self, of: int) -> range:
        """Return which of the `of` members of a sample this rank computes."""
        share = of // self.ensemble_size
        return range(self.ensemble_rank * share, (self.ensemble_rank + 1) * share)

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Return a partial loss or score summed over the parts of a sample and averaged over data-parallel replicas."""
        mesh = self.gradient_mesh
        if mesh is None:
            return x
        total = x.detach().clone()
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
        return total / self.dp_size

    def sum_over_models(self, x: Tensor) -> Tensor:
        """Return the sum, without gradients, over the ranks that have the same part of the grid: data × ensemble."""
        for name in ("dp", "ensemble"):
            if name in self.submeshes:
                x = collectives.sum_over(x, self.submeshes[name].get_group())
        return x

    def sum_over_domain(self, x: Tensor) -> Tensor:
        """Return the differentiable sum of this sample's parts over the domain ranks."""
        domain = self.submeshes.get("domain")
        return x if domain is None else collectives.all_reduce_sum(x, domain.get_group())

    def from_other_members(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what the other ranks of the ensemble hold in place of `x`, for the same samples and rows."""
        ensemble = self.submeshes.get("ensemble")
        return iter(()) if ensemble is None else collectives.from_others(x, ensemble.get_group())

    def mean_over_members(self, x: Tensor) -> Tensor:
        """Return the mean over the ranks of the ensemble, without gradients."""
        ensemble = self.submeshes.get("ensemble")
        return x if ensemble is None else collectives.sum_over(x, ensemble.get_group()) / self.ensemble_size

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agree(self, value: int) -> int:
        """Return the largest value of any rank, on all ranks."""
        if self.world == 1:
            return value
        # The reduction runs on the host over gloo: it happens at every step boundary and must not synchronise the
        # device.
        x = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    def first(self, text: str | None) -> str | None:
        """Return the text of the lowest rank that has one, on all ranks: for errors that all of them raise."""
        if not self.agree(text is not None):
            return None
        return next(text for text in self.gather(text) if text is not None)

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value, on all ranks."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise UserError on all ranks unless every rank has the same facts: what → text. Collective.

        Ranks that were started with other files would otherwise train wrongly without any error. Long texts are
        compared by their digests.
        """
        if self.world == 1:
            return
        mine = {what: text if len(text) <= _SHORT else _digest(text) for what, text in facts.items()}
        held = self.gather(mine)
        for what, first in held[0].items():
            others = [rank for rank, theirs in enumerate(held) if theirs.get(what) != first]
            if others:
                raise UserError(
                    f"{what}: expected the same on all {self.world} ranks, got {first} on rank 0 and "
                    f"{held[others[0]].get(what)} on rank {others[0]} ({len(others)} ranks differ from rank 0); start all "
                    "ranks with the same files and the same installation"
                )

    def barrier(self) -> None:
        """Wait until all ranks arrive here; the host alone, not its device."""
        self.agree(0)

    def close(self) -> None:
        """Leave the process group if there is one."""
        if self.world > 1 and dist.is_initialized():
            leave(self.rank, self.world)
        blame.close()

    def first_cause(self, error: BaseException) -> blame.Cause:
        """Return the first cause of failure of this run: `error`, unless another rank failed before."""
        cause = blame.cause_of(error, self.rank, 2 if isinstance(error, UserError) else 1)
        if self.world == 1:
            return cause
        return blame.claim(cause, read_environment())[0]

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the process group, except after an error: with NCCL, that may block on ranks that do not arrive."""
        if error is None:
            self.close()
