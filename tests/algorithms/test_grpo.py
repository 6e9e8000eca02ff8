"""GRPO against numbers computed by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import base, grpo

loss = jax.jit(grpo.loss, static_argnames='config')


def _inputs(ratios, advantages, mask=None):
  """One row of tokens with these ratios to the behavior policy."""
  logprobs = np.log(np.asarray([ratios], np.float64)) - 1.0
  return base.LossInputs(
    logprobs=jnp.asarray(logprobs, jnp.float32),
    behavior_logprobs=jnp.full(logprobs.shape, -1.0),
    reference_logprobs=jnp.full(logprobs.shape, -1.5),
    advantages=jnp.asarray([advantages], jnp.float32),
    loss_mask=jnp.ones(logprobs.shape)
    if mask is None
    else jnp.asarray([mask], jnp.float32),
  )


@functools.partial(jax.jit, static_argnums=1)
def _gradient(inputs, config):
  """d(sum of the losses) / d(log-prob of each token), of the one row."""

  def total(logprobs):
    return grpo.loss(inputs._replace(logprobs=logprobs), config)[0].sum()

  return jax.grad(total)(inputs.logprobs)[0]


@pytest.mark.parametrize(
  ('scale', 'expected'),
  [
    # mean 1/4; std sqrt(3)/4, over the group and not a sample of it
    ('group', [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
    ('none', [0.75, -0.25, -0.25, -0.25]),
  ],
)
def test_advantages_of_one_right_in_four(scale, expected):
  rewards = np.array([1.0, 0, 0, 0])
  found = grpo.advantages(rewards, grpo.Config(scale=scale))
  np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_advantages_are_normalised_by_the_group_not_the_batch():
  # Twice the spread, the same advantages; without scale, twice as large.
  narrow, wide = np.array([0.0, 0.5]), np.array([0.0, 1.0])
  group, none = grpo.Config(), grpo.Config(scale='none')
  np.testing.assert_allclose(grpo.advantages(narrow, group), [-1, 1])
  np.testing.assert_allclose(grpo.advantages(wide, group), [-1, 1])
  np.testing.assert_allclose(grpo.advantages(narrow, none), [-0.25, 0.25])
  np.testing.assert_allclose(grpo.advantages(wide, none), [-0.5, 0.5])


def test_a_residue_of_rounding_is_not_blown_up():
  rewards = np.array([0.7] * 15 + [np.nextafter(0.7, 1)])
  assert np.abs(grpo.advantages(rewards, grpo.Config())).max() < 1e-9


def test_each_side_is_clipped_where_it_would_gain():
  # Ratios 0.5, 1, 1.5 with clips at 1 - 0.2 and 1 + 0.3.
  config = grpo.Config(clip_low=0.2, clip_high=0.3)
  inputs = _inputs([0.5, 1.0, 1.5] * 2, [2.0] * 3 + [-2.0] * 3)
  found, metrics = loss(inputs, config=config)
  expected = [-1.0, -2.0, -2.6, 1.6, 2.0, 3.0]
  np.testing.assert_allclose(found[0], expected, rtol=1e-6)
  np.testing.assert_array_equal(metrics['clip_fraction'][0], [0, 0, 1, 1, 0, 0])
  np.testing.assert_allclose(metrics['ratio'][0], [0.5, 1, 1.5] * 2, rtol=1e-6)
  # d loss / d log pi = -ratio * A, and nothing where it is clipped.
  np.testing.assert_allclose(
    _gradient(inputs, config), [-1, -2, 0, 0, 2, 3], rtol=1e-6
  )


def test_clip_high_and_clip_low_are_not_mixed_up():
  inputs = _inputs([1.25, 0.75], [1.0, -1.0])
  for low, high, clipped in ((0.2, 0.3, [0, 1]), (0.3, 0.2, [1, 0])):
    config = grpo.Config(clip_low=low, clip_high=high)
    _, metrics = loss(inputs, config=config)
    np.testing.assert_array_equal(metrics['clip_fraction'][0], clipped)


def test_the_gradient_on_policy_is_that_of_reinforce():
  # At a ratio of exactly 1 both branches of the min tie.
  advantages = [1.5, -0.5, 0.0, 2.0]
  inputs = _inputs([1.0] * 4, advantages)
  inputs = inputs._replace(behavior_logprobs=inputs.logprobs)
  found = _gradient(inputs, grpo.Config())
  np.testing.assert_allclose(found, [-1.5, 0.5, 0.0, -2.0], rtol=1e-6)


def test_the_divergence_from_the_behavior_policy_is_reported_raw():
  inputs = _inputs([2.0, 0.5, 1.0], [1.0] * 3)
  _, metrics = loss(inputs, config=grpo.Config())
  # k3 with log_r = log pi / mu: r - 1 - log r.
  expected = [1 - np.log(2), np.log(2) - 0.5, 0]
  np.testing.assert_allclose(metrics['kl_behavior'][0], expected, rtol=1e-5)


@pytest.mark.parametrize('advantage', [1.0, -1.0])
@pytest.mark.parametrize('gap', [0.1, -0.1, 1e3, -1e3])
def test_huge_and_many_log_ratios_are_finite(gap, advantage):
  # 4k tokens, each 0.1 off: the ratio of a sequence would be e^400.
  shape = (1, 4096)
  inputs = base.LossInputs(
    logprobs=jnp.full(shape, -2.0),
    behavior_logprobs=jnp.full(shape, -2.0 - gap),
    reference_logprobs=jnp.full(shape, -2.0 - gap),
    advantages=jnp.full(shape, advantage),
    loss_mask=jnp.ones(shape),
  )
  config = grpo.Config()
  found, metrics = loss(inputs, config=config)
  assert np.isfinite(found).all()
  assert all(np.isfinite(m).all() for m in metrics.values())
  assert np.isfinite(_gradient(inputs, config)).all()


@pytest.mark.parametrize(
  ('keys', 'message'),
  [
    ({'scale': 'batch'}, "scale='batch': must be 'group' or 'none'"),
    ({'clip_low': 0.0}, 'clip_low=0.0 must be in'),
    ({'clip_low': 1.1}, 'clip_low=1.1 must be in'),
    ({'clip_high': 0.0}, 'clip_high=0.0 > 0'),
    ({'aggregation': 'x'}, "aggregation='x'"),  # the base's keys too
  ],
)
def test_illegal_settings_say_what_is_legal(keys, message):
  with pytest.raises(ValueError, match=message):
    grpo.Config(**keys)
