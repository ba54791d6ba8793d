"""WXFormer (Schreck et al., npj Clim. Atmos. Sci. 8, 239, 2025): its configuration and checks, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from credit_like import bands
from credit_like.bands import Level
from credit_like.errors import UserError
from credit_like.schema.base import Section

if TYPE_CHECKING:
    from torch import nn

_MOST = 2**16
Count = Annotated[int, Field(ge=1, le=_MOST)]
Pads = tuple[Annotated[int, Field(ge=0, le=_MOST)], Annotated[int, Field(ge=0, le=_MOST)]]
Scale = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
PerStage = tuple[Count, Count, Count, Count]


class PaddingConf(Section):
    """Padding of latitude by (north, south) rows and of longitude by (west, east) columns."""

    activate: bool = False
    """Whether to pad."""
    mode: Literal["earth", "mirror", "replicate"] = "earth"
    """`earth` continues across the poles, `mirror` reflects at the edge rows, `replicate` repeats the edges. Longitude
    is circular with `earth` and `mirror`."""
    pad_lat: Pads = (0, 0)
    """Numbers of rows added (north, south)."""
    pad_lon: Pads = (0, 0)
    """Numbers of columns added (west, east)."""


class NoiseConf(Section):
    """Noise, added by layers that start as the identity."""

    type: Literal["decoder", "conditional-norm"] = "decoder"
    """Where noise enters: at the inputs of the decoder's blocks, or in the norms of the feed-forward blocks, whose scale and
    shift it changes."""
    channels: Count = 16
    """Independent normal numbers at each point of each resolution (`decoder`) or of each norm (`conditional-norm`)."""
    scales: tuple[Scale, Scale, Scale, Scale] = (1.0, 1.0, 1.0, 1.0)
    """Standard deviation of the noise; 0 = no noise there. With `decoder` that at the input of each block of the decoder, from
    the coarsest resolution to the finest; with `conditional-norm` that of each stage, from the finest to the coarsest."""
    correlation: Annotated[float, Field(ge=0, le=0.95)] = 0.0
    """Correlation of the noise of successive time steps; 0 = independent. The noise of a step is a sum of
    ln 0.01 / (2 ln correlation) fields of random numbers, 11 for 0.8."""

    @model_validator(mode="after")
    def _some(self) -> NoiseConf:
        if not any(self.scales):
            raise UserError("expected a scale above 0, got 0 at every resolution; change one or remove model.noise")
        return self


class Config(Section):
    """The architecture; channels and grid follow from the data. The defaults suit a 32 x 64 grid."""

    keys_without_weights: ClassVar[tuple[str, ...]] = (
        "padding_conf",
        "interp",
        "head_channels",
        "noise",
        "attn_dropout",
        "ff_dropout",
        "drop_path",
    )
    """Keys in which two models with the same function may differ: the weights do not depend on the grid."""

    type: Literal["wxformer"] = "wxformer"
    dim: PerStage = (8, 16, 32, 64)
    """Channels of each of the four stages, multiples of `dim_head`; one number applies to all stages."""
    depth: PerStage = (1, 1, 1, 1)
    """Transformer layers of each stage; each has short- and long-distance attention."""
    dim_head: Count = 8
    """Channels per attention head."""
    cross_embed_kernel_sizes: tuple[tuple[Count, ...], tuple[Count, ...], tuple[Count, ...], tuple[Count, ...]] = (
        (4, 8),
        (2, 4),
        (2, 4),
        (2, 4),
    )
    """Sizes of the convolution kernels that embed the input of each stage, in points."""
    cross_embed_strides: PerStage = (2, 2, 2, 2)
    """Factor by which each stage coarsens the grid; 2 for stages 1 to 3."""
    global_window_size: PerStage = (4, 4, 2, 1)
    """Tokens per side of the windows of long-distance attention in each stage, spread across the image."""
    local_window_size: Count = 2
    """Tokens per side of the windows of short-distance attention, which are neighbours."""
    padding_conf: PaddingConf = PaddingConf()
    """Padding of the input, to make the grid divisible by the windows."""
    interp: bool = True
    """Interpolate the output bilinearly to the grid of the data; without it, the sizes must match."""
    upsample: Literal["pixel_shuffle", "transpose"] = "pixel_shuffle"
    """Upsampling of the decoder: pixel shuffle, or transposed convolution."""
    head_channels: Count | None = None
    """Channels between the two convolutions of the last block (`pixel_shuffle`); by default as many as
    outputs. A run that starts from the weights of a model with more outputs needs the number of that model."""
    use_spectral_norm: bool = False
    """Divide the weights by their spectral norm."""
    position_index: Literal["exact", "credit"] = "exact"
    """Indexing of the position bias; `credit` reproduces the one that weights trained with NCAR's CREDIT need."""
    noise: NoiseConf | None = None
    """Noise that makes the members of an ensemble differ."""
    attn_dropout: Rate = 0.0
    """Probability that a point's attention to another one is dropped in training."""
    ff_dropout: Rate = 0.0
    """Probability that a hidden value of a feed-forward block is dropped in training."""
    drop_path: Rate = 0.0
    """Stochastic depth: probability that a sample skips a block of the last transformer layer in training. It rises
    linearly from 0 in the first layer."""
    predict: Literal["increment", "state"] = "increment"
    """What the prognostic outputs are: the normalised change over one step, or the normalised next state."""

    @model_validator(mode="before")
    @classmethod
    def _one_for_all_stages(cls, values: object) -> object:
        """Expand one number into one per stage."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for key in ("dim", "depth", "global_window_size", "cross_embed_strides"):
            if isinstance(values.get(key), int):
                values[key] = (values[key],) * 4
        return values

    @property
    def drops(self) -> bool:
        """Whether training needs keys for dropout or stochastic depth."""
        return bool(self.attn_dropout or self.ff_dropout or self.drop_path)

    @property
    def pads(self) -> tuple[Pads, Pads]:
        """Padding as ((north, south), (west, east)); zeros if padding is off."""
        conf = self.padding_conf
        return (conf.pad_lat, conf.pad_lon) if conf.activate else ((0, 0), (0, 0))

    def padded(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the padded grid, which the encoder sees."""
        (north, south), (west, east) = self.pads
        return height + north + south, width + west + east

    def stage_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the (rows, columns) of each stage's tokens for an image of height x width."""
        rows, columns = self.padded(height, width)
        sizes = []
        for stride in self.cross_embed_strides:
            rows, columns = rows // stride, columns // stride
            sizes.append((rows, columns))
        return sizes

    def check(self, height: int, width: int, *, in_channels: int = 1, out_channels: int = 1) -> list[str]:
        """Return the problems on a height x width grid, one for all conditions of an axis, each with what would work."""
        return [
            *self._check_channels(),
            *self._check_kernels(),
            *self._check_padding(height, width),
            *self._check_grid("latitude", 0, height),
            *self._check_grid("longitude", 1, width),
            *self._check_output(height, width),
        ]

    def levels(self, height: int, width: int, axis: int = 0) -> list[Level]:
        """Return every height in the model for an image of height × width, with what its layers require of bands there.

        With axis 1 they are the widths.
        """
        stages = [size[axis] for size in self.stage_sizes(height, width)]
        padded = self.padded(height, width)[axis]
        decoded = 2 * stages[0] - sum(self.pads[axis])
        window = self.local_window_size
        found = [Level((height, width)[axis], why="the image"), Level(padded), Level(2 * stages[0]), Level(decoded)]
        for rows, apart in zip(stages, self.global_window_size, strict=True):
            found.append(Level(rows, window, why=f"windows of {window} rows"))
            if apart > 1:
                why = f"long attention over {apart} strides of {rows // apart} rows"
                found.append(Level(rows, pieces=rows // apart, why=why))
        if self.upsample == "pixel_shuffle":
            found += [Level(2 * rows, 2, why="pixel shuffle") for rows in stages]
        return found

    def check_parallel(
        self, height: int, width: int, *, tensor: int, domain: int, columns: int = 1
    ) -> list[tuple[str, str]]:
        """Return (degree, problem) pairs: heads that do not divide by `tensor`, or levels without rows or columns for each rank.

        `domain` ranks share the rows, and `columns` ranks the columns of each of their bands.
        """
        problems = []
        heads = [dim // self.dim_head for dim in self.dim]
        if any(count % tensor for count in heads):
            works = [d for d in range(1, min(heads) + 1) if all(count % d == 0 for count in heads)]
            problems.append(
                (
                    "tensor",
                    f"expected a divisor of the heads of every stage (dim // dim_head = {', '.join(map(str, heads))}), "
                    f"got {tensor}, change it to one of {', '.join(map(str, works))}",
                )
            )
        for axis, degree in enumerate((domain, columns)):
            if problem := bands.degree_problem(bands.merge(self.levels(height, width, axis)), degree, axis):
                problems.append(("domain", problem))
        return problems

    def _check_channels(self) -> list[str]:
        problems = []
        for stage, dim in enumerate(self.dim):
            if dim % self.dim_head:
                near = max(1, -((self.dim_head - 2 * dim) // (2 * self.dim_head))) * self.dim_head
                heads = [d for d in range(1, dim + 1) if dim % d == 0]
                near_heads = min(heads, key=lambda d: abs(d - self.dim_head))
                problems.append(
                    f"dim[{stage}]: expected a multiple of dim_head {self.dim_head}, got {dim}; "
                    f"change it to {near} or dim_head to {near_heads}"
                )
            if dim // 4 < 1:
                problems.append(f"dim[{stage}]: expected at least 4, got {dim}")
            kernels = len(self.cross_embed_kernel_sizes[stage])
            if dim < 2 ** (kernels - 1):
                problems.append(
                    f"dim[{stage}]: expected at least {2 ** (kernels - 1)} for {kernels} kernels (halved for each), got {dim}; "
                    f"widen it or use fewer kernels"
                )
        if self.dim[3] % 8:
            problems.append(f"dim[3]: expected a multiple of 8 (the decoder halves it three times), got {self.dim[3]}")
        for block, width in enumerate((self.dim[3] // 2, self.dim[3] // 4, self.dim[3] // 8), start=1):
            if width % self.dim[0]:
                groups = max(g for g in range(1, max(width, 1) + 1) if width % g == 0 and g <= self.dim[0])
                problems.append(
                    f"up-block {block}: its {width} channels (dim[3] {self.dim[3]} / {2**block}) do not split into "
                    f"dim[0] = {self.dim[0]} groups of GroupNorm; change dim[3] to a multiple of {8 * self.dim[0]} "
                    f"or dim[0] to {groups}"
                )
        return problems

    def _check_kernels(self) -> list[str]:
        problems = []
        for stage, stride in enumerate(self.cross_embed_strides):
            kernels = self.cross_embed_kernel_sizes[stage]
            if not kernels:
                problems.append(f"cross_embed_kernel_sizes[{stage}]: expected at least one kernel, got none")
            problems += [
                f"cross_embed_kernel_sizes[{stage}]: expected at least the stride {stride}, got {kernel}"
                for kernel in kernels
                if kernel < stride
            ]
            if stage and stride != 2:
                problems.append(
                    f"cross_embed_strides[{stage}]: expected 2 (the decoder doubles the grid for each of the stages 1 to 3), "
                    f"got {stride}"
                )
        return problems

    def _most_padding(self, key: str, size: int) -> int | None:
        """Return how many points can be added on one side of an axis; None for any number."""
        mode = self.padding_conf.mode
        if mode == "replicate":
            return None
        return size - 1 if (key, mode) == ("pad_lat", "mirror") else size

    def _check_padding(self, height: int, width: int) -> list[str]:
        problems = []
        (north, south), (west, east) = self.pads
        mode = self.padding_conf.mode
        most = self._most_padding("pad_lat", height)
        for side, pad in (("north", north), ("south", south)):
            if most is not None and pad > most:
                problems.append(f"padding_conf.pad_lat: expected at most {most} rows {side} ({mode}), got {pad}")
        most = self._most_padding("pad_lon", width)
        for side, pad in (("west", west), ("east", east)):
            if most is not None and pad > most:
                problems.append(f"padding_conf.pad_lon: expected at most {most} columns {side} ({mode}), got {pad}")
        if mode == "earth" and (north or south) and width % 2:
            problems.append(
                f"padding_conf.mode: earth turns rows by half the globe; expected an even width, got {width}"
            )
        return problems

    def _check_grid(self, axis: str, which: int, size: int) -> list[str]:
        """Check along one axis that windows divide every stage and that the decoder matches the skip connections.

        All problems of the axis are one message, because one change cures them; of many, the first is shown.
        """
        pads = self.pads[which]
        key = ("pad_lat", "pad_lon")[which]
        padded = size + sum(pads)
        problems = self._grid_problems(padded, axis)
        if len(problems) > 2:
            problems = [problems[0], f"{len(problems) - 1} more conditions on {axis} do not hold"]
        return [f"{'; '.join(problems)}; {self._cure(key, size, sum(pads))}"] if problems else []

    def _grid_problems(self, padded: int, axis: str) -> list[str]:
        problems: list[str] = []
        size = padded
        for stage, stride in enumerate(self.cross_embed_strides):
            before, size = size, size // stride
            where = f"stage {stage}: {size} points of {axis} ({padded} padded)"
            if size < 1:
                return [*problems, f"stage {stage}: {padded} points of {axis} leave none after stride {stride}"]
            if stage and before % stride:
                problems.append(
                    f"stage {stage}: {before} points of {axis} ({padded} padded) are not a multiple of {stride}"
                )
            for name, window in (
                ("local_window_size", self.local_window_size),
                (f"global_window_size[{stage}]", self.global_window_size[stage]),
            ):
                if size % window:
                    near = min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - window), d))
                    problems.append(f"{where} are not a multiple of {name} {window}; the nearest window is {near}")
        return problems

    def _cure(self, key: str, size: int, pad: int) -> str:
        """Return the nearest sums of pads that work with these windows and that the mode allows, as text."""
        most = 2 * (self._most_padding(key, size) or pad + size)
        works = [p for p in range(min(most, pad + 2 * size) + 1) if not self._grid_problems(size + p, "")]
        below = [p for p in works if p < pad][-1:]
        above = [p for p in works if p > pad][:1]
        if not below and not above:
            return "no padding makes these windows work together"
        sums = " or ".join(f"{p} (grid {size + p})" for p in below + above)
        total = (above or below)[0]
        line = f"padding_conf: {{activate: true, {key}: [{total // 2}, {total - total // 2}]}}"
        return f"padding_conf.{key} that sums to {sums} works, such as {line}"

    def _check_output(self, height: int, width: int) -> list[str]:
        rows, columns = self.stage_sizes(height, width)[0]
        (north, south), (west, east) = self.pads
        out = (2 * rows - north - south, 2 * columns - west - east)
        if min(out) < 1:
            return [
                f"cross_embed_strides[0]: the output of {2 * rows} x {2 * columns} is smaller than the padding; use 2"
            ]
        if not self.interp and out != (height, width):
            return [f"interp: the decoder gives {out[0]} x {out[1]}, the grid is {height} x {width}; set interp: true"]
        return []


def build(config: Config, *, in_channels: int, out_channels: int, frames: int, height: int, width: int) -> nn.Module:
    """Build the model: (B, in_channels, frames, height, width) to (B, out_channels, 1, height, width).

    Raises UserError with every problem that `Config.check` finds.
    """
    problems = config.check(height, width, in_channels=in_channels, out_channels=out_channels)
    if problems:
        raise UserError("wxformer does not fit the grid:\n" + "\n".join(problems))
    from credit_like.models.wxformer.model import WXFormer

    return WXFormer(
        config, in_channels=in_channels, out_channels=out_channels, frames=frames, height=height, width=width
    )
