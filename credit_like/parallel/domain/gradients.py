"""Gradients of replicated parameters after a domain-parallel backward."""

from __future__ import annotations

from torch import nn

from credit_like.parallel.collectives import allreduce_grads_avg
from credit_like.parallel.domain.manager import DomainManager


def sync_domain_gradients(model: nn.Module, manager: DomainManager | None) -> None:
    """Average gradients over the domain ranks, after backward.

    For `data: none` only: the wrappers of fsdp2 and ddp average over data × domain already, and this must not run twice.
    The loss carries the factor that makes an average the sum (Runtime.gradient_scale).
    """
    if manager is not None:
        allreduce_grads_avg([p.grad for p in model.parameters() if p.grad is not None], manager.group)
