"""This process among the others: ranks, device, mesh, and the few collectives that decisions need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Runtime:
    """Ranks and mesh of this process; the defaults are a run of one process."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    submeshes: dict[str, DeviceMesh] = field(default_factory=dict)
    dp_rank: int = 0
    dp_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    domain_rank: int = 0
    domain_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes what is written once."""
        return self.rank == 0

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Sum over domain parts and mean over data-parallel replicas: a partial loss or score → the global one."""
        return x

    def sum_over_domain(self, x: Tensor) -> Tensor:
        """Differentiable sum of this sample's parts over the domain ranks."""
        return x

    def agree(self, value: int) -> int:
        """The largest value of any rank, on all ranks."""
        return value

    def broadcast(self, value: Any) -> Any:
        """The main process's value, on all ranks."""
        return value

    def barrier(self) -> None:
        """Return when all ranks are here."""

    def close(self) -> None:
        """Leave the process group, if there is one."""
