"""Learning rates, clipping and decay against numbers computed by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_jax.learner import optimizer


def _rates(num_steps, **keys):
  config = optimizer.Config(**keys)
  rate = optimizer.schedule(config, num_steps)
  return [float(rate(i)) for i in range(num_steps)]


@pytest.mark.parametrize(
  ('keys', 'expected'),
  [
    ({}, [1, 1, 1, 1, 1, 1]),
    ({'warmup_steps': 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    ({'warmup_steps': 1}, [1, 1, 1, 1, 1, 1]),
    ({'decay': 'linear'}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    (
      {'decay': 'linear', 'final_fraction': 0.4},
      [1, 0.9, 0.8, 0.7, 0.6, 0.5],
    ),
    (
      {'decay': 'linear', 'warmup_steps': 2},
      [0.5, 1, 1, 0.75, 0.5, 0.25],
    ),
    (
      # (1 + cos(pi i / 6)) / 2
      {'decay': 'cosine'},
      [1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873],
    ),
    (
      # 0.2 + 0.8 (1 + cos(pi i / 4)) / 2 after the warm-up
      {'decay': 'cosine', 'warmup_steps': 2, 'final_fraction': 0.2},
      [0.5, 1, 1, 0.8828427, 0.6, 0.3171573],
    ),
  ],
)
def test_learning_rates_of_six_steps(keys, expected):
  found = _rates(6, learning_rate=1e-2, **keys)
  np.testing.assert_allclose(found, np.array(expected) * 1e-2, rtol=1e-5)


def test_the_peak_is_never_exceeded_and_the_first_step_moves():
  for decay in ('constant', 'linear', 'cosine'):
    for warmup in range(5):
      rates = _rates(5, learning_rate=1.0, decay=decay, warmup_steps=warmup)
      assert 0 < rates[0] <= 1
      assert max(rates) == 1


def test_a_warm_up_that_never_ends_is_an_error():
  message = r'optimizer\.warmup_steps=5: must be < the 5 .*raise num_steps'
  with pytest.raises(ValueError, match=message):
    optimizer.schedule(optimizer.Config(warmup_steps=5), 5)


@pytest.mark.parametrize(
  ('keys', 'message'),
  [
    ({'decay': 'step'}, "decay='step': must be constant, linear or cosine"),
    ({'learning_rate': 0.0}, r'optimizer\.learning_rate=0\.0: must be > 0'),
    ({'learning_rate': float('nan')}, 'learning_rate=nan: must be > 0'),
    ({'learning_rate': float('inf')}, 'learning_rate=inf: must be > 0'),
    ({'warmup_steps': -1}, 'warmup_steps=-1: must be >= 0'),
    ({'final_fraction': 1.1}, r'final_fraction=1\.1: must be in \[0, 1\]'),
    ({'final_fraction': -0.1}, r'final_fraction=-0\.1: must be in \[0, 1\]'),
    ({'b1': 1.0}, r'b1=1\.0: must be in \[0, 1\)'),
    ({'b2': float('nan')}, r'b2=nan: must be in \[0, 1\)'),
    ({'eps': 0.0}, r'eps=0\.0: must be > 0'),
    ({'weight_decay': -1.0}, r'weight_decay=-1\.0: must be >= 0'),
    ({'max_grad_norm': -1.0}, r'max_grad_norm=-1\.0: must be >= 0'),
    ({'max_grad_norm': float('nan')}, 'max_grad_norm=nan: must be >= 0'),
  ],
)
def test_illegal_settings_say_what_is_legal(keys, message):
  with pytest.raises(ValueError, match=message):
    optimizer.Config(**keys)


# ---- updates

PARAMS = {
  'stem': {'embed': np.ones((2, 2), np.float32), 'final_norm': np.ones(2)},
  'blocks': {
    'attention': {
      'q': np.ones((1, 2), np.float32),
      'q_bias': np.ones((1, 2)),
      'q_norm': np.ones((1, 2)),
    },
    'ffn_norm': np.ones((1, 2)),
  },
}
PARAMS = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)


@functools.cache
def _step(config):
  build = optimizer.build(config, num_steps=10)

  def step(grads, state):
    return build.update(grads, state, PARAMS)

  return build, jax.jit(step)


def _updates(config, grads):
  build, step = _step(config)
  return step(grads, build.init(PARAMS))


def _grads(value):
  return jax.tree.map(lambda x: jnp.full(x.shape, value), PARAMS)


def test_matrices_decay_and_norms_and_biases_do_not():
  config = optimizer.Config(learning_rate=0.1, weight_decay=0.5)
  updates, _ = _updates(config, _grads(0.0))
  found = jax.tree_util.tree_map_with_path(
    lambda path, x: (path[-1].key, float(x.ravel()[0])), updates
  )
  decayed = dict(jax.tree.leaves(found, is_leaf=lambda x: type(x) is tuple))
  assert decayed == pytest.approx(
    {
      'embed': -0.05,  # 0.1 * 0.5 * 1
      'q': -0.05,
      'final_norm': 0,
      'q_bias': 0,
      'q_norm': 0,
      'ffn_norm': 0,
    }
  )


def test_gradients_are_clipped_by_their_global_norm():
  # 14 entries of 2: norm 2 sqrt(14) = 7.48.
  num = sum(x.size for x in jax.tree.leaves(PARAMS))
  assert num == 14
  for limit, expected in ((0.5, 0.5 / 14**0.5), (100.0, 2.0), (0.0, 2.0)):
    config = optimizer.Config(max_grad_norm=limit, b1=0.5)
    _, state = _updates(config, _grads(2.0))
    first_moment = optax.tree.get(state, 'mu')
    for leaf in jax.tree.leaves(first_moment):
      np.testing.assert_allclose(leaf, 0.5 * expected, rtol=1e-6)


def test_the_first_adam_step_by_hand():
  # Unbiased moments are g and g^2: -lr * g / (|g| + eps).
  config = optimizer.Config(learning_rate=0.1, eps=1.0, max_grad_norm=0.0)
  updates, _ = _updates(config, _grads(3.0))
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_allclose(leaf, -0.1 * 3 / 4, rtol=1e-5)


def test_the_schedule_follows_the_number_of_updates():
  config = optimizer.Config(
    learning_rate=0.1, warmup_steps=2, decay='linear', eps=1e-12
  )
  build, step = _step(config)
  state, sizes = build.init(PARAMS), []
  for _ in range(4):
    updates, state = step(_grads(0.01), state)
    sizes.append(-float(updates['stem']['embed'][0, 0]))
  # Constant gradients: Adam's step is the learning rate.
  np.testing.assert_allclose(sizes, [0.05, 0.1, 0.1, 0.0875], rtol=1e-4)
