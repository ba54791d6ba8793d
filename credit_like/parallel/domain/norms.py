"""Domain layer of GroupNorm. Tensors are (B, H, W, C)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from credit_like.nn import norms
from credit_like.parallel.collectives import gather_over, sum_over
from credit_like.parallel.domain.layer import DomainLayer, domain_layer


class _GroupNorm(torch.autograd.Function):
    """y = (x - mean) rstd w + b with the mean and variance of each group over all ranks' points.

    Forward gathers (count, mean, sum of squared deviations) of each rank and merges them (Chan et al. 1979), which has
    the accuracy of two passes with one small collective. Backward sums (sum of dy w, sum of dy w x) over ranks in one
    more.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, group: ProcessGroup
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x_BHWGC = x.to(wide).unflatten(-1, (groups, -1))
        count = x_BHWGC.shape[1] * x_BHWGC.shape[2] * x_BHWGC.shape[4]
        var_BG, mean_BG = torch.var_mean(x_BHWGC, dim=(1, 2, 4), correction=0)
        counts = torch.full_like(mean_BG, count)
        n_RBG, mean_RBG, var_RBG = gather_over(torch.stack([counts, mean_BG, var_BG]), group).unbind(1)
        total = n_RBG.sum(0)
        mean_BG = (n_RBG * mean_RBG).sum(0) / total
        var_BG = (n_RBG * (var_RBG + (mean_RBG - mean_BG) ** 2)).sum(0) / total
        rstd_BG = torch.rsqrt(var_BG + eps)
        scale_BC = (rstd_BG[..., None] * weight.to(wide).view(groups, -1)).flatten(1)
        shift_BC = bias.to(wide) - (mean_BG[..., None] * scale_BC.unflatten(1, (groups, -1))).flatten(1)
        ctx.save_for_backward(x, weight, mean_BG, rstd_BG, total)
        ctx.groups, ctx.group = groups, group
        return torch.addcmul(shift_BC[:, None, None], x.to(wide), scale_BC[:, None, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x, weight, mean_BG, rstd_BG, total = ctx.saved_tensors
        wide, groups = mean_BG.dtype, ctx.groups
        dy, xw = grad.to(wide), x.to(wide)
        w_GC = weight.to(wide).view(groups, -1)
        dy_BGC = dy.sum((1, 2)).unflatten(1, (groups, -1))
        centred_BGC = (dy * xw).sum((1, 2)).unflatten(1, (groups, -1)) - mean_BG[..., None] * dy_BGC
        sums = torch.stack([(dy_BGC * w_GC).sum(-1), (centred_BGC * w_GC).sum(-1)])
        sum_dy, sum_centred = sum_over(sums, ctx.group).unbind(0)
        # dx = rstd (w dy - mean(w dy) - x^ mean(w dy x^)), x^ = (x - mean) rstd, written as a dy + b x + c
        slope = -sum_centred * rstd_BG**3 / total
        offset = -sum_dy * rstd_BG / total - slope * mean_BG
        per_channel = [
            (value[..., None] * torch.ones_like(w_GC)).flatten(1)[:, None, None] for value in (slope, offset)
        ]
        scale = (rstd_BG[..., None] * w_GC).flatten(1)[:, None, None]
        dx = torch.addcmul(torch.addcmul(per_channel[1], xw, per_channel[0]), dy, scale)
        dw = (centred_BGC * rstd_BG[..., None]).sum(0).flatten()
        return dx.to(x.dtype), dw.to(weight.dtype), dy_BGC.sum(0).flatten().to(weight.dtype), None, None, None


@domain_layer(norms.GroupNorm)
class DomainGroupNorm(DomainLayer, norms.GroupNorm):
    """GroupNorm with statistics over all ranks' points: one small collective forward, one backward."""

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Normalise this rank's part (B, h, w, C); the shape stays the same."""
        y: Tensor = _GroupNorm.apply(x_BHWC, self.weight, self.bias, self.groups, self.eps, self.manager.group)
        return y
