"""How many processes share a training, and how: parsed, checked and divided in one place. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from credit_like.errors import UserError

Finding = tuple[tuple[str | int, ...], str]
"""A location inside an experiment, and `expected …, got …, change …`."""

_MODES = ("fsdp2", "ddp", "none")
_DEGREES = ("tensor", "domain", "replicate", "ensemble")
KEYS = ("data", *_DEGREES)
"""The keys of the block `trainer.parallelism`."""
_WHERE = ("trainer", "parallelism")


@dataclass(frozen=True)
class Degrees:
    """The block `trainer.parallelism`: how samples, members and gradients are shared, and over how many ranks a model is."""

    data: str = "none"
    tensor: int = 1
    domain: int = 1
    """Ranks that share the grid of a sample, rows × columns."""
    replicate: int = 1
    ensemble: int = 1
    columns: int = 1
    """Ranks among which each band of rows is divided into bands of columns: a divisor of `domain`."""

    @classmethod
    def parse(cls, block: Mapping[str, Any]) -> Degrees:
        """Return the degrees of a block as written in a file; a key that is absent has its default.

        Raises UserError for unknown keys, a mode that does not exist and degrees that are no positive integers.
        """
        if unknown := set(block) - set(KEYS):
            raise UserError(f"trainer.parallelism: expected the keys {sorted(KEYS)}, got {sorted(unknown)} as well")
        if (mode := block.get("data", "none")) not in _MODES:
            raise UserError(f"trainer.parallelism.data: expected fsdp2, ddp or none, got {mode!r}")
        for key in _DEGREES:
            degree = block.get(key, 1)
            if key != "domain" and not _is_degree(degree):
                raise UserError(f"trainer.parallelism.{key}: expected an integer of at least 1, got {degree!r}")
        try:
            rows, columns = domain_shape(block.get("domain", 1))
        except UserError as error:
            raise UserError(f"trainer.parallelism.domain: {error}") from error
        return cls(**{**block, "domain": rows * columns, "columns": columns})

    @property
    def shape(self) -> tuple[int, int]:
        """Return the ranks along the rows and along the columns of the grid."""
        return self.domain // self.columns, self.columns

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks that share one copy of the model."""
        return self.tensor * self.domain

    @property
    def sample_ranks(self) -> int:
        """Return the number of ranks that share one sample of a training: its members, and the model of each."""
        return self.ensemble * self.model_ranks


def _is_degree(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def domain_shape(domain: Any) -> tuple[int, int]:
    """Return (rows, columns): the ranks along each axis of the grid, from `domain: 4` or `domain: [2, 2]` as written in a file.

    A number alone shares rows. Raises UserError for anything else.
    """
    pair = domain if isinstance(domain, list | tuple) else (domain, 1)
    if len(pair) != 2 or not all(map(_is_degree, pair)):
        raise UserError(f"expected an integer of at least 1, or [rows, columns] of such, got {domain!r}")
    rows, columns = pair
    return rows, columns


def domain_text(shape: tuple[int, int]) -> str:
    """Return a shape of the domain ranks for people: `4` for bands of rows, `2 × 2` for rows and columns."""
    rows, columns = shape
    return f"{rows} × {columns}" if columns > 1 else str(rows)


@dataclass(frozen=True)
class Layout:
    """How `world` = data × ensemble × tensor × domain processes share the work: derived from a world size, never in a file."""

    world: int
    tensor: int
    domain: int
    """Ranks that share the grid of a sample, rows × columns."""
    data: int
    """Data-parallel replicas: world // (ensemble × tensor × domain)."""
    replicate: int = 1
    """Copies of the sharded model: a divisor of `data`."""
    accumulation: int = 1
    """Micro-batches that one replica adds up before an optimiser step."""
    ensemble: int = 1
    """Ranks, or groups of tensor × domain ranks, that share the members of a sample."""
    columns: int = 1
    """Ranks along the columns of the grid, a divisor of `domain`; they are next to each other."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the ranks along the rows and along the columns of the grid."""
        return self.domain // self.columns, self.columns

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Return the (data, ensemble, tensor, domain) coordinates of a rank: data is outermost, domain innermost."""
        of_model, domain = divmod(rank, self.domain)
        of_members, tensor = divmod(of_model, self.tensor)
        data, ensemble = divmod(of_members, self.ensemble)
        return data, ensemble, tensor, domain

    def __str__(self) -> str:
        members = f" × ensemble {self.ensemble}" if self.ensemble > 1 else ""
        domain = f"({domain_text(self.shape)})" if self.columns > 1 else self.domain
        return f"data {self.data}{members} × tensor {self.tensor} × domain {domain}"


def divide(degrees: Degrees, world: int) -> Layout:
    """Return the layout of `world` processes, without batch sizes.

    Raises UserError with the arithmetic where the degrees do not divide the world size.
    """
    refuse(degree_findings(degrees, world))
    data = world // degrees.sample_ranks
    return Layout(
        world,
        degrees.tensor,
        degrees.domain,
        data,
        degrees.replicate,
        ensemble=degrees.ensemble,
        columns=degrees.columns,
    )


def accumulation(global_batch_size: int, micro_batch_size: int, replicas: int) -> int:
    """Return the micro-batches of one replica in an optimiser step.

    Raises UserError with the arithmetic where the batch sizes do not divide.
    """
    refuse(batch_findings(global_batch_size, micro_batch_size, replicas))
    return global_batch_size // (micro_batch_size * replicas)


def degree_findings(degrees: Degrees, world: int) -> Iterator[Finding]:
    """Yield where a world size does not fit the degrees."""
    inner, names, sizes = degrees.sample_ranks, "tensor × domain", f"{degrees.tensor} × {degrees.domain}"
    if degrees.ensemble > 1:
        names, sizes = f"ensemble × {names}", f"{degrees.ensemble} × {sizes}"
    if world % inner:
        yield (
            _WHERE,
            f"expected a world size that {names} = {sizes} = {inner} divides, "
            f"got {world}, change it to {_multiples(world, inner)} processes, or the degrees",
        )
        return
    data = world // inner
    if degrees.data == "none" and data > 1:
        yield (
            (*_WHERE, "data"),
            f"expected fsdp2 or ddp for {world} // ({sizes}) = {data} data-parallel replicas, "
            f"got none, change it, or run {inner} process{'es' * (inner > 1)}",
        )
    if data % degrees.replicate:
        yield (
            (*_WHERE, "replicate"),
            f"expected a divisor of the {data} data-parallel replicas, got {degrees.replicate}, "
            f"change it to one of {_divisors(data)}",
        )


def member_findings(degrees: Degrees, members: int) -> Iterator[Finding]:
    """Yield where the members of a sample cannot be shared equally among the ranks of the ensemble."""
    if members % degrees.ensemble:
        change = f"change it to one of {_divisors(members)}" if members > 1 else "set trainer.members or remove it"
        yield (
            (*_WHERE, "ensemble"),
            f"expected a divisor of trainer.members = {members}, got {degrees.ensemble}, {change}",
        )


def batch_findings(global_batch_size: int, micro_batch_size: int, replicas: int) -> Iterator[Finding]:
    """Yield where a global batch is not a whole number of micro-batches for each replica."""
    at_once = micro_batch_size * replicas
    if global_batch_size % at_once:
        yield (
            ("trainer", "global_batch_size"),
            f"expected a multiple of micro_batch_size × data-parallel replicas = {micro_batch_size} × {replicas} "
            f"= {at_once}, got {global_batch_size}, change it to {_multiples(global_batch_size, at_once)}",
        )


def refuse(findings: Iterable[Finding]) -> None:
    """Raise UserError with the first finding, if there is one."""
    for path, message in findings:
        raise UserError(f"{'.'.join(map(str, path))}: {message}")


def _multiples(value: int, of: int) -> str:
    """Return the multiples next to a value, as `8 or 12`."""
    below, above = value // of * of, (value // of + 1) * of
    return f"{below} or {above}" if below else str(above)


def _divisors(value: int) -> str:
    return ", ".join(str(d) for d in range(1, value + 1) if value % d == 0)
