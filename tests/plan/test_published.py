"""Published speeds and scaling, each with its source, against the simulation of the published model, layout and machine.

Nothing is fitted: every figure of a machine that is not the published one is the default of `Machine`, with its range. The
models are written down as their operations, from their public definitions. What the sources do not say is an assumption with
a range, which the range of the estimate includes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product as every

import pytest

from credit_like.plan.events import Free, Run, Sample, Simulated, Start, Wait, play
from credit_like.plan.machine import Machine

HALF = 2  # bytes of a bfloat16 value


def product(rows, inner, columns, size=HALF):
    """A matrix product: its arithmetic, and its arguments and result once through memory."""
    return (
        "tf32" if size == 4 else "half",
        2 * rows * inner * columns,
        size * (rows * inner + inner * columns + rows * columns),
    )


def passes(values, times, size=HALF):
    """An elementwise operation that reads and writes so many arrays of values."""
    return "wide", 0, size * values * times


def ends(machine, make, world, compiled=False):
    """The seconds of a step at the fast end of the machine's range, as assumed, and at the slow end."""
    return [
        play(m, [Simulated(0, make(world), compiled=compiled)], world).total
        for m in (machine.bound(True), machine, machine.bound(False))
    ]


def sharded(units, world):
    """FSDP2's order of events for units of (parameters, operations of a forward, of a backward), all ranks one group."""
    ranks = range(world)
    events = [Free()]

    def gather(unit):
        events.append(Start("all-gather", ranks, HALF * unit[0], waits=False, ahead=True))

    def computed(order, which):
        gather(order[0])
        for index, unit in enumerate(order):
            events.extend([Wait(1 if which == 1 or index < 2 else 2, False), Free()])
            if index + 1 < len(order):
                gather(order[index + 1])
            events.append(Run(0, Counter(unit[which])))
            if which == 2:
                if index:
                    events.append(Wait(2, False))
                events.append(Start("reduce-scatter", ranks, 4 * unit[0], waits=False))

    computed(units, 1)
    computed(units[::-1], 2)
    parameters = sum(unit[0] for unit in units) // world
    events.extend([Wait(1, False), Run(0, Counter({passes(parameters, 8, 4): 1}))])
    return events


def llama(tokens=16384, length=8192, dim=4096, hidden=14336, layers=32, vocabulary=128256):
    """Llama 3.1 8B: 8 of 32 heads have keys, selective recomputation repeats half of a layer's forward."""
    few = dim // 4
    matrices = [(dim, dim + 2 * few), (dim, dim), (dim, 2 * hidden), (hidden, dim)]
    forward = [product(tokens, *matrix) for matrix in matrices]
    forward.append(
        ("half", 2 * tokens * length * dim, HALF * tokens * (2 * dim + 2 * few))
    )  # causal: half of the pairs
    # Two norms with casts to float32 and back, rotary embedding, two residual sums; SiLU and its product.
    forward += [passes(tokens * dim, 2)] * 18 + [passes(tokens * hidden, 2), passes(tokens * hidden, 3)]
    double = [(kind, 2 * flops, 2 * traffic) for kind, flops, traffic in forward]
    backward = double + [piece for number, piece in enumerate(forward) if number % 2]
    parameters = sum(a * b for a, b in matrices)
    head = [product(tokens, dim, vocabulary), passes(tokens * vocabulary, 4)]
    last = [(kind, 2 * flops, 2 * traffic) for kind, flops, traffic in head]
    units = [(parameters, forward, backward)] * layers
    return [
        (dim * vocabulary, [passes(tokens * dim, 2)], [passes(tokens * dim, 4)]),
        *units,
        (dim * vocabulary, head, last),
    ]


# Its hosts: 8 H100 with 2.4 TB/s and 400 Gb/s to the network each.
TITAN = Machine("h100 of torchtitan", 96, 989.0, 67.0, 2400, 450, 50.0, 8)
# Tokens a second and GPU on 8 and on 128 GPUs; FSDP2, bfloat16, two samples of 8,192 tokens each.
# https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3
TITAN_SPEEDS = {False: (5762, 5605), True: (6667, 6514)}


@pytest.mark.parametrize("compiled", [False, True])
def test_llama_with_fsdp2_on_8_and_128_gpus(compiled):
    units = llama()
    small, large = (ends(TITAN, lambda world: sharded(units, world), n, compiled) for n in (8, 128))
    for (fast, middle, slow), speed in zip((small, large), TITAN_SPEEDS[compiled], strict=True):
        seconds = 16384 / speed
        assert fast <= seconds <= slow
        assert middle == pytest.approx(seconds, rel=0.25)
    published = TITAN_SPEEDS[compiled][1] / TITAN_SPEEDS[compiled][0]  # 97.3 and 97.7 %
    best, assumed, worst = (few / many for few, many in zip(small, large, strict=True))
    assert worst - 0.005 <= published <= best
    assert assumed == pytest.approx(published, abs=0.03)


def fourcastnet(dim=768, patches=(90, 180), blocks=8, layers=12):
    """The operations of AFNO for a sample of 720 × 1440 points (arXiv:2202.11214), forward."""
    tokens = patches[0] * patches[1]
    waves = patches[0] * (patches[1] // 2 + 1)
    mixing = (
        "half",
        8 * 2 * waves * dim * (dim // blocks),
        4 * waves * dim * 2 * 16,
    )  # four real products of each of two
    layer = [product(tokens, dim, 4 * dim), product(tokens, 4 * dim, dim), mixing]
    # Real Fourier transforms there and back, each a pass over rows and one over columns, in float32.
    layer += [passes(tokens * dim, 2, 4)] * 4
    # Two norms, two sums, the threshold of the spectrum; GELU.
    layer += [passes(tokens * dim, 2, 4)] * 5 + [passes(tokens * 4 * dim, 2)]
    return layer * layers + [product(tokens, 64 * 20, dim)] * 2


def test_fourcastnet_on_3808_gpus():
    """140.8 PFLOP/s in mixed precision, 11.9 % of peak, on 3,808 A100 (arXiv:2208.05419), of Selene: nodes of 8.

    Replicas with DDP; one sample per GPU is an assumption, as is that the network has one card of 25 GB/s for each GPU.
    """
    selene = Machine("a100 of selene", 80, 312.0, 19.5, 2039, 300, 25.0, 8)
    forward = fourcastnet()
    backward = [(kind, 2 * flops, 2 * traffic) for kind, flops, traffic in forward]
    flops = 3 * sum(flops for _, flops, _ in forward)
    parameters = 12 * (8 * 768**2 + 4 * 768 * 96) + 2 * 64 * 20 * 768
    buckets = 12

    def events(world):
        run = [Run(0, Counter(forward))]
        for number in range(buckets):
            part = backward[number * len(backward) // buckets : (number + 1) * len(backward) // buckets]
            run += [Run(0, Counter(part)), Start("all-reduce", range(world), 4 * parameters // buckets, waits=False)]
        return [*run, *[Wait(n, False) for n in range(buckets, 0, -1)], Run(0, Counter({passes(parameters, 8, 4): 1}))]

    fast, middle, slow = (flops / seconds / 312e12 for seconds in ends(selene, events, 3808))
    assert slow <= 0.119 <= fast
    assert middle == pytest.approx(0.119, abs=0.06)


# Its published speed, 84 TFLOP/s a tile, of 12 tiles a node that share 8 cards of 25 GB/s (arXiv:2509.13523).
AURORA = Machine("tile of aurora", 64, 229.0, 22.9, 1638, 50, 8 * 25 / 12, 12, reached=84 / 229)
STAGES, COPY = 20, 720 * 12  # stages of a pipeline and tiles of a copy, which the source at hand does not say
AERIS = 40 * 10**9, 720 * 1440  # parameters, and tokens of a sample: a point is one


def aeris(copies, batch):
    """A stage of a pipeline, of which each copy passes on its share of the samples one at a time.

    All stages take equally long, so that one that has nothing to do in a round, before its first sample or after its last,
    waits as long as others compute. Then each tile adds up the gradients of its stage.
    """
    parameters, tokens = AERIS
    sample = 6 * parameters * tokens // COPY
    rounds = batch // copies + STAGES - 1
    return [
        Run(0, Counter({("half", sample, 1): rounds})),
        Start("all-reduce", range(0, copies * COPY, STAGES), HALF * parameters // STAGES, False),
        Wait(1, False),
    ]


def aeris_scales(machine, few, many):
    """The samples per tile and second of 14 copies against one, with so many samples of a step."""
    alone, together = (
        play(machine, [Simulated(0, aeris(copies, batch))], copies * COPY).total
        for copies, batch in ((1, few), (14, many))
    )
    return (many / 14 / together) / (few / alone)


@pytest.mark.parametrize("samples", [10, 140])
def test_aeris_with_as_many_samples_a_copy_on_10080_nodes(samples):
    """Weak scaling 95.5 %, with ten or 140 samples a copy, which the source at hand does not say.

    The simulation has neither the input nor the disturbances of a whole machine: what was measured is 3 to 4.3 points below
    its range, which is recorded here.
    """
    found = [aeris_scales(m, samples, 14 * samples) for m in (AURORA.bound(False), AURORA, AURORA.bound(True))]
    assert found == pytest.approx([0.984, 0.994, 0.998], abs=0.002)


@pytest.mark.parametrize(
    "changes", [{"spread": 0.1}, {"links": AURORA.links / 10}, {"latency": 1400.0, "hop_inter": 400.0}], ids=str
)
def test_what_aeris_loses_is_no_figure_of_a_tile_or_its_network(changes):
    """Not a spread of ten times the assumed one, a tenth of the bandwidth, or 100 times the latency: a copy has these alone."""
    assert aeris_scales(replace(AURORA, **changes), 140, 14 * 140) > 0.955


def test_copies_whose_steps_vary_by_a_fortieth_lose_what_aeris_lost():
    """They meet once a step, and wait for the last of 14. Why they would vary, the source at hand does not say."""
    varied = replace(AURORA, spread=0.024).pace(14)
    assert aeris_scales(AURORA, 140, 14 * 140) / varied == pytest.approx(0.955, abs=0.002)


def test_aeris_with_the_same_samples_on_10080_nodes():
    """Strong scaling 81.6 %: the more copies share the samples of a step, the longer their pipelines are half empty.

    From one copy to 14. The samples of a step, which the source at hand does not say, decide: 40 to 140 for each of 14.
    """
    few, many = (
        [aeris_scales(m, 14 * n, 14 * n) for m in (AURORA.bound(False), AURORA.bound(True))] for n in (40, 140)
    )
    assert max(few) <= 0.816 <= min(many)
    assert min(few) >= 0.6


# GPUs that share a sample: width of the model and hidden tokens, as in cases/C4 of https://github.com/DeifiliaTo/Jigsaw_SC, by
# the authors of arXiv:2507.05753; the figures below are its logs and results.csv. TF32, one sample at a time, three blocks.
POINTS, CHANNELS, PATCH = 720 * 1440, 72, 60
TOKENS = POINTS // PATCH
JIGSAW = {1: (4320, TOKENS // 2), 2: (8192, TOKENS // 2), 4: (10352, TOKENS)}
MILLIONS = {1: 1062.38, 2: 1404.88, 4: 2569.40}  # of parameters
FORWARD = {1: 13.566, 2: 32.283, 4: 63.972}  # TFLOP of a sample
SECONDS = {1: (0.714, 1.352), 2: (0.746, 1.111), 4: (0.940, 1.298)}  # of a step, for one sample alone, and on 256 GPUs
EFFICIENCY = {
    2: {2: 0.90, 4: 0.75, 8: 0.74, 16: 0.74, 32: 0.74, 64: 0.68},
    4: {2: 0.94, 4: 0.85, 8: 0.79, 16: 0.75, 32: 0.74, 64: 0.72},
}  # by nodes of four
SIMULATED = {
    2: {2: 0.962, 4: 0.951, 8: 0.944, 16: 0.940, 32: 0.937, 64: 0.934},
    4: {2: 0.968, 4: 0.943, 8: 0.922, 16: 0.891, 32: 0.875, 64: 0.866},
}
"""As assumed, which is up to 26 points more: the range of the assumptions includes what was measured, the middle does not."""
# Nodes of four A100 with 156 TFLOP/s in TF32 and "two high-performance network adapters" of 200 Gb/s
# (https://www.nhr.kit.edu/userdocs/horeka/hardware/); whether both serve the GPUs is not said, so the range includes one.
HOREKA = Machine("a100 of horeka", 40, 312.0, 19.5, 1555, 300, 2 * 25 / 4, 4, tf32_peak=156.0)


def weathermixer(ways):
    """The matrix products of a sample as (rows, inner, columns), of which the last two are a matrix of parameters."""
    dim, hidden = JIGSAW[ways]
    block = [(dim, TOKENS, hidden), (dim, hidden, TOKENS), (TOKENS, dim, dim), (TOKENS, dim, dim)]
    return [
        (TOKENS, PATCH * CHANNELS, dim),
        *block * 3,
        (TOKENS, 2 * dim, PATCH * CHANNELS),
        (POINTS, 2 * CHANNELS, CHANNELS),
    ]


def jigsaw(ways, gpus):
    """A step of a GPU, which has its share of a sample and of the parameters, in a group of DDP with those of equal shares.

    A pair exchanges its fields before each product, and with four GPUs its parameters too. Each matrix is larger than a
    bucket of DDP. Around a product are the bias, GELU, dropout, the norm and the sum: so many arrays read or written.
    """
    matrices, group = weathermixer(ways), range(0, gpus, ways)
    events = [Sample()]

    def computed(matrix, times, arrays):
        rows, inner, columns = matrix
        if ways > 1:
            sent = 4 * inner * (rows + (columns if ways == 4 else 0)) // ways
            events.extend([Start("all-to-all", range(2), times * sent, waits=True), Wait(1, True)])
        _, flops, traffic = product(rows, inner, columns, 4)
        events.append(Run(0, Counter({("tf32", times * flops // ways, times * traffic // ways): 1})))
        events.append(Run(0, Counter({passes(rows * columns // ways, arrays, 4): 1})))

    for matrix in matrices:
        computed(matrix, 1, 7)
    for matrix in matrices[::-1]:
        computed(matrix, 2, 10)
        if len(group) > 1:
            events.append(Start("all-reduce", group, 4 * matrix[1] * matrix[2] // ways, waits=False))
    if len(group) > 1:
        events += [Wait(n, False) for n in range(len(matrices), 0, -1)]
    parameters = sum(inner * columns for _, inner, columns in matrices) // ways
    return [*events, Run(0, Counter({passes(parameters, 11, 4): 1}))]  # clipping and Adam


def of_horeka(ways, gpus):
    """The seconds of a step as assumed, and with each of computation, network and number of adapters at either end."""
    machines = [HOREKA]
    for computing, sending, adapters in every((True, False), (True, False), (1, 2)):
        network = HOREKA.bound(sending)
        ends = {field: getattr(network, field) for field in ("links", "latency", "hop_intra", "hop_inter")}
        machines.append(replace(HOREKA.bound(computing), **ends, inter=adapters * 25 / 4))
    reading = 2 * 4 * POINTS * CHANNELS // ways
    return [play(m, [Simulated(0, jigsaw(ways, gpus), reading)], gpus).total for m in machines]


@pytest.mark.parametrize("ways", JIGSAW)
def test_weathermixer_is_that_of_the_authors(ways):
    matrices = weathermixer(ways)
    assert sum(inner * columns for _, inner, columns in matrices) / 1e6 == pytest.approx(MILLIONS[ways], rel=0.002)
    assert sum(2 * rows * inner * columns for rows, inner, columns in matrices) / 1e12 == pytest.approx(
        FORWARD[ways], rel=0.001
    )
    seconds = of_horeka(ways, ways)
    assert min(seconds) <= SECONDS[ways][0] <= max(seconds)
    assert seconds[0] == pytest.approx(SECONDS[ways][0], rel=0.2)


@pytest.mark.parametrize("ways", EFFICIENCY)
def test_jigsaw_on_8_to_256_gpus(ways):
    """68 % with two and 72 % with four GPUs a sample, on 256."""
    alone = of_horeka(ways, ways)
    for nodes, published in EFFICIENCY[ways].items():
        seconds = of_horeka(ways, 4 * nodes)
        found = [few / many for few, many in zip(alone, seconds, strict=True)]
        assert min(found) <= published <= max(found)
        assert found[0] == pytest.approx(SIMULATED[ways][nodes], abs=0.01)
    assert min(seconds) <= SECONDS[ways][1] <= max(seconds)


def test_what_replicas_lose_on_256_gpus_is_not_their_gradients():
    """Without Jigsaw 51 %, already 66 % on 8 GPUs: four GPUs of a node read four whole samples, at a speed nobody says."""
    alone, together = of_horeka(1, 1), of_horeka(1, 256)
    found = [few / many for few, many in zip(alone, together, strict=True)]
    assert min(found) > 0.51
    assert found[0] == pytest.approx(0.952, abs=0.01)


def test_efficiency_falls_where_gradients_take_longer_than_what_hides_them():
    """The same model, a sixteenth of its tokens: on 128 GPUs the network sets the pace."""
    few, many = (
        play(replace(TITAN, spread=0.0), [Simulated(0, sharded(llama(tokens=1024), n))], n).total for n in (8, 128)
    )
    assert few / many < 0.9
