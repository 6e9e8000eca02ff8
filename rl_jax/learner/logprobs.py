"""Log-probability and entropy of each token, without [B, T, V] logits.

The one place where predictions are shifted against targets: entry t of every
result scores tokens[t], predicted from the hidden state at t - 1.

Letters: B rows, T tokens, C tokens of a chunk, D model, V vocab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rl_jax.models.attention import segment_attention
from rl_jax.models.base import Model, Params


def token_logprobs(
  model: Model,
  params: Params,
  tokens_BT: jax.Array,
  segment_ids_BT: jax.Array,
  positions_BT: jax.Array,
  mask_BT: jax.Array,
  temperature: float,
  *,
  chunk: int,
  remat: bool = False,
  axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Under softmax(logits / temperature), where the mask is set.

  Logits exist for `chunk` tokens of each row at a time, of wanted tokens only
  but for the last chunk, and are recomputed in the backward pass. What the
  mask hides is 0 and has no gradient, even where its hidden states are not
  finite.

  Args:
    axis_name: of a vmap over parts of a batch around this call, which then
      skip the chunks that no part wants.

  Returns:
    (log-probabilities, entropies), [B, T] float32 both; the entropies are a
    measurement and carry no gradient.
  """
  B, T = tokens_BT.shape
  hidden_BTD, _ = model.hidden(
    params,
    tokens_BT,
    positions_BT,
    segment_attention(segment_ids_BT),
    remat=remat,
  )
  previous_BTD = jnp.roll(hidden_BTD, 1, axis=1)
  # Before the first token of a sequence lies another one: no prediction.
  wanted_BT = (mask_BT > 0) & (positions_BT > 0)
  # Double where: hide what is masked from the head, then its result.
  previous_BTD = jnp.where(wanted_BT[..., None], previous_BTD, 0.0)
  # What is wanted comes first in each row, so that the chunks of prompts and
  # padding, most of them in RL, are never scored.
  order_BT = jnp.argsort(~wanted_BT, axis=1, stable=True)
  longest = jnp.max(jnp.sum(wanted_BT, axis=1))
  if axis_name is not None:
    # A condition that differs between the parts would score every chunk.
    longest = jax.lax.pmax(longest, axis_name)

  def score(hidden_BCD, targets_BC):
    logits = model.logits(params, hidden_BCD) / temperature
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, targets_BC[..., None], -1)[..., 0]
    fixed = jax.lax.stop_gradient(logprobs)
    return chosen, -jnp.sum(jnp.exp(fixed) * fixed, axis=-1)

  @jax.checkpoint  # around cond, which would keep the head once a chunk
  def score_if_wanted(inputs):
    hidden_BCD, targets_BC, begin = inputs
    zeros_BC = jnp.zeros(targets_BC.shape, jnp.float32)
    return jax.lax.cond(
      begin < longest,
      lambda: score(hidden_BCD, targets_BC),
      lambda: (zeros_BC, zeros_BC),
    )

  def chunks(x):
    index = order_BT.reshape(B, T, *(1,) * (x.ndim - 2))
    x = jnp.take_along_axis(x, index, axis=1)
    return jnp.moveaxis(x.reshape(B, T // chunk, chunk, *x.shape[2:]), 1, 0)

  def whole(x):
    x = jnp.moveaxis(x, 0, 1).reshape(B, T)
    x = jnp.take_along_axis(x, jnp.argsort(order_BT, axis=1), axis=1)
    return jnp.where(wanted_BT, x, 0.0)

  logprobs, entropies = jax.lax.map(
    score_if_wanted,
    (chunks(previous_BTD), chunks(tokens_BT), jnp.arange(0, T, chunk)),
  )
  return whole(logprobs), whole(entropies)
