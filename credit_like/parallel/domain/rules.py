"""Rules for the effect of each operation on the row dimension of its tensors.

An operation without a rule may not be applied to rows. The rows of an image that passes through a model stay one
dimension, or a part of one dimension that they share with the batch before them and with columns or channels after them
(`Rows`). A rule returns their position in the result, and raises `Mixes` if a row of the result would depend on other
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from credit_like.parallel.trace import tensors_of


class Mixes(Exception):
    """An operation needs rows of other ranks, or cannot be proven not to need them."""


@dataclass(frozen=True)
class Rows:
    """The position of rows: dimension `dim`, of size `outer` x (rows of this band at `level`) x `share`.

    level: a height for which bands of rows are defined. share: how many entries of the dimension belong to one row of
    the level, or the fraction of a row that an entry covers.
    """

    dim: int
    level: int
    outer: int = 1
    share: Fraction = Fraction(1)

    def at(self, dim: int) -> Rows:
        """Return the same rows in another dimension."""
        return Rows(dim, self.level, self.outer, self.share)


@dataclass
class Call:
    """One operation: its arguments by name (defaults included), its results, and the known properties of its tensors."""

    args: dict[str, Any]
    results: list[Tensor]
    rows: Callable[[Tensor], Rows | None]
    uniform: Callable[[Tensor], bool]
    height: Callable[[int], int]
    expected: Rows | None = None  # on a band: the position of the rows in the result for the whole image

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments, in order."""
        return list(tensors_of(list(self.args.values())))

    def only(self, name: str) -> tuple[Tensor, Rows]:
        """Return the argument `name` and its rows.

        Raises Mixes if another argument carries rows, or this one does not.
        """
        carriers = [t for t in self.tensors if self.rows(t) is not None]
        value = self.args[name]
        found = self.rows(value) if isinstance(value, Tensor) else None
        if found is None or any(t is not value for t in carriers):
            raise Mixes("rows are in more than one argument, or in one that selects")
        return value, found


Result = list[Rows | None]
Rule = Callable[[Call], Result]


def _axes(value: Any, ndim: int) -> list[int]:
    """Return dimensions counted from the front; an empty value means all dimensions."""
    values = [value] if isinstance(value, int) else list(value or range(ndim))
    return [v % max(ndim, 1) for v in values]


def _dims(call: Call, ndim: int) -> list[int]:
    """Return the dimensions that the operation works along; all of them if it names none."""
    names = [name for name in ("dim", "dims", "dimension") if name in call.args]
    return _axes(call.args[names[0]] if names else None, ndim)


def _refuse_dims(rows: Rows, dims: Sequence[int]) -> None:
    if rows.dim in dims:
        raise Mixes(f"it works along dimension {rows.dim}, which has the rows")


def check_beside(call: Call, t: Tensor, dim: int) -> None:
    """Raise Mixes if a tensor without rows has different values along `dim`, where other tensors have rows.

    `dim` is counted from the end.
    """
    if t.ndim >= -dim and t.shape[dim] != 1 and t.stride(dim) != 0 and not call.uniform(t):
        raise Mixes(f"a tensor of shape {tuple(t.shape)} has other values for each row; a band would need its part")


def broadcast(call: Call, tensors: Sequence[Tensor], ndim: int) -> Rows:
    """Return the position of rows in a broadcast result of `ndim` dimensions.

    Raises Mixes unless rows meet the same rows, or values that do not depend on the row.
    """
    found = [(t, rows) for t in tensors if (rows := call.rows(t)) is not None]
    places = {rows.at(rows.dim - t.ndim) for t, rows in found}
    if len(places) != 1:
        raise Mixes("it combines rows that lie differently")
    (place,) = places
    for t in tensors:
        if call.rows(t) is None:
            check_beside(call, t, place.dim)
    return place.at(place.dim + ndim)


def elementwise(call: Call) -> Result:
    """Apply the rule of operations whose results depend only on values at the same place."""
    return [broadcast(call, call.tensors, result.ndim) for result in call.results]


def _same(call: Call) -> Result:
    """Apply the rule of operations on one tensor that leave its rows in place."""
    rows = next(r for t in call.tensors if (r := call.rows(t)) is not None)
    return [rows for _ in call.results]


def _along(call: Call) -> Result:
    """Apply the rule of operations on each line along some dimensions, which keep the number of dimensions."""
    x, rows = call.only("self")
    _refuse_dims(rows, _dims(call, x.ndim))
    return [rows for _ in call.results]


def _reduce(call: Call) -> Result:
    """Apply the rule of reductions: dimensions disappear, or have size 1 with `keepdim`."""
    name = "self" if "self" in call.args else "x"
    x, rows = call.only(name)
    dims = _dims(call, x.ndim)
    _refuse_dims(rows, dims)
    gone = 0 if call.args.get("keepdim") else sum(d < rows.dim for d in dims)
    return [rows.at(rows.dim - gone) for _ in call.results]


def _drop(call: Call) -> Result:
    """Apply the rule of selecting one index of a dimension, which disappears."""
    x, rows = call.only("self")
    dims = _dims(call, x.ndim)
    _refuse_dims(rows, dims)
    return [rows.at(rows.dim - sum(d < rows.dim for d in dims)) for _ in call.results]


def _squeeze(call: Call) -> Result:
    x, _ = call.only("self")
    if "dim" not in call.args or any(x.shape[d] != 1 for d in _dims(call, x.ndim)):
        raise Mixes("which dimensions it removes depends on sizes; name dimensions of size 1")
    return _drop(call)


def _unsqueeze(call: Call) -> Result:
    x, rows = call.only("self")
    return [rows.at(rows.dim + (call.args["dim"] % (x.ndim + 1) <= rows.dim))]


def _permute(call: Call) -> Result:
    x, rows = call.only("self")
    if "dims" in call.args:
        order = _axes(call.args["dims"], x.ndim)
    else:
        order = list(range(x.ndim))
        a, b = _axes([call.args.get("dim0", 0), call.args.get("dim1", -1)], x.ndim)
        order[a], order[b] = order[b], order[a]
    return [rows.at(order.index(rows.dim))]


def _slice(call: Call) -> Result:
    """Apply the rule of slices: any part of another dimension, but all of the rows."""
    x, rows = call.only("self")
    if call.args["dim"] % x.ndim == rows.dim and call.results[0].shape != x.shape:
        raise Mixes(f"it takes part of dimension {rows.dim}, which has the rows")
    return [rows]


def _diagonal(call: Call) -> Result:
    x, rows = call.only("self")
    dims = _axes([call.args["dim1"], call.args["dim2"]], x.ndim)
    _refuse_dims(rows, dims)
    return [rows.at(rows.dim - sum(d < rows.dim for d in dims))]


def _expand(call: Call) -> Result:
    x, rows = call.only("self")
    return [rows.at(rows.dim + call.results[0].ndim - x.ndim)]


def _repeat(call: Call) -> Result:
    x, rows = call.only("self")
    shift = len(call.args["repeats"]) - x.ndim
    if call.args["repeats"][rows.dim + shift] != 1:
        raise Mixes(f"it repeats dimension {rows.dim}, which has the rows")
    return [rows.at(rows.dim + shift)]


def _reshape(call: Call) -> Result:
    """Apply the rule of reshapes: rows stay a contiguous part of one dimension, after the same number of entries."""
    x, rows = call.only("self")
    shape = call.results[0].shape
    if 0 in shape:
        raise Mixes("it has no values")
    before = math.prod(x.shape[: rows.dim]) * rows.outer
    after = math.prod(x.shape[rows.dim + 1 :])
    found = []
    for dim in reversed(range(len(shape))):
        front, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        share = rows.share * after / behind
        if before % front == 0 and shape[dim] == before // front * call.height(rows.level) * share:
            found.append(Rows(dim, rows.level, before // front, share))
    if found:  # a single row of a band can match several neighbouring dimensions of size 1
        return [call.expected if call.expected in found else found[0]]
    raise Mixes(
        f"it makes {tuple(shape)} of {tuple(x.shape)}, which does not keep the rows of dimension {rows.dim} together"
    )


def _cat(call: Call) -> Result:
    tensors = call.args["tensors"]
    if len({t.ndim for t in tensors}) > 1:
        raise Mixes("its tensors differ in their number of dimensions")
    rows = broadcast(call, tensors, tensors[0].ndim)
    _refuse_dims(rows, [call.args["dim"] % tensors[0].ndim])
    return [rows]


def _stack(call: Call) -> Result:
    tensors, result = call.args["tensors"], call.results[0]
    rows = broadcast(call, tensors, tensors[0].ndim)
    return [rows.at(rows.dim + (call.args["dim"] % result.ndim <= rows.dim))]


def _pad(call: Call) -> Result:
    """Apply the rule of padding, (before, after) from the last dimension backwards; rows may not be padded."""
    x, rows = call.only("self")
    amounts = call.args["pad" if "pad" in call.args else "padding"]
    place = 2 * (x.ndim - 1 - rows.dim)
    if any(amounts[place : place + 2]):
        raise Mixes(f"it pads dimension {rows.dim}, which has the rows")
    return [rows]


def _index(call: Call) -> Result:
    """Apply the rule of indexing other dimensions by lists of indices, which are the same for all rows."""
    x, rows = call.only("self")
    used = [d for d, index in enumerate(call.args["indices"]) if index is not None]
    _refuse_dims(rows, used)
    together = used == list(range(used[0], used[-1] + 1))
    if not together or any(index is not None and index.dtype == torch.bool for index in call.args["indices"]):
        raise Mixes("it indexes several dimensions that are apart, or with a mask")
    added = call.results[0].ndim - (x.ndim - len(used))
    return [rows.at(rows.dim + (added - len(used) if used[0] < rows.dim else 0))]


def _embedding(call: Call) -> Result:
    _, rows = call.only("indices")
    return [rows]


def _matmul(call: Call) -> Result:
    """Apply the rule of (b, m, k) x (b, k, n), with a bias that broadcasts.

    Rows are b in both factors, or m or n of one of them.
    """
    pairs = [("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec"), ("self", "mat2"), ("self", "vec")]
    a, b = next((call.args[p], call.args[q]) for p, q in pairs if p in call.args and q in call.args)
    left, right = call.rows(a), call.rows(b)
    if (left and left.dim == a.ndim - 1) or (right and right.dim == max(b.ndim - 2, 0)):
        raise Mixes("it sums over the dimension that has the rows")
    if left and right and left != right:
        raise Mixes("it combines rows that lie differently")
    place = left or right
    if place is None:
        raise Mixes("rows are in its bias alone")
    batched = a.ndim == 3 and place.dim == 0
    if left and right and not batched:
        raise Mixes("both factors have rows: each row would meet every other one")
    if batched and not (left and right):
        check_beside(call, b if left else a, -3)
    bias = [t for t in call.tensors if t is not a and t is not b]
    _check_operands(call, bias, place)
    return [place]


def _check_operands(call: Call, tensors: Sequence[Tensor], place: Rows) -> None:
    """Check other operands that broadcast against a result whose rows are known."""
    dim = place.dim - call.results[0].ndim
    for t in tensors:
        rows = call.rows(t)
        if rows is None:
            check_beside(call, t, dim)
        elif rows.at(rows.dim - t.ndim) != place.at(dim):
            raise Mixes("it combines rows that lie differently")


def _convolution(call: Call) -> Result:
    """Apply the rule of convolutions: rows are in the batch, or the kernel is one row high and preserves every row."""
    _, rows = call.only("input")
    if rows.dim == 1:
        raise Mixes("rows are its channels, over which it sums")
    if rows.dim >= 2:
        axis = rows.dim - 2
        kernel = call.args["weight"].shape[rows.dim]

        def of(name: str) -> int:
            values = call.args[name]
            return int(values[axis] if len(values) > 1 else values[0])

        if (kernel, of("stride"), of("padding"), of("output_padding")) != (1, 1, 0, 0):
            raise Mixes(f"its kernel is {kernel} rows high, with stride {of('stride')} and padding {of('padding')}")
    return [rows]


def _layer_norm(call: Call) -> Result:
    x, rows = call.only("input")
    if rows.dim >= x.ndim - len(call.args["normalized_shape"]):
        raise Mixes(f"it normalises over dimension {rows.dim}, which has the rows")
    return [rows for _ in call.results]


def _first(call: Call) -> Result:
    """Apply the rule of operations on each image, with rows in the batch dimension."""
    _, rows = call.only("input")
    if rows.dim != 0:
        raise Mixes("it normalises over the whole image")
    return [rows for _ in call.results]


def _batch_norm(call: Call) -> Result:
    _, rows = call.only("input")
    if call.args.get("training") or rows.dim == 1:
        raise Mixes("it takes mean and variance over rows")
    return [rows, *(None for _ in call.results[1:])]


def _attention(call: Call) -> Result:
    """Apply the rule of attention: rows are in the batch of query, key and value, (…, tokens, channels)."""
    query, key, value = (call.args[name] for name in ("query", "key", "value"))
    rows = call.rows(query)
    if rows is None or rows.dim >= query.ndim - 2 or any(call.rows(t) != rows for t in (key, value)):
        raise Mixes("rows are among the tokens that attend to each other")
    others = [t for t in call.tensors if not any(t is u for u in (query, key, value))]
    _check_operands(call, others, rows)
    return [rows, *(None for _ in call.results[1:])]


def _last(count: int) -> Rule:
    """Return the rule of operations on the last `count` dimensions that treat all others independently."""

    def rule(call: Call) -> Result:
        x, rows = call.only("self" if "self" in call.args else "input")
        if rows.dim >= x.ndim - count:
            raise Mixes(f"it works along dimension {rows.dim}, which has the rows")
        return [rows for _ in call.results]

    return rule


def _names(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


RESHAPES = frozenset(["view", "_unsafe_view", "reshape", "_reshape_alias"])
COPIES = frozenset(["clone", "alias", "detach", "contiguous"])
FACTORIES = frozenset(["empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full"])
LIKE = frozenset(["empty_like", "zeros_like", "ones_like", "full_like"])
# Besides the element-wise operations, these return uniform tensors for uniform tensors.
KEEPS_UNIFORM = (
    RESHAPES
    | COPIES
    | LIKE
    | frozenset(["expand", "permute", "transpose", "t", "unsqueeze", "slice", "select", "fill", "zero", "copy"])
)
# These arguments are sizes that follow from the tensors; the sizes of results are compared instead.
SIZES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*RESHAPES, *FACTORIES, "expand"), ("size",)),
    "native_group_norm": ("N",),
}
RULES: dict[str, Rule] = {
    **_names(" ".join([*COPIES, *LIKE, "_to_copy lift lift_fresh fill zero view_as_real _conj _neg_view"]), _same),
    **_names("copy", elementwise),
    **_names(
        "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin sort topk argsort flip roll glu "
        "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk index_select unfold "
        "_fft_r2c _fft_c2c _fft_c2r",
        _along,
    ),
    **_names(
        "sum mean nansum amax amin var std var_mean std_mean logsumexp prod all any argmax argmin max min median "
        "nanmedian linalg_vector_norm norm aminmax",
        _reduce,
    ),
    **_names("select unbind", _drop),
    **_names("squeeze", _squeeze),
    **_names("unsqueeze", _unsqueeze),
    **_names("permute transpose t", _permute),
    **_names("slice", _slice),
    **_names("diagonal", _diagonal),
    **_names("expand", _expand),
    **_names("repeat", _repeat),
    **_names(" ".join(RESHAPES), _reshape),
    **_names("cat", _cat),
    **_names("stack", _stack),
    **_names(
        "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d",
        _pad,
    ),
    **_names("index", _index),
    **_names("embedding", _embedding),
    **_names("mm addmm bmm baddbmm mv addmv", _matmul),
    **_names("convolution", _convolution),
    **_names("native_layer_norm _fused_rms_norm", _layer_norm),
    **_names("native_group_norm", _first),
    **_names("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training", _batch_norm),
    **_names(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        _attention,
    ),
    **_names("avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d", _last(2)),
    **_names("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", _last(2)),
    **_names("pixel_shuffle pixel_unshuffle", _last(3)),
}
