"""RLOO against numbers computed by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import base, rloo

loss = jax.jit(rloo.loss, static_argnames='config')


def _inputs(ratios, advantages):
  logprobs = np.log(np.asarray([ratios], np.float64)) - 1.0
  return base.LossInputs(
    logprobs=jnp.asarray(logprobs, jnp.float32),
    behavior_logprobs=jnp.full(logprobs.shape, -1.0),
    reference_logprobs=jnp.full(logprobs.shape, -1.5),
    advantages=jnp.asarray([advantages], jnp.float32),
    loss_mask=jnp.ones(logprobs.shape),
  )


@functools.partial(jax.jit, static_argnums=1)
def _gradient(inputs, config):
  """d(sum of the losses) / d(log-prob of each token), of the one row."""

  def total(logprobs):
    return rloo.loss(inputs._replace(logprobs=logprobs), config)[0].sum()

  return jax.grad(total)(inputs.logprobs)[0]


def test_the_baseline_is_the_mean_of_the_others():
  found = rloo.advantages(np.array([1.0, 0.5, 0.0, 0.0]), rloo.Config())
  # 1 - .5/3, .5 - 1/3, 0 - 1.5/3
  np.testing.assert_allclose(found, [5 / 6, 1 / 6, -0.5, -0.5], rtol=1e-14)


def test_two_rollouts_are_each_others_baseline():
  found = rloo.advantages(np.array([1.0, 0.25]), rloo.Config())
  np.testing.assert_allclose(found, [0.75, -0.75])


def test_the_weight_is_capped_above_only_and_has_no_gradient():
  inputs = _inputs([0.25, 1.0, 4.0] * 2, [2.0] * 3 + [-2.0] * 3)
  config = rloo.Config(max_ratio=3.0)
  found, metrics = loss(inputs, config=config)
  weight = np.array([0.25, 1.0, 3.0] * 2)
  logprobs = np.log([0.25, 1.0, 4.0] * 2) - 1
  advantages = np.array([2.0] * 3 + [-2.0] * 3)
  np.testing.assert_allclose(
    found[0], -weight * advantages * logprobs, rtol=1e-5
  )
  np.testing.assert_array_equal(metrics['clip_fraction'][0], [0, 0, 1, 0, 0, 1])
  # A capped token still learns: the weight alone is without gradient.
  np.testing.assert_allclose(
    _gradient(inputs, config), -weight * advantages, rtol=1e-6
  )


def test_the_gradient_on_policy_is_that_of_reinforce():
  found = _gradient(_inputs([1.0] * 3, [1.5, -0.5, 0.0]), rloo.Config())
  np.testing.assert_allclose(found, [-1.5, 0.5, 0.0], rtol=1e-6)


@pytest.mark.parametrize('advantage', [1.0, -1.0])
@pytest.mark.parametrize('gap', [0.1, -0.1, 1e3, -1e3])
def test_huge_and_many_log_ratios_are_finite(gap, advantage):
  shape = (1, 4096)
  inputs = base.LossInputs(
    logprobs=jnp.full(shape, -2.0),
    behavior_logprobs=jnp.full(shape, -2.0 - gap),
    reference_logprobs=jnp.full(shape, -2.0 - gap),
    advantages=jnp.full(shape, advantage),
    loss_mask=jnp.ones(shape),
  )
  config = rloo.Config()
  found, metrics = loss(inputs, config=config)
  assert np.isfinite(found).all()
  assert all(np.isfinite(m).all() for m in metrics.values())
  gradient = _gradient(inputs, config)
  assert np.isfinite(gradient).all()
  assert np.abs(gradient).max() <= config.max_ratio


def test_the_cap_must_let_on_policy_tokens_through():
  with pytest.raises(ValueError, match=r'max_ratio=0\.9: must be >= 1'):
    rloo.Config(max_ratio=0.9)
