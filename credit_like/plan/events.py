"""Replay a recorded training step on a machine, event by event. Does not import torch.

A `Trace` is the order in which one rank issues its work: operations, collectives, the points where the computation needs
the result of a collective, and those where it needs a sample. `play` follows it with one clock for each thing that works by
itself: the host, which launches; the computation; every group, whose collectives run one after the other; NVLink and the
network, which serve one collective after the other; and the reading of samples. What overlaps with what is not assumed: a
collective begins once the work is done that was issued before it and that it depends on, and the computation stands still
only where it needs a result that is not there.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from credit_like.plan.machine import Arithmetic, Machine, Piece, compute_seconds, launches, packing_seconds, transfer

QUEUE = 1000
"""Number of operations that the host can launch before the device must have completed the first of them."""
LENGTH = 100
"""Number of operations that are recorded as one event at most."""


@dataclass
class Run:
    """Operations one after the other.

    They belong to the computation, or, with `behind`, to the stream of the collective that was the `behind`-th last to start.
    """

    behind: int = 0
    pieces: Counter[Piece] = field(default_factory=Counter)
    """How often each operation occurs."""


class Start(NamedTuple):
    """A collective begins."""

    kind: str
    ranks: Sequence[int]
    """The ranks that take part; a range where they are regular, which is quick to compare and to look into."""
    bytes: int
    waits: bool
    """Whether it is an exchange of domain or tensor ranks, rather than of parameters and gradients."""
    behind: int = 0
    """Begin when the `behind`-th last collective is complete, instead of when the computation has come here."""
    ahead: bool = False
    """Begin as soon as gathered parameters may be overwritten, instead of when the computation has come here."""
    blocks: bool = True
    """Whether a device without streams, such as a CPU, does nothing else during this collective."""
    packed: int = 0
    """Number of parameters or gradients that FSDP2 packs for it; 0 for other collectives."""


class Wait(NamedTuple):
    """The computation needs the result of the `behind`-th last collective; `waits` as in its start."""

    behind: int
    waits: bool


class Free(NamedTuple):
    """Gathered parameters may be overwritten from here on."""


class Sample(NamedTuple):
    """The computation needs the next sample."""


Event = Run | Start | Wait | Free | Sample


class Trace:
    """The events of a step, in the order in which a rank issues them. Long runs of operations are cut at `LENGTH`."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)
        self._room = 0

    def add(self, arithmetic: Arithmetic, flops: int, traffic: int, behind: int = 0) -> None:
        """Append an operation."""
        last = self.events[-1] if self.events else None
        if not (isinstance(last, Run) and last.behind == behind and self._room):
            last = Run(behind)
            self.events.append(last)
            self._room = LENGTH
        self._room -= 1
        last.pieces[arithmetic, flops, traffic] += 1

    def append(self, event: Event) -> None:
        self.events.append(event)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def pieces(self) -> Counter[Piece]:
        """All operations."""
        total: Counter[Piece] = Counter()
        for event in self.events:
            if isinstance(event, Run):
                total.update(event.pieces)
        return total

    @property
    def flops(self) -> int:
        return sum(flops * n for (_, flops, _), n in self.pieces.items())

    @property
    def traffic(self) -> int:
        return sum(traffic * n for (_, _, traffic), n in self.pieces.items())


@dataclass(frozen=True)
class Simulated:
    """What `play` needs of one rank."""

    rank: int
    events: Sequence[Event]
    read: int = 0
    """Bytes that the rank reads for a micro-batch."""
    compiled: bool = False


@dataclass
class Times:
    """What the computation of a rank did in a step, in seconds; the first five add up to the step."""

    compute: float = 0.0
    launched: float = 0.0
    """Waiting for the host to launch."""
    waited: float = 0.0
    """Waiting for exchanges, whose results the next operation needs: those of domain and tensor ranks."""
    exposed: float = 0.0
    """Waiting for parameters and gradients."""
    read: float = 0.0
    """Waiting for samples."""
    sent: float = 0.0
    """Collectives, whether anything waited for them or not."""

    @property
    def total(self) -> float:
        return self.compute + self.launched + self.waited + self.exposed + self.read

    @property
    def hidden(self) -> float:
        """Communication behind which the computation went on."""
        return max(0.0, self.sent - self.waited - self.exposed)


class _Clock:
    """The clocks of one rank: when each thing that works by itself will be free, in seconds."""

    def __init__(self, machine: Machine, rank: Simulated, pace: float) -> None:
        self.machine, self.rank, self.pace = machine, rank, pace
        self.host = self.device = 0.0
        self.free = 0.0
        """When gathered parameters could be overwritten last."""
        self.sample = 0.0
        """When the next sample will have been read."""
        self.groups: dict[Sequence[int], float] = {}
        self.links: dict[str, float] = {}
        self.ends: list[float] = []
        """The end of every collective, in the order in which they started."""
        self.queued: deque[tuple[int, float]] = deque()
        """Launched operations, and when the device will have completed them."""
        self.ahead = 0
        """Number of operations in `queued`."""
        self.times = Times()
        self._known: dict[int, tuple[int, float, float]] = {}

    def step(self) -> Generator[tuple[float, Start], float]:
        """Follow the events; yield when a collective can begin here, and receive when it begins."""
        for event in self.rank.events:
            if isinstance(event, Run):
                self._run(event)
            elif isinstance(event, Start):
                begin = yield self._ready(event), event
                self._start(event, begin)
            elif isinstance(event, Wait):
                self._wait(event.behind, event.waits)
            elif isinstance(event, Free):
                self.free = self.device
            else:
                self._sample()

    def _run(self, run: Run) -> None:
        count, launch, work = self._cost(run)
        self.ahead += count
        while self.queued and self.ahead > QUEUE:
            done, end = self.queued.popleft()
            self.ahead -= done
            self.host = max(self.host, end)
        first, self.host = self.host + launch / max(count, 1), self.host + launch
        if run.behind:
            end = self.ends[-run.behind] = max(self.ends[-run.behind], first) + work
            self.queued.append((count, end))
            return
        late = max(0.0, first - self.device)
        end = max(self.device + late + work, self.host)
        self.times.compute += work
        self.times.launched += end - self.device - work
        self.device = end
        self.queued.append((count, end))

    def _cost(self, run: Run) -> tuple[int, float, float]:
        """Return the launches of a run, and the time of launching and of computing it."""
        if id(run) not in self._known:
            count = sum(run.pieces.values())
            number = launches(self.machine, count, self.rank.compiled)
            work = compute_seconds(self.machine, run.pieces, self.rank.compiled) * self.pace
            self._known[id(run)] = math.ceil(number), number * self.machine.launch * 1e-6, work
        return self._known[id(run)]

    def _ready(self, start: Start) -> float:
        if start.packed:
            self._handle(packing_seconds(self.machine, start.packed, start.bytes))
        if start.behind:
            since = self.ends[-start.behind]
        else:
            since = self.free if start.ahead and self.machine.streams else self.device
        self.host += self.machine.launch * 1e-6
        return max(since, self.host, self.groups.get(start.ranks, 0.0))

    def _handle(self, seconds: float) -> None:
        """Spend time of the host, which is also the device if that has no streams."""
        if self.machine.streams:
            self.host += seconds
        else:
            self.device += seconds
            self.times.compute += seconds

    def _start(self, start: Start, begin: float) -> None:
        latency, links = transfer(self.machine, start.kind, start.ranks, start.bytes)
        end = begin
        for link, seconds in links.items():
            self.links[link] = max(begin, self.links.get(link, 0.0)) + seconds
            end = max(end, self.links[link])
        end += latency
        self.groups[start.ranks] = end
        self.ends.append(end)
        self.times.sent += end - begin
        if start.blocks and not self.machine.streams:
            self._wait(1, start.waits)

    def _wait(self, behind: int, exchange: bool) -> None:
        gap = max(0.0, self.ends[-behind] - self.device)
        self.device += gap
        if exchange:
            self.times.waited += gap
        else:
            self.times.exposed += gap

    def _sample(self) -> None:
        """Take a sample; the next one is read meanwhile."""
        gap = max(0.0, self.sample - self.device)
        self.device += gap
        self.times.read += gap
        self.sample = self.device + self.rank.read / (self.machine.reading * 1e9)


def play(machine: Machine, ranks: Sequence[Simulated], world: int = 1) -> Times:
    """Return the times of a step in the middle of a training, of the rank that takes longest for it.

    `ranks` stand for all others: a collective begins when the last of those among them that take part has come to it, so
    they have to start the same collectives in the same order. Of `world` ranks, the slowest sets the pace.
    """
    clocks = [_Clock(machine, rank, machine.pace(world)) for rank in ranks]
    for _ in range(2):  # the second begins as all further ones do
        for clock in clocks:
            clock.times = Times()
        _together(clocks)
    return max((clock.times for clock in clocks), key=lambda times: times.total)


def _together(clocks: Sequence[_Clock]) -> None:
    """Let the ranks take a step."""
    steps = [clock.step() for clock in clocks]
    asked = [next(step, None) for step in steps]
    while any(asked):
        begins = [
            max(
                (
                    other[0]
                    for clock, other in zip(clocks, asked, strict=True)
                    if other and clock.rank.rank in one[1].ranks
                )
            )
            if one
            else 0.0
            for one in asked
        ]
        for index, one in enumerate(asked):
            if one:
                try:
                    asked[index] = steps[index].send(begins[index])
                except StopIteration:
                    asked[index] = None
