"""Faster training versions of two functions that transformers implements only as slow fallbacks.

Both give the results of the functions that they replace. They do
not synchronise with the host, so that a CUDA graph can capture a whole training step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def small_product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y [..., n, n]; tiny matrices element-wise, because huge batches are slow."""
    if x.shape[-1] > 4:
        return x @ y
    return (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A [..., n, n], n a power of two.

    Doubles the size of the inverted diagonal blocks: six rounds of small products for n = 64.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor) -> Tensor:
        n = a.shape[-1]
        a = a.reshape(-1, n, n)
        inverse = torch.eye(n, dtype=a.dtype, device=a.device).repeat(a.shape[0], 1, 1)
        size = 1
        while size < n:
            blocks = (a.shape[0], n // (2 * size), 2, size, n // (2 * size), 2, size)

            # The diagonal over pairs lands in the last axis: [m, size, size, pairs].
            def corner(x: Tensor, row: int, col: int) -> Tensor:
                return x.view(blocks)[:, :, row, :, :, col].diagonal(dim1=1, dim2=3)  # noqa: B023

            low, high, off = (
                corner(t, i, j).permute(0, 3, 1, 2)
                for t, i, j in ((inverse, 0, 0), (inverse, 1, 1), (a, 1, 0))
            )
            product = small_product(small_product(high, off), low)
            corner(inverse, 1, 0).copy_(-product.permute(0, 2, 3, 1))
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Gated delta rule from a zero state over whole chunks.

    query, key, value [batch, time, heads, head_dim], g and beta [batch, time, heads]; g is the
    logarithm of the decay. Returns the output [batch, time, heads, head_dim] and no final state.
    """
    batch, time, heads, dim = value.shape
    if time % chunk_size or kwargs.get("initial_state") is not None:
        raise ValueError(f"time {time} is not a multiple of {chunk_size}, or a state was given")
    chunked = (batch, heads, time // chunk_size, chunk_size)
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k, v = (x.reshape(*chunked, x.shape[-1]) for x in (q * q.shape[-1] ** -0.5, k, v))
    b, decay = (x.transpose(1, 2).float().reshape(chunked) for x in (beta, g))

    decay = decay.cumsum(-1)
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    pairwise = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * b.unsqueeze(-1)
    system = ((k_beta @ k.transpose(-1, -2)) * pairwise).tril(-1)
    inverse = UnitLowerInverse.apply(system.flatten(0, 2)).view_as(system)
    new_values = inverse @ (v * b.unsqueeze(-1))
    k_decayed = inverse @ (k_beta * decay.exp().unsqueeze(-1))
    intra = (q @ k.transpose(-1, -2)) * pairwise
    q = q * decay.exp().unsqueeze(-1)
    k = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    chunk_decay = decay[..., -1].exp()[..., None, None]

    state = v.new_zeros(batch, heads, q.shape[-1], dim)
    outputs = []
    parts = zip(*(x.unbind(2) for x in (q, k, new_values, k_decayed, intra, chunk_decay)))
    for q_i, k_i, u_i, w_i, intra_i, decay_i in parts:
        v_new = u_i - w_i @ state
        outputs.append(q_i @ state + intra_i @ v_new)
        state = state * decay_i + k_i.transpose(-1, -2) @ v_new
    out = torch.stack(outputs, 2).reshape(batch, heads, time, dim)
    return out.transpose(1, 2).to(query.dtype), None


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> Tensor:
    """Depthwise causal convolution [batch, channels, time] with weight [channels, width], SiLU."""
    if bias is not None or activation != "silu":
        raise ValueError(f"only SiLU without a bias, not activation {activation!r}")
    width, time = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    terms = (padded[..., i : i + time] * weight[:, i, None] for i in range(width))
    return F.silu(sum(terms))


def install() -> None:
    """Replace functions of transformers' qwen3_5_moe by those of this file."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    modeling.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    modeling.causal_conv1d_fn = causal_conv1d
