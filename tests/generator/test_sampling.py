"""Draws follow the distribution that is recorded; numpy in float64 judges.

Letters: S slots, V vocab.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.generator import sampling
from rl_jax.generator.sampling import SlotSampling

S, V = 4096, 300  # V: more than one block of the inverse CDF, not a multiple
_sample = jax.jit(sampling.sample)
_inverse_cdf = jax.jit(sampling._inverse_cdf)


def _draw(logits, positions=0, seed=7, step=1, prompt=2, index=None, **params):
  """Tokens, log-probs and kept mass of S slots; scalars hold for all slots."""
  index = np.arange(S) if index is None else index
  each = lambda x, dtype: np.broadcast_to(np.asarray(x, dtype), (S,))  # noqa: E731
  slots = SlotSampling(
    temperature=each(params.get('temperature', 1), np.float32),
    top_k=each(params.get('top_k', 0), np.int32),
    top_p=each(params.get('top_p', 1), np.float32),
    min_p=each(params.get('min_p', 0), np.float32),
    key_ids=np.stack([each(x, np.int32) for x in (step, prompt, index)], 1),
    stop_ids=np.full((S, 1), -1, np.int32),
    adjustment=None,
  )
  logits = np.broadcast_to(np.asarray(logits, np.float32), (S, V))
  out = _sample(logits, each(positions, np.int32), slots, np.int32(seed))
  return tuple(np.asarray(x) for x in out)


def _reference(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """(probabilities that are sampled from, kept log-mass), token by token."""
  logits = np.asarray(logits_V, np.float64) / temperature
  full = np.exp(logits - logits.max())
  full /= full.sum()
  order = np.argsort(-full, kind='stable')
  kept = list(order[:top_k] if top_k else order)
  if top_p < 1:
    mass, goal = 0.0, top_p * full[kept].sum()
    for n, token in enumerate(kept):
      mass += full[token]
      if mass >= goal:
        kept = kept[: n + 1]
        break
  kept = [t for t in kept if full[t] >= min_p * full.max()]
  probs = np.zeros_like(full)
  probs[kept] = full[kept] / full[kept].sum()
  return probs, np.log(full[kept].sum())


LOGITS = 2.5 * np.random.default_rng(0).standard_normal(V)
GRID = [
  dict(zip(('temperature', 'top_k', 'top_p', 'min_p'), values))
  for values in itertools.product(
    (0.6, 1.0, 1.7), (0, 1, 20, 1000), (1.0, 0.9, 0.3), (0.0, 0.05, 0.5)
  )
]


def test_logprobs_are_those_of_the_distribution_sampled_from():
  """Every combination at once: each slot has its own parameters."""
  params = {
    name: np.resize([setting[name] for setting in GRID], S) for name in GRID[0]
  }
  tokens, logprobs, kept = _draw(LOGITS, **params)
  references = [_reference(LOGITS, **setting) for setting in GRID]
  for n, (setting, (probs, logmass)) in enumerate(zip(GRID, references)):
    mine = slice(n, S, len(GRID))
    got = tokens[mine]
    assert (probs[got] > 0).all(), setting
    np.testing.assert_allclose(
      logprobs[mine], np.log(probs[got]), atol=1e-5, err_msg=str(setting)
    )
    np.testing.assert_allclose(
      kept[mine], logmass, atol=1e-5, err_msg=str(setting)
    )
    # What the learner sees: softmax(logits / temperature), nothing cut.
    full, _ = _reference(LOGITS, setting['temperature'])
    np.testing.assert_allclose(
      logprobs[mine] + kept[mine], np.log(full[got]), atol=1e-5
    )
    # Where few tokens are kept, each of them comes up; so none is lost.
    assert set(got) >= set(np.flatnonzero(probs > 0.4)), setting


@pytest.mark.parametrize(
  'params',
  [
    {},
    {'temperature': 0.5},
    {'temperature': 2.0, 'top_k': 12},
    {'top_p': 0.8},
    {'min_p': 0.1},
    {'temperature': 1.5, 'top_k': 40, 'top_p': 0.9, 'min_p': 0.02},
  ],
  ids=str,
)
def test_frequencies(params):
  """Chi-square: mean df, standard deviation sqrt(2 df); keys are fixed."""
  tokens = np.concatenate(
    [_draw(LOGITS, positions=p, **params)[0] for p in range(4)]
  )
  probs, _ = _reference(LOGITS, **params)
  expected = probs * len(tokens)
  counts = np.bincount(tokens, minlength=V)
  assert counts[probs == 0].sum() == 0
  rare = expected < 5
  expected = np.append(expected[~rare], expected[rare].sum())
  counts = np.append(counts[~rare], counts[rare].sum())
  expected, counts = expected[expected > 0], counts[expected > 0]
  chi_square = np.sum((counts - expected) ** 2 / expected)
  df = len(expected) - 1
  assert df >= 2
  assert abs(chi_square - df) < 4 * np.sqrt(2 * df), (chi_square, df)


def test_greedy_is_a_point_mass():
  tokens, logprobs, kept = _draw(
    LOGITS, temperature=0, top_k=5, top_p=0.5, min_p=0.3
  )
  probs, _ = _reference(LOGITS)
  np.testing.assert_array_equal(tokens, LOGITS.argmax())
  np.testing.assert_array_equal(logprobs, 0)
  np.testing.assert_allclose(kept, np.log(probs.max()), atol=1e-5)


def test_greedy_takes_the_first_of_equal_logits():
  logits = np.zeros(V)
  logits[[270, 41]] = 3
  np.testing.assert_array_equal(_draw(logits, temperature=0)[0], 41)


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
  logits = np.full(V, -50.0)
  logits[[7, 70, 290]] = 1  # a third each
  tokens, logprobs, kept = _draw(logits, top_k=2)
  assert set(tokens) == {7, 70, 290}
  np.testing.assert_allclose(logprobs, -np.log(3), atol=1e-5)
  np.testing.assert_allclose(kept, 0, atol=1e-5)


def test_a_truncated_neighbour_changes_nothing():
  plain = _draw(LOGITS)
  top_k = np.where(np.arange(S) % 2, 3, 0)
  mixed = _draw(LOGITS, top_k=top_k)
  for got, want in zip(mixed, plain):
    np.testing.assert_array_equal(got[top_k == 0], want[top_k == 0])


def test_minus_infinity_is_never_drawn():
  logits = np.where(np.arange(V) % 3, -np.inf, LOGITS)
  for params in ({}, {'top_p': 0.99}, {'top_k': 200}, {'temperature': 5}):
    tokens, logprobs, kept = _draw(logits, **params)
    np.testing.assert_array_equal(tokens % 3, 0)
    assert np.isfinite(logprobs).all()
    assert np.isfinite(kept).all()


# ---- the random number of a token


def test_key_does_not_depend_on_the_slot():
  order = np.random.default_rng(0).permutation(S)
  tokens, logprobs, _ = _draw(LOGITS)
  moved, moved_logprobs, _ = _draw(LOGITS, index=order)
  np.testing.assert_array_equal(moved, tokens[order])
  np.testing.assert_array_equal(moved_logprobs, logprobs[order])


@pytest.mark.parametrize(
  'change',
  [
    {'seed': 8},
    {'step': 2},
    {'prompt': 3},
    {'positions': 1},
    {'index': np.arange(S) + S},
    {'step': 2, 'prompt': 1},  # the same numbers, in other places
  ],
  ids=lambda change: '+'.join(change),
)
def test_every_part_of_the_key_matters(change):
  """Of 300 equally likely tokens, 14 of 4096 pairs agree by chance."""
  before, after = _draw(np.zeros(V))[0], _draw(np.zeros(V), **change)[0]
  assert np.sum(before == after) < 40


def test_samples_of_a_group_differ():
  tokens = _draw(np.zeros(V), index=np.arange(S))[0]
  assert len(set(tokens)) == V


# ---- the inverse CDF


def _weights():
  """Rows with zeros at either end, in whole blocks, and everywhere but one."""
  rng = np.random.default_rng(0)
  weights = rng.random((64, V)).astype(np.float32)
  weights *= rng.random((64, V)) < 0.2
  weights[0:16, :40] = 0
  weights[16:24, :256] = 0
  weights[24:40, 200:] = 0
  weights[40] = np.arange(V) == 0
  weights[41] = np.arange(V) == V - 1
  weights[42] = np.arange(V) == 255
  weights[43] = np.arange(V) == 256
  return weights


ALMOST_ONE = np.float32(1 - 2**-24)


def test_extremes_of_the_uniform_draw_tokens_that_can_be():
  weights = _weights()
  first = (weights > 0).argmax(1)
  last = V - 1 - (weights[:, ::-1] > 0).argmax(1)
  for uniform, want in ((0.0, first), (ALMOST_ONE, last)):
    got = _inverse_cdf(weights, np.full(64, uniform, np.float32))
    np.testing.assert_array_equal(got, want)


def test_inverse_cdf_is_the_inverse():
  weights = np.array([[1, 0, 2, 5]] * 4 + [[0, 0, 0, 1]], np.float32)
  uniform = np.array([0.0, 0.124, 0.126, 0.376, 0.3], np.float32)
  got = _inverse_cdf(weights, uniform)
  np.testing.assert_array_equal(got, [0, 0, 2, 3, 3])


def test_zero_weight_is_not_drawn_where_sums_round_unevenly(monkeypatch):
  """Accelerators sum in trees: a running sum may rise over a weight of 0."""
  rng = np.random.default_rng(0)
  weights = rng.random((512, 256)).astype(np.float32)
  weights *= rng.random((512, 256)) < 0.3

  def cumsum(x, axis):
    return jax.lax.associative_scan(jnp.add, x, axis=axis)

  running = np.asarray(jax.jit(lambda x: cumsum(x, -1))(weights))
  uneven = (np.diff(running) != 0) & (weights[:, 1:] == 0)
  assert uneven.any()  # else this test shows nothing
  monkeypatch.setattr(jnp, 'cumsum', cumsum)
  draw = jax.jit(lambda w, u: sampling._inverse_cdf(w, u))
  for i in range(0, 256, 5):  # uniforms right at the steps of the CDF
    uniform = np.minimum(running[:, i] / running[:, -1], ALMOST_ONE)
    for direction in (0, 1):
      near = np.nextafter(uniform, np.float32(direction))
      token = np.asarray(draw(weights, np.minimum(near, ALMOST_ONE)))
      assert (weights[np.arange(512), token] > 0).all()


def _adjusted(logits, prompt, drawn, a, stop_ids):
  """By hand, token by token, of one slot."""
  logits = np.array(logits, np.float64)
  for token, bias in a['logit_bias']:
    logits[token] += bias
  for token in {*prompt, *drawn}:
    above = logits[token] > 0
    logits[token] *= 1 / a['repetition'] if above else a['repetition']
  for token in drawn:
    logits[token] -= a['frequency']
  for token in set(drawn):
    logits[token] -= a['presence']
  if len(drawn) < a['min_tokens']:
    logits[list(stop_ids)] = -np.inf
  return logits


def test_adjusted_logits_are_those_worked_out_by_hand():
  """Slots of all lengths; what lies behind a history's end is not counted."""
  rng = np.random.default_rng(1)
  slots, vocab, longest = 12, 40, 20
  logits = rng.normal(0, 3, (slots, vocab)).astype(np.float32)
  history = rng.integers(0, 6, (slots, longest)).astype(np.int32)
  num_prompt = rng.integers(1, 9, slots).astype(np.int32)
  length = (num_prompt + rng.integers(0, 9, slots)).astype(np.int32)
  numbers = {
    'repetition': rng.uniform(0.5, 2, slots),
    'presence': rng.uniform(-1, 2, slots),
    'frequency': rng.uniform(-1, 2, slots),
  }
  floats = {k: x.astype(np.float32) for k, x in numbers.items()}
  min_tokens = rng.integers(0, 9, slots).astype(np.int32)
  stop_ids = np.tile(np.int32([3, 30, -1]), (slots, 1))
  bias_ids = np.tile(np.int32([4, 31, 0]), (slots, 1))
  biases = np.tile(np.float32([1.5, -np.float32(2), 0]), (slots, 1))
  adjustment = sampling.Adjustment(
    **floats,
    min_tokens=min_tokens,
    bias_ids=bias_ids,
    biases=biases,
    history=history,
    num_prompt=num_prompt,
  )
  zeros = np.zeros(slots, np.float32)
  params = SlotSampling(zeros, zeros, zeros, zeros, zeros, stop_ids, adjustment)

  @jax.jit
  def adjust(logits, params, length):
    counts = sampling.count(params.adjustment, length, vocab)
    return sampling.adjust(logits, counts, params, length)

  got = np.asarray(adjust(logits, params, length))
  early = 0
  for s in range(slots):
    a = {name: float(x[s]) for name, x in floats.items()}
    a |= {'min_tokens': min_tokens[s], 'logit_bias': [(4, 1.5), (31, -2)]}
    prompt = history[s, : num_prompt[s]].tolist()
    drawn = history[s, num_prompt[s] : length[s]].tolist()
    want = _adjusted(logits[s], prompt, drawn, a, [3, 30])
    early += np.isneginf(want).any()
    np.testing.assert_allclose(got[s], want, rtol=1e-5, atol=1e-5)
  assert 0 < early < slots
