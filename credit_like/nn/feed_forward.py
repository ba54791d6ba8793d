"""The feed-forward residual block. Tensors are (B, H, W, C)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from credit_like import ops
from credit_like.nn.dropout import Dropout
from credit_like.nn.layer import Layer
from credit_like.nn.linear import Linear
from credit_like.nn.noise import NormNoise
from credit_like.nn.norms import ChannelNorm


class FeedForward(Layer):
    """x + contract(dropout(GELU(expand(norm(x))))), width C -> 4 C -> C, with noise in the norm if there is any."""

    tensor_columns = ("expand",)
    tensor_rows = ("contract",)

    def __init__(
        self,
        dim: int,
        *,
        spectral_norm: bool = False,
        dropout: float = 0.0,
        site: int = 0,
        noise: NormNoise | None = None,
    ) -> None:
        super().__init__()
        self.norm = ChannelNorm(dim)
        self.expand = Linear(dim, 4 * dim, spectral_norm=spectral_norm)
        self.contract = Linear(4 * dim, dim, spectral_norm=spectral_norm)
        self.dropout = Dropout(dropout, site) if dropout else None
        self.noise = noise

    def forward(self, x_BHWC: Tensor, key_B: Tensor | None = None, noise_BJ: Tensor | None = None) -> Tensor:
        """Apply the block to (B, H, W, C); the shape stays the same.

        `key_B` selects what dropout drops, `noise_BJ` (`nn.noise.innovations`) the noise in the norm.
        """
        noisy = self.noise is not None and noise_BJ is not None
        if not noisy and (key_B is None or self.dropout is None):
            y_BHWC = ops.feed_forward_block(x_BHWC, self.norm, self.expand, self.contract)
            for layer in (self.dropout, self.noise):
                # Domain parallelism learns the height of these layers from their calls, which return their input here.
                y_BHWC = y_BHWC if layer is None else layer(y_BHWC)
            return y_BHWC
        if not ops.uses_fused_kernel(x_BHWC, self.expand, self.contract):
            return self._plain(x_BHWC, key_B, noise_BJ)
        # Keep what the fused kernel keeps: the input and, where it saves more, the expanded values.
        if ops.saves_activations(x_BHWC):
            return self._plain(x_BHWC, key_B, noise_BJ, ops.recomputed)
        return ops.recomputed(self._plain, x_BHWC, key_B, noise_BJ)

    def _plain(
        self,
        x_BHWC: Tensor,
        key_B: Tensor | None,
        noise_BJ: Tensor | None,
        call: Callable[..., Tensor] = lambda function, *given: function(*given),
    ) -> Tensor:
        """Apply the block by plain operations, the two halves of its branch through `call`."""
        return x_BHWC + call(self._contracted, call(self._expanded, x_BHWC, noise_BJ), key_B)

    def _expanded(self, x_BHWC: Tensor, noise_BJ: Tensor | None) -> Tensor:
        normed = self.norm(x_BHWC)
        expanded: Tensor = self.expand(normed if self.noise is None else self.noise(normed, key_BJ=noise_BJ))
        return expanded

    def _contracted(self, expanded_BHWC: Tensor, key_B: Tensor | None) -> Tensor:
        hidden = functional.gelu(expanded_BHWC)
        if self.dropout is not None:
            hidden = self.dropout(hidden, key_B=key_B, first_channel=self.expand.outputs.start)
        contracted: Tensor = self.contract(hidden)
        return contracted
