"""Matrix products over channels, by the faster of two libraries (`policy.prefers_onednn`).

The choice depends on the processor and on shapes alone, so a run repeats its numbers on the same machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credit_like.ops.cpu import policy

ONEDNN_FROM = 2**20  # multiplications that outweigh what a call of oneDNN costs
TRANSPOSED_FROM = 64  # columns of a product that outweigh the copy of a transposed left matrix


def _by_onednn(a_NK: Tensor, b_KM: Tensor) -> bool:
    return (
        a_NK.shape[0] * b_KM.shape[0] * b_KM.shape[1] >= ONEDNN_FROM
        and (a_NK.is_contiguous() or b_KM.shape[1] >= TRANSPOSED_FROM)
        and policy.prefers_onednn(a_NK)
    )


def product(a_NK: Tensor, b_KM: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Return a b, plus a number for each column."""
    if _by_onednn(a_NK, b_KM):
        if not (b_KM.is_contiguous() or b_KM.t().is_contiguous()):
            b_KM = b_KM.contiguous()  # else it would use its reference implementation
        # torch's compiler calls this function for the same purpose.
        y: Tensor = torch.ops.mkldnn._linear_pointwise(a_NK, b_KM.t(), bias_M, "none", [], "")
        return y
    return a_NK @ b_KM if bias_M is None else torch.addmm(bias_M, a_NK, b_KM)


def add_product(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor, factor: float = 1.0, *, keep: bool = True) -> Tensor:
    """Add a b, times a factor, to `out`; without `keep`, write it there."""
    if not _by_onednn(a_NK, b_KM):
        return out_NM.addmm_(a_NK, b_KM, beta=float(keep), alpha=factor)
    found = product(a_NK, b_KM)
    return out_NM.add_(found, alpha=factor) if keep else torch.mul(found, factor, out=out_NM)


def widen(x_NC: Tensor, weight_OC: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b.

    For few points MKL computes it as the transpose of W x^T, which it splits better between threads.
    """
    if 2 * x_NC.shape[0] > weight_OC.shape[0] or _by_onednn(x_NC, weight_OC.t()):
        return product(x_NC, weight_OC.t(), bias)
    y_ON = weight_OC @ x_NC.t() if bias is None else torch.addmm(bias[:, None], weight_OC, x_NC.t())
    return y_ON.t()


def gradient(dy: Tensor, x: Tensor, out_OC: Tensor | None = None, *, keep: bool = False) -> Tensor:
    """Return the gradient of W in y = x W^T; with `out`, write it there, or with `keep` add it to what is there.

    oneDNN copies the transposed left matrix, which should be the narrower one.
    """
    dy_NO, x_NC = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    turned = dy_NO.shape[1] > x_NC.shape[1] and _by_onednn(x_NC.t(), dy_NO)
    if out_OC is None:
        return product(x_NC.t(), dy_NO).t().contiguous() if turned else product(dy_NO.t(), x_NC)
    if turned:
        add_product(out_OC.t(), x_NC.t(), dy_NO, keep=keep)
        return out_OC
    return add_product(out_OC, dy_NO.t(), x_NC, keep=keep)
