"""Gradients of replicated parameters after a domain-parallel backward."""

from __future__ import annotations

from torch import nn

from credit_like.parallel.collectives import allreduce_grads_avg
from credit_like.parallel.domain.manager import DomainManager


def sync_domain_gradients(model: nn.Module, manager: DomainManager | None) -> None:
    """Average gradients over the domain ranks, after backward.

    This is for a model that was only passed to `apply_domain_parallel`. The wrappers that `parallelise` applies, also with
    `data: none`, already average over data × domain, and this must not run in addition. The factor in the loss
    (Runtime.gradient_scale) turns the average into the required sum.
    """
    if manager is not None:
        allreduce_grads_avg([p.grad for p in model.parameters() if p.grad is not None], manager.group)
