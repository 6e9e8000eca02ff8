"""Supervised fine-tuning: which tokens count, and how much."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax import resolve
from rl_jax.algorithms import base
from rl_jax.learner import optimizer, sft
from rl_jax.learner.logprobs import token_logprobs

STOP = 2


def test_the_solution_and_its_stop_token_are_trained_once_each():
  tokens, mask = sft.example(np.array([5, 6]), np.array([7, 8, STOP]))
  np.testing.assert_array_equal(tokens, [5, 6, 7, 8, STOP])
  np.testing.assert_array_equal(mask, [0, 0, 1, 1, 1])
  assert (tokens.dtype, mask.dtype) == (np.int32, np.float32)


def test_token_ids_do_not_make_the_mask():
  # A stop id in the prompt is not trained, pad ids in the solution are.
  _, mask = sft.example(np.array([STOP, 0, STOP]), np.array([0, STOP, STOP]))
  np.testing.assert_array_equal(mask, [0, 0, 0, 1, 1, 1])


def test_the_loss_is_cross_entropy():
  zeros = jnp.zeros((1, 3))
  inputs = base.LossInputs(jnp.array([[-0.5, -2, 0]]), *(zeros,) * 4)
  token_loss, metrics = sft.loss(inputs)
  np.testing.assert_array_equal(token_loss, [[0.5, 2, 0]])
  assert metrics == {}


class Table:
  """Params are [B, T, V] logits."""

  def hidden(self, params, tokens, positions, attend, remat=False):
    del tokens, positions, attend, remat
    return params, None

  def logits(self, params, hidden):
    del params
    return hidden


TABLE = Table()  # one: it is a static argument


@functools.partial(jax.jit, static_argnums=0)
def _gradient(model, logits, row, mask):
  def total(logits):
    logprobs, _ = token_logprobs(model, logits, *row, mask, 1.0, chunk=6)
    none = jnp.zeros_like(logprobs)
    inputs = base.LossInputs(logprobs, none, none, none, mask)
    return jnp.where(mask > 0, sft.loss(inputs)[0], 0.0).sum()

  return jax.grad(total)(logits)


@pytest.mark.parametrize('num_solution', [1, 4])
def test_the_gradient_lies_one_before_each_solution_token(num_solution):
  solution = [7, 0, 3, STOP][-num_solution:]
  tokens, mask = sft.example(np.array([5, 6]), np.array(solution))
  T = 6
  pad = (0, T - len(tokens))
  row = [np.pad(tokens, pad)[None]]
  row.append((np.arange(T) < len(tokens)).astype(np.int32)[None])
  row.append(np.arange(T, dtype=np.int32)[None])
  logits = np.zeros((1, T, 8), np.float32)
  found = _gradient(TABLE, logits, row, np.pad(mask, pad)[None])
  expected = np.zeros((T, 8))
  for i, token in enumerate(solution):  # softmax - one-hot
    expected[1 + i] = 1 / 8 - np.eye(8)[token]
  np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_config_is_the_optimizers_with_a_length():
  config = resolve.settings(
    sft.Config, {'num_steps': 5, 'learning_rate': 1e-3}, 'sft'
  )
  assert isinstance(config, optimizer.Config)
  assert (config.num_steps, config.learning_rate) == (5, 1e-3)
  optimizer.build(config, config.num_steps)
  optimizer.build(sft.Config(warmup_steps=20), 0)  # no phase: nothing to check


def test_messages_name_the_keys_of_sft():
  with pytest.raises(
    ValueError, match=r'sft\.warmup_steps=20: must be < the 5'
  ):
    optimizer.build(sft.Config(warmup_steps=20), 5)
  with pytest.raises(ValueError, match=r"sft\.decay='sudden'"):
    sft.Config(decay='sudden')
  with pytest.raises(ValueError, match=r'sft\.learning_rate=-1'):
    sft.Config(learning_rate=-1)
