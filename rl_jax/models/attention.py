"""Grouped-query attention: projections here, the attending itself passed in.

`attend(q, k, v, cache) -> (out, cache)` is the seam between training and
generation: the learner attends within packed segments (below), the generator
against its pages. Everything else of a block is the same code.

Letters: B rows, T and S tokens, N query heads, K kv heads, G = N / K,
H head dim, D model, L layers, X = G * T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rl_jax.models import layers

# (q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], cache) -> (out [B,T,N,H], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


HIDDEN = -1e30  # a score whose weight is exactly 0
# Keys are padded to a multiple of it. XLA on CPU adds the terms of a product
# in an order that depends on the number of columns, but not between multiples
# of 64 (four vectors of AVX-512), and learner and generator have to agree.
KEY_MULTIPLE = 64
_VANISHING = -1e4  # exp of anything lower is 0 in float32
_LANES = KEY_MULTIPLE  # columns of the product that sums weights; as above


class Attention(nnx.Module):
  """Projections, optional biases (Qwen 2) and q/k norm (Qwen 3), RoPE."""

  def __init__(self, rngs: nnx.Rngs, config: Any):
    L, D, H = config.num_layers, config.d_model, config.head_dim
    N, K = config.num_heads, config.num_kv_heads
    self.eps = config.norm_eps

    def projection(num_heads: int, axis: str) -> nnx.Param:
      named = ('layers', 'embed', axis, 'head_dim')
      return layers.param(rngs, (L, D, num_heads, H), named, fan_in=D)

    self.q = projection(N, 'heads')
    self.k = projection(K, 'kv_heads')
    self.v = projection(K, 'kv_heads')
    self.out = layers.param(
      rngs,
      (L, N, H, D),
      ('layers', 'heads', 'head_dim', 'embed'),
      fan_in=N * H,
    )
    if config.attention_bias:
      named = ('layers', 'kv_heads', 'head_dim')
      self.q_bias = layers.param(
        rngs, (L, N, H), ('layers', 'heads', 'head_dim')
      )
      self.k_bias = layers.param(rngs, (L, K, H), named)
      self.v_bias = layers.param(rngs, (L, K, H), named)
    if config.qk_norm:
      named = ('layers', 'head_dim')
      self.q_norm = layers.param(rngs, (L, H), named, fill=1.0)
      self.k_norm = layers.param(rngs, (L, H), named, fill=1.0)
    self.bias, self.qk_norm = config.attention_bias, config.qk_norm

  def __call__(
    self,
    x_BTD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
    cache: Any,
  ) -> tuple[jax.Array, Any]:
    q = layers.product('BTD,DNH->BTNH', x_BTD, self.q.get_value())
    k = layers.product('BTD,DKH->BTKH', x_BTD, self.k.get_value())
    v = layers.product('BTD,DKH->BTKH', x_BTD, self.v.get_value())
    if self.bias:
      q = q + self.q_bias[...][None, None]
      k = k + self.k_bias[...][None, None]
      v = v + self.v_bias[...][None, None]
    if self.qk_norm:
      q = layers.rms_norm(q, self.q_norm[...], self.eps)
      k = layers.rms_norm(k, self.k_norm[...], self.eps)
    q, k = layers.apply_rope(q, rope), layers.apply_rope(k, rope)
    out_BTNH, cache = attend(q, k, v, cache)
    # A, not N: einsum sums over letters in alphabetical order, and in any
    # other order than that of memory the weights are copied first.
    out_BTD = layers.product('BTAH,AHD->BTD', out_BTNH, self.out.get_value())
    return out_BTD, cache


def softmax_parts(
  scores_BKXS: jax.Array, v_BKSH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Largest score, sum of weights and weighted sum of values, unnormalised.

  Learner and generator share it so that they agree to the last bit where the
  backend's matrix product adds its terms in order, as XLA's does on CPU: then
  a key of weight 0 changes nothing, wherever it stands. The sum of weights is
  a product with ones for that reason, since a reduction is free to regroup.

  Returns:
    best [B, K, X, 1], total [B, K, X, 1], out [B, K, X, H], all float32.
  """
  best = jax.lax.stop_gradient(scores_BKXS.max(-1, keepdims=True))
  depth = scores_BKXS - best
  # `where` is there for XLA on CPU: it keeps exp out of a fusion with the
  # scores' product, which has another exp, and only one of us would get it.
  weights = jnp.where(depth < _VANISHING, 0.0, jnp.exp(depth))
  weights = weights.astype(v_BKSH.dtype)
  ones = jnp.ones((weights.shape[-1], _LANES), weights.dtype)
  total = jnp.einsum(
    'BKXS,SM->BKXM', weights, ones, preferred_element_type=jnp.float32
  )[..., :1]
  out = jnp.einsum(
    'BKXS,BKSH->BKXH', weights, v_BKSH, preferred_element_type=jnp.float32
  )
  return best, total, out


def segment_attention(segment_ids_BT: jax.Array) -> Attend:
  """Causal attention within each segment of packed rows.

  Padding (segment 0) attends to padding only, so that it stays finite and
  touches no real token.
  """
  T = segment_ids_BT.shape[1]
  extra = -T % KEY_MULTIPLE
  same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
  seen_BTS = same_BTS & jnp.tril(jnp.ones((T, T), bool))[None]
  seen_BTS = jnp.pad(seen_BTS, ((0, 0), (0, 0), (0, extra)))

  def attend(q_BTNH, k_BTKH, v_BTKH, cache):
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    G = N // K
    # Heads first and the queries of a kv head together: plain batched
    # matrix products, twice as fast on CPU as leaving the layout to XLA.
    q_BTKGH = q_BTNH.reshape(B, T, K, G, H) * (H**-0.5)
    q_BKXH = jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4)).reshape(B, K, G * T, H)
    k_BKSH, v_BKSH = (
      jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, extra), (0, 0)))
      for x in (k_BTKH, v_BTKH)
    )
    scores = jnp.einsum(
      'BKXH,BKSH->BKXS', q_BKXH, k_BKSH, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(B, K, G, T, T + extra)
    scores = jnp.where(seen_BTS[:, None, None], scores, HIDDEN)
    scores = scores.reshape(B, K, G * T, T + extra)
    _, total, out = softmax_parts(scores, v_BKSH)
    out = (out / total).astype(q_BTNH.dtype).reshape(B, K, G, T, H)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(B, T, N, H), cache

  return attend
