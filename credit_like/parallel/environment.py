"""Rank and world size of this process as set by launchers: torchrun, Cray PALS (PMI), Open MPI, Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from credit_like.errors import UserError, cut

# (rank, world, rank on the node, ranks on the node); torchrun's own names come first
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "PALS": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
_PORT = 29500
_MOST_RANKS = 10**9


@dataclass(frozen=True)
class Environment:
    """The position of this process: `rank` of `world`, `local_rank` on its node, and the address of rank 0."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = _PORT


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of the first launcher whose rank and size are both set; one process if there is none.

    Raises UserError for a variable that is no number in its range, for a rank outside its world, and for several nodes without
    an address of rank 0.
    """
    environ = os.environ if environ is None else environ
    for launcher, (rank_key, world_key, local_key, _) in _LAUNCHERS.items():
        if rank_key in environ and world_key in environ:
            world = _number(environ, world_key, range(1, _MOST_RANKS), launcher)
            rank = _number(environ, rank_key, range(_MOST_RANKS), launcher)
            if rank >= world:
                raise UserError(
                    f"expected {rank_key} below {world_key} = {world}, got {rank}; check the {launcher} launch, or unset both"
                )
            local = _number(environ, local_key, range(_MOST_RANKS), launcher) if environ.get(local_key) else 0
            return Environment(rank, world, local, _address(environ, world), _port(environ, world))
    return Environment()


def forget_launcher() -> None:
    """Remove the variables of launchers, for a command that a process performs alone."""
    for keys in _LAUNCHERS.values():
        for key in keys:
            os.environ.pop(key, None)


def _number(environ: Mapping[str, str], key: str, allowed: range, launcher: str) -> int:
    """Return a variable as a number; raise UserError for one that is not allowed."""
    text = environ[key]
    if not (re.fullmatch("[0-9]{1,9}", text.strip()) and int(text) in allowed):
        raise UserError(
            f"expected the environment variable {key} to be an integer from {allowed[0]} to {allowed[-1]}, got "
            f"{cut(repr(text), 60)}; unset it, or start the ranks with {launcher}"
        )
    return int(text)


def restarts() -> int:
    """Return how often torchrun has restarted this process by itself, or Slurm its job."""
    counts = (os.environ.get(key, "0") for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return sum(int(count) for count in counts if count.isdecimal())


def _address(environ: Mapping[str, str], world: int) -> str:
    """Return the host of rank 0: MASTER_ADDR, the first host of a Slurm step, or this node if it is the only one."""
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if "SLURM_STEP_NODELIST" in environ:
        return first_host(environ["SLURM_STEP_NODELIST"])
    nodefile = environ.get("PBS_NODEFILE")
    if nodefile and Path(nodefile).exists():
        # It is set on the job's first node only, so ranks on other nodes could not derive the same address from it.
        hosts = set(Path(nodefile).read_text().split())
        if len(hosts) == 1:
            return hosts.pop()
    one_node = any(
        environ.get(keys[3], "").isdigit() and int(environ[keys[3]]) == world for keys in _LAUNCHERS.values()
    )
    if world > 1 and not one_node:
        raise UserError(f"expected MASTER_ADDR for {world} ranks, got none; export the host name of rank 0")
    return "127.0.0.1"


def device_index(local_rank: int, devices: int) -> int:
    """Return the index of this rank's GPU among the visible ones: 0 if the launcher made only one visible to it.

    Raises UserError for more ranks on the node than there are GPUs.
    """
    if 1 < devices <= local_rank:
        raise UserError(
            f"expected at most {devices} ranks on this node, one for each GPU, got rank {local_rank} of it; start fewer ranks "
            "on a node, or let each see its own GPU alone"
        )
    return local_rank % devices


def _port(environ: Mapping[str, str], world: int) -> int:
    """Return MASTER_PORT, else a port derived from the job id, so that two jobs on a node do not collide."""
    text = environ.get("MASTER_PORT", "")
    if text and (world > 1 or (text.isdecimal() and 0 < int(text) < 65536)):  # a process alone does not need it
        return _number(environ, "MASTER_PORT", range(1, 65536), "torchrun")
    job = re.match(r"\d+", environ.get("PBS_JOBID", environ.get("SLURM_JOB_ID", "")))
    return _PORT + int(job[0]) % 1000 if job else _PORT


def first_host(nodelist: str) -> str:
    """Return the first host in Slurm's notation: `nid[0012-0015,0020],x1` → `nid0012`.

    Raises UserError for any other text.
    """
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    if match is None:
        raise UserError(f"expected a list of hosts, got {nodelist!r}")
    return match[1] + (match[2] or "")


def local_launch(rank: int, world: int, port: int | str) -> dict[str, str]:
    """Return the variables that torchrun sets for `rank` of `world` on one node, with its store at `port`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
