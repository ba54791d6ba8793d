"""Print plans."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.console import Console
from rich.table import Table

from credit_like.layout import domain_text
from credit_like.plan.estimate import PlanReport, PlanRow
from credit_like.plan.machine import Machine
from credit_like.terminal import fitted, plain_console

_HEAD = (
    "dp",
    "tensor",
    "domain",
    "replicate",
    "GB",
    "fits",
    "s/step",
    "range",
    "samples/s",
    "GFLOP",
    "GB sent",
    "collectives",
)
_LARGE = 1e9
"""Parameters from which on a model is sharded over all ranks: 16 GB in fp32 with gradients and AdamW's moments."""
_DROPPABLE = ("GFLOP", "GB sent", "collectives")


def print_report(report: PlanReport, console: Console | None = None) -> None:
    """Print the table, the impossible degrees, the assumptions and the recommended section to paste."""
    console = console or plain_console(soft_wrap=True)
    table = Table(title=f"{report.name} on {report.world} × {report.machine.name}", box=None, pad_edge=False)
    members = any(row.layout.ensemble > 1 for row in report.rows)
    for column in ("ensemble", *_HEAD) if members else _HEAD:
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        ensemble = [str(row.layout.ensemble)] if members else []
        table.add_row(*ensemble, *_cells(row), style=None if row.fits else "dim")
    fitted(console, table, _DROPPABLE)
    console.print(table)
    for reason in report.illegal:
        _note(console, f"not possible: {reason.degree} {reason.value}: {reason.reason}")
    _note(console, assumptions(report.machine))
    for precision in sorted({row.fullest.precision for row in report.rows}):
        console.print(f"Computing in {precision}.")
    best = report.recommended
    if best is None:
        _note(console, f"no layout of {report.world} fits; {advice(report)}")
        return
    console.print(f"\n# recommended for {report.world} GPUs\n{block(best)}")
    if told := why_whole(best):
        _note(console, told, "# ")
    for name, size in sorted(best.fullest.parts.items(), key=lambda item: -item[1]):
        if size >= 5e5:
            console.print(f"#   {size / 1e9:8.3f} GB {name}")


def _note(console: Console, text: str, before: str = "") -> None:
    """Print a text, on a terminal in lines of whole words that begin with `before`, elsewhere in one line."""
    if console.is_terminal:
        options: dict[str, Any] = {"initial_indent": before, "subsequent_indent": before}
        console.print(textwrap.fill(text, console.width, break_long_words=False, break_on_hyphens=False, **options))
    else:
        console.print(before + text)


def print_machine(machine: Machine) -> None:
    """Print every figure, in the form that `--gpu FILE` reads."""
    console = plain_console(soft_wrap=True)
    for name, value in machine.assumptions().items():
        shown = f"{value:.4g}" if isinstance(value, float | int) else value
        console.print(f"{name}: {shown}")


def _cells(row: PlanRow) -> list[str]:
    layout, rank = row.layout, row.fullest
    sent = rank.collectives().values()
    return [
        str(layout.dp),
        str(layout.tensor),
        domain_text(layout.shape),
        str(layout.replicate),
        f"{rank.peak / 1e9:.2f}",
        "yes" if row.fits else f"+{row.excess / 1e9:.1f} GB",
        f"{row.seconds:.3g}",
        spread(row),
        f"{row.samples / row.seconds:.3g}" if row.seconds else "",
        f"{max(r.flops for r in row.ranks) / 1e9:.4g}",
        f"{sum(size for _, size in sent) / 1e9:.3g}",
        str(sum(number for number, _ in sent)),
    ]


def why_whole(row: PlanRow) -> str:
    """Return why a model that is small enough need not be sharded over all ranks; "" for a large one, or for one rank."""
    rank, layout = row.fullest, row.layout
    state = rank.checkpoint + 4 * rank.parameters  # parameters, optimiser state and average, as saved, and gradients
    if rank.parameters >= _LARGE or layout.shards == 1 or state > row.machine.usable:
        return ""
    return (
        f"{rank.parameters / 1e6:.4g} million parameters: a whole copy with gradients and optimiser state is "
        f"{state / 1e9:.2g} GB of {row.machine.usable / 1e9:.3g} GB on a GPU. Where that fits, data: ddp sends gradients "
        "alone, and replicate with a copy to each node gathers parameters within a node alone; fsdp2 over all ranks "
        "gathers them over the network in every forward and backward."
    )


def line(row: PlanRow) -> str:
    """Return a summary of a layout in one line."""
    fits = "fits" if row.fits else f"lacks {row.excess / 1e9:.1f} GB"
    return (
        f"{row.layout}: {row.fullest.peak / 1e9:.1f} GB of {row.machine.usable / 1e9:.1f} GB on {row.machine.name} "
        f"({fits}), computing in {row.fullest.precision}, estimated {row.seconds:.3g} s a step ({spread(row)})"
    )


def spread(row: PlanRow) -> str:
    """Return the range of the estimated time of a step."""
    return f"{row.estimate.low:.2g}–{row.estimate.high:.2g}"


def assumptions(machine: Machine) -> str:
    """Return the assumptions of the estimates as text."""
    m = machine
    tf32 = f"TensorFloat-32 {m.tf32_peak:g}, " if m.tf32_peak else ""
    return (
        f"Times are estimates: peak {m.peak:g} TFLOP/s ({tf32}float32 {m.wide_peak:g}), memory {m.bandwidth:g} GB/s, "
        f"{m.reached:.0%} of each reached{_range(m, 'reached')}; network {m.intra:g} GB/s in a node of {m.node} and "
        f"{m.inter:g} GB/s between nodes, {m.links:.0%} reached{_range(m, 'links')}, {m.latency:g} µs a "
        f"collective{_range(m, 'latency')}, {m.hop_intra:g} µs for each further rank and {m.hop_inter:g} µs for each further "
        f"node; {m.launch:g} µs to launch an operation{_range(m, 'launch')}, {m.floor:g} µs on the device besides its "
        f"work{_range(m, 'floor')}; where the model is compiled, {m.fused:.0%} of them launched and {m.moved:.0%} of their "
        f"traffic; GPUs that differ by {m.spread:.1%} in speed{_range(m, 'spread')}; samples read at {m.reading:g} "
        f"GB/s{_range(m, 'reading')}. Memory: {m.memory:g} GB less {m.reserve:.0%}."
    )


def _range(machine: Machine, figure: str) -> str:
    low, high = sorted(getattr(machine.bound(fast), figure) for fast in (True, False))
    return f" ({low:.2g}–{high:.2g})"


def advice(report: PlanReport) -> str:
    """Return advice on how to make the layout fit that exceeds the memory least."""
    if not report.rows:
        return "change the number of GPUs or the batch size"
    row = report.rows[0]
    largest = max(row.fullest.parts, key=lambda part: row.fullest.parts[part])
    if largest == "activations":
        cures = "trainer.activation_checkpoint: true, a smaller micro_batch_size or forecast_len, a larger domain"
    else:
        cures = "more GPUs, or data: fsdp2"
    return f"the nearest lacks {row.excess / 1e9:.1f} GB, most of its memory is {largest}; change to {cures}"


def block(row: PlanRow) -> str:
    """Return the part of an experiment file that requests this layout."""
    degrees = {k: v for k, v in row.layout.parallelism.model_dump(mode="json").items() if v != 1}
    return "trainer:\n  parallelism: {" + ", ".join(f"{key}: {value}" for key, value in degrees.items()) + "}"
