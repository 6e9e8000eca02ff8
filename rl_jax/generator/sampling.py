"""Draws tokens on device, and says with what log-probability.

The recorded log-probability is that of the distribution really sampled from:
after temperature, after truncation, renormalised. The log of the mass that
truncation kept is recorded beside it, so that `behavior + kept` is the
log-probability under softmax(logits / temperature). Greedy sampling is a
point mass: log-probability 0, and `kept` is the token's log-probability at
temperature 1. Logit biases and penalties come before all that: with them the
sum is not the model's own log-probability, so training does without them.

The random number of a token depends on the run's seed and (step, prompt id,
sample index, position) only: not on its slot, its neighbours or arrival.

Letters: S slots, V vocab, L longest sequence, K stop ids, E logit biases.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray  # of the device, or on its way there

_BLOCK = 256  # vocabulary entries summed at once when inverting the CDF


class SlotSampling(NamedTuple):
  """Sampling parameters of each slot; see `types.SamplingParams`."""

  temperature: Array  # [S] float32
  top_k: Array  # [S] int32
  top_p: Array  # [S] float32
  min_p: Array  # [S] float32
  key_ids: Array  # [S, 3] int32: step, prompt id, sample index
  stop_ids: Array  # [S, K] int32, -1 where unused
  adjustment: Adjustment | None  # of logits; None on engines without it


class Adjustment(NamedTuple):
  """What changes the logits of each slot; see `types.SamplingParams`."""

  repetition: Array  # [S] float32
  presence: Array  # [S] float32
  frequency: Array  # [S] float32
  min_tokens: Array  # [S] int32
  bias_ids: Array  # [S, E] int32
  biases: Array  # [S, E] float32, 0 where unused
  history: Array  # [S, L] int32: prompt and completion
  num_prompt: Array  # [S] int32, tokens of the prompt


class Counts(NamedTuple):
  """What a slot's sequence holds of each token."""

  in_prompt: Array  # [S, V] bool
  drawn: Array  # [S, V] int32


def count(adjustment: Adjustment, length_S: Array, vocab: int) -> Counts:
  """Of the first `length_S` tokens of each history."""
  history_SL, prompt_S = adjustment.history, adjustment.num_prompt
  S, L = history_SL.shape
  at = jnp.arange(L)[None]
  in_prompt_SL = at < prompt_S[:, None]
  drawn_SL = ~in_prompt_SL & (at < length_S[:, None])
  slot_S1 = jnp.arange(S)[:, None]
  none_SV = jnp.zeros((S, vocab), jnp.int32)
  in_prompt = none_SV.at[slot_S1, history_SL].max(in_prompt_SL.astype(int))
  drawn = none_SV.at[slot_S1, history_SL].add(drawn_SL.astype(int))
  return Counts(in_prompt > 0, drawn)


def adjust(
  logits_SV: jax.Array, counts: Counts, params: SlotSampling, length_S: Array
) -> jax.Array:
  """Biases, then penalties, then no stop before `min_tokens`.

  The repetition penalty is that of CTRL (Keskar et al. 2019, section 4.1),
  over prompt and completion; presence and frequency penalties are those of
  OpenAI's API, over the completion.
  """
  a = params.adjustment
  assert a is not None
  slot_S1 = jnp.arange(logits_SV.shape[0])[:, None]
  logits = logits_SV.at[slot_S1, a.bias_ids].add(a.biases)
  repetition_S1 = a.repetition[:, None]
  punished = jnp.where(
    logits > 0, logits / repetition_S1, logits * repetition_S1
  )
  logits = jnp.where(counts.in_prompt | (counts.drawn > 0), punished, logits)
  logits -= a.frequency[:, None] * counts.drawn
  logits -= a.presence[:, None] * (counts.drawn > 0)
  early_S1 = (length_S - a.num_prompt < a.min_tokens)[:, None]
  unused = logits_SV.shape[1]  # beyond the end: dropped
  held_back_SK = jnp.where(
    early_S1 & (params.stop_ids >= 0), params.stop_ids, unused
  )
  return logits.at[slot_S1, held_back_SK].set(-jnp.inf, mode='drop')


def sample(
  logits_SV: jax.Array,
  positions_S: jax.Array,
  params: SlotSampling,
  seed: jax.Array,
  counts: Counts | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws the token at `positions_S` of each slot.

  Args:
    logits_SV: float32, of the model.
    positions_S: int32, position that the drawn token takes.
    params: of each slot.
    seed: int32 scalar, of the run.
    counts: of the tokens before it, where `params` adjust the logits.

  Returns:
    tokens [S] int32, behavior log-probs [S] and kept log-mass [S] float32.
  """
  logits_SV, logprobs_SV = _untruncated(logits_SV, positions_S, params, counts)
  greedy_S = params.temperature == 0
  probs_SV = jnp.exp(logprobs_SV)
  truncated_S = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
  kept_SV = jax.lax.cond(
    jnp.any(truncated_S & ~greedy_S),
    lambda: jnp.where(_kept(probs_SV, params), probs_SV, 0.0),
    lambda: probs_SV,
  )
  drawn_S = _inverse_cdf(kept_SV, _uniform(seed, params.key_ids, positions_S))
  tokens_S = jnp.where(greedy_S, jnp.argmax(logits_SV, -1), drawn_S)
  logprob_S = jnp.take_along_axis(logprobs_SV, tokens_S[:, None], 1)[:, 0]
  logmass_S = jnp.where(truncated_S, jnp.log(kept_SV.sum(-1)), 0.0)
  logmass_S = jnp.where(greedy_S, logprob_S, logmass_S)
  return tokens_S.astype(jnp.int32), logprob_S - logmass_S, logmass_S


def most_likely(
  logits_SV: jax.Array,
  positions_S: jax.Array,
  params: SlotSampling,
  counts: Counts | None,
  number: int,
) -> tuple[jax.Array, jax.Array]:
  """The `number` likeliest tokens before truncation, the likeliest first.

  Returns:
    ids [S, number] int32, log-probs [S, number] float32: of a token that is
    drawn too, its `behavior + kept`.
  """
  if not number:
    none = (logits_SV.shape[0], 0)
    return jnp.zeros(none, jnp.int32), jnp.zeros(none, jnp.float32)
  _, logprobs_SV = _untruncated(logits_SV, positions_S, params, counts)
  logprobs, ids = jax.lax.top_k(logprobs_SV, number)
  return ids, logprobs


def _untruncated(
  logits_SV: jax.Array,
  positions_S: jax.Array,
  params: SlotSampling,
  counts: Counts | None,
) -> tuple[jax.Array, jax.Array]:
  """Adjusted logits, and log-probs at the temperature (greedy: 1)."""
  if counts is not None:
    logits_SV = adjust(logits_SV, counts, params, positions_S)
  temperature_S = jnp.where(params.temperature == 0, 1.0, params.temperature)
  logprobs_SV = jax.nn.log_softmax(logits_SV / temperature_S[:, None], axis=-1)
  return logits_SV, logprobs_SV


def _uniform(
  seed: jax.Array, key_ids: Array, positions_S: jax.Array
) -> jax.Array:
  """One uniform in [0, 1) a slot."""
  base = jax.random.key(seed)

  def one(ids, position):
    key = base
    for part in (ids[0], ids[1], ids[2], position):
      key = jax.random.fold_in(key, part)
    return jax.random.uniform(key)

  return jax.vmap(one)(key_ids, positions_S)


def _kept(probs_SV: jax.Array, params: SlotSampling) -> jax.Array:
  """Which tokens survive; tokens as likely as the last one kept are kept."""
  vocab = probs_SV.shape[1]
  sorted_SV = -jnp.sort(-probs_SV, axis=-1)
  mass_SV = jnp.cumsum(sorted_SV, axis=-1)
  k_S = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab), vocab)
  goal_S = (
    params.top_p * jnp.take_along_axis(mass_SV, k_S[:, None] - 1, 1)[:, 0]
  )
  needed_S = 1 + jnp.sum(mass_SV < goal_S[:, None], axis=-1)
  # top_p = 1 must not lose tail tokens to the rounding of the running sum.
  needed_S = jnp.where(params.top_p < 1, needed_S, vocab)
  last_S = jnp.minimum(jnp.minimum(needed_S, k_S), vocab) - 1
  floor_S = jnp.take_along_axis(sorted_SV, last_S[:, None], 1)[:, 0]
  floor_S = jnp.maximum(floor_S, params.min_p * sorted_SV[:, 0])
  return probs_SV >= floor_S[:, None]


def _inverse_cdf(weights_SV: jax.Array, uniform_S: jax.Array) -> jax.Array:
  """Index drawn in proportion to weights, never one of weight 0.

  In two levels, since a running sum over a whole vocabulary is slow and
  loses small weights.
  """
  S, V = weights_SV.shape
  padded = jnp.pad(weights_SV, ((0, 0), (0, -V % _BLOCK)))
  blocks = padded.reshape(S, -1, _BLOCK)
  sums = blocks.sum(-1)
  target_S = uniform_S * sums.sum(-1)
  block_S, target_S = _pick(sums, target_S)
  chosen = jnp.take_along_axis(blocks, block_S[:, None, None], 1)[:, 0]
  within_S, _ = _pick(chosen, target_S)
  return block_S * _BLOCK + within_S


def _pick(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
  """First index whose running sum exceeds `target`, and what is left of it."""
  running = jnp.cumsum(weights, axis=-1)
  # Summed in a tree, a running sum may rise over a weight of 0.
  hit = (running > target[:, None]) & (weights > 0)
  size = weights.shape[-1]
  last_positive = size - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
  index = jnp.where(  # no hit: rounding at the very end
    jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last_positive
  )
  before = jnp.take_along_axis(running - weights, index[:, None], 1)[:, 0]
  return index, jnp.maximum(target - before, 0.0)
