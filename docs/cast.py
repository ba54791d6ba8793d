"""Record a command in a terminal and draw it as an animated SVG: `python docs/cast.py -o docs/images/demo.svg -- credit-like demo`.

The picture is one film strip: a frame is what a terminal of 80 × 24 characters showed at a moment of the run, and the run is
shortened to 20 seconds. Lines that are equal in several frames are stored once. Nothing is fetched from elsewhere.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape, unescape
from itertools import groupby
from pathlib import Path

import pyte

COLUMNS, ROWS = 80, 24
WIDTH, HEIGHT, MARGIN = 7.8, 17, 10
"""Size of a character, and the space around all of them, in units of the picture."""
COLOURS = {
    "black": "#3b4252", "red": "#bf616a", "green": "#a3be8c", "brown": "#ebcb8b", "blue": "#81a1c1", "magenta": "#b48ead",
    "cyan": "#88c0d0", "white": "#e5e9f0", "default": "#d8dee9",
}  # fmt: skip

Frame = tuple[tuple[str, ...], float]
"""Lines, as SVG, and the second from which they are shown."""


def record(command: Sequence[str]) -> tuple[list[tuple[float, bytes]], int]:
    """Run a command in a terminal; return what it wrote, with seconds since its start, and its exit status."""
    began = time.monotonic()
    events = [(0.0, f"$ {shlex.join(command)}\r\n".encode())]
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True)
    os.close(end)
    with open(terminal, "rb", buffering=0) as output, suppress(OSError):  # how a terminal ends on Linux
        while data := output.read(65536):
            events.append((time.monotonic() - began, data))
            sys.stderr.buffer.write(data)
    return events, process.wait()


def line_of(screen: pyte.Screen, row: int) -> str:
    """Return a line of the screen as SVG `tspan`s of one colour each."""
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    spans = []
    for (colour, bold), group in groupby(cells, lambda cell: (cell.fg, cell.bold)):
        text = "".join(cell.data for cell in group)
        fill = COLOURS.get(colour.removeprefix("bright"), f"#{colour}")
        spans.append((text, f' fill="{fill}"' * (colour != "default") + ' font-weight="bold"' * bold))
    while spans and not spans[-1][0].strip():
        spans.pop()
    return "".join(f"<tspan{style}>{escape(text)}</tspan>" if style else escape(text) for text, style in spans)


def frames(events: Sequence[tuple[float, bytes]], seconds: float, number: int) -> list[Frame]:
    """Return what the terminal showed at `number` moments of the run, which is shortened to `seconds`; no frame twice in a row."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, left = pyte.ByteStream(screen), list(events)
    scale = seconds / events[-1][0]
    found: list[Frame] = []
    for moment in range(1, number + 1):
        at = events[-1][0] * moment / number
        while left and left[0][0] <= at:
            stream.feed(left.pop(0)[1])
        lines = tuple(line_of(screen, row) for row in range(ROWS))
        if not found or found[-1][0] != lines:
            found.append((lines, (at - events[-1][0] / number) * scale))
    return found


def svg(found: Sequence[Frame], seconds: float, pause: float) -> str:
    """Return the frames as one animated picture, which starts again after a pause."""
    width, height = COLUMNS * WIDTH + 2 * MARGIN, ROWS * HEIGHT + 2 * MARGIN
    lines = {
        line: f"l{i}" for i, line in enumerate(dict.fromkeys(line for frame, _ in found for line in frame if line))
    }
    whole = seconds + pause
    keys = [f"{100 * at / whole:.2f}%{{transform:translateY({-i * height}px)}}" for i, (_, at) in enumerate(found)]
    strip = [
        f'<use href="#{lines[line]}" y="{i * height + MARGIN + HEIGHT * row:g}"/>'
        for i, (frame, _) in enumerate(found)
        for row, line in enumerate(frame)
        if line
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" font-size="13">',
            "<style>text{white-space:pre;font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee9}",
            f"#film{{animation:film {whole:g}s step-end infinite}}",
            f"@keyframes film{{{''.join(keys)}100%{{transform:translateY({-(len(found) - 1) * height}px)}}}}</style>",
            f'<rect width="{width:g}" height="{height}" rx="6" fill="#2e3440"/>',
            "<defs>",
            *(_text(name, line) for line, name in lines.items()),
            "</defs>",
            f'<svg width="{width:g}" height="{height}"><g id="film">',
            *strip,
            "</g></svg>",
            "</svg>",
        ]
    )


def _text(name: str, line: str) -> str:
    """Return the definition of a line, which has the width of its characters in any font."""
    length = WIDTH * len(unescape(re.sub("<[^>]*>", "", line)))
    return f'<text id="{name}" x="{MARGIN}" y="{HEIGHT - 4}" textLength="{length:g}">{line}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    events, status = record(arguments.command)
    if status == 0:
        pictures = frames(events, arguments.seconds, arguments.frames)
        arguments.output.write_text(svg(pictures, arguments.seconds, pause=4.0) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
