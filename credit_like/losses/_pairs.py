"""What the scores of ensembles have in common: a mean distance of members from the truth, less that from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def pair_score(
    alpha: float, error_BKCHW: Tensor, others: Iterable[Tensor], direction: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return mean_k d(x_k, y) - (1 - ε) / (2 K (K - 1)) Σ_j Σ_k d(x_j, x_k) with ε = (1 - α) / K, from x_k - y.

    `direction` is the gradient of the distance d with respect to its first argument, a function of the difference of both.
    A distance grows in proportion to the difference, so it is the product of its gradient and the difference (Euler), and
    Σ_j Σ_k d(x_j, x_k) = 2 Σ_k r_k x_k with r_k = Σ_j direction(x_k - x_j). The coefficients of the errors are their exact
    gradient; nothing else is kept for backward. With `others`, the members of other ranks, the sum over k is that of
    the members given, as `losses.EnsembleLossPlugin` has it.
    """
    fixed = error_BKCHW.detach()
    members, order = 0, fixed.new_zeros(fixed.shape)
    for some in (fixed, *others):
        members += some.shape[1]
        for other in some.unbind(1):
            order += direction(fixed - other[:, None])
    coefficient = direction(fixed) / members
    if members > 1:
        coefficient -= order * ((1 - (1 - alpha) / members) / (members * (members - 1)))
    return (coefficient * error_BKCHW).sum(1)
