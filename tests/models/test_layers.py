import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rl_jax.models import layers


def test_rms_norm_by_hand():
  x = jnp.array([[3.0, 4.0]])  # mean square 12.5
  out = layers.rms_norm(x, jnp.array([1.0, 2.0]), eps=0.0)
  np.testing.assert_allclose(
    out, [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]], rtol=1e-6
  )


def test_rms_norm_adds_eps_to_the_mean_square():
  out = layers.rms_norm(jnp.array([[1.0, 1.0]]), jnp.ones(2), eps=3.0)
  np.testing.assert_allclose(out, [[0.5, 0.5]], rtol=1e-6)


def test_rms_norm_computes_in_float32():
  # 300^2 overflows float16 and the mean of 1000 bfloat16 squares is coarse.
  x = jnp.full((1, 1000), 300.0, jnp.float16)
  out = layers.rms_norm(x, jnp.ones(1000, jnp.float16), eps=1e-5)
  assert out.dtype == jnp.float16
  np.testing.assert_array_equal(out, np.ones((1, 1000)))


def test_rope_rotates_halves_by_position_times_frequency():
  frequencies = layers.rope_frequencies(4, 100.0, ())
  np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)
  tables = layers.rope_tables(jnp.array([[0, 2]]), frequencies)
  x = jnp.array([1.0, 0.0, 0.0, 1.0])  # pairs (1, 0) and (0, 1)
  out = layers.apply_rope(jnp.tile(x, (1, 2, 1, 1)), tables)
  np.testing.assert_array_equal(out[0, 0, 0], x)
  turned = [math.cos(2.0), -math.sin(0.2), math.sin(2.0), math.cos(0.2)]
  np.testing.assert_allclose(out[0, 1, 0], turned, rtol=1e-6)


def test_rope_scores_depend_on_distance_only():
  frequencies = layers.rope_frequencies(16, 10000.0, ())
  values = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16))
  q, k = jnp.asarray(values, jnp.float32)

  def score(query_position, key_position):
    def turn(x, position):
      tables = layers.rope_tables(jnp.array([[position]]), frequencies)
      return layers.apply_rope(x, tables)

    return jnp.sum(turn(q, query_position) * turn(k, key_position))

  np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
  assert abs(score(7, 3) - score(7, 4)) > 1e-3


@pytest.mark.parametrize(
  ('head_dim', 'theta', 'scaling'),
  [
    (128, 500000.0, (8.0, 1.0, 4.0, 8192.0)),  # Llama 3.1
    (64, 500000.0, (32.0, 1.0, 4.0, 8192.0)),  # Llama 3.2
  ],
)
def test_llama3_scaling_is_the_published_piecewise_formula(
  head_dim, theta, scaling
):
  factor, low, high, original = scaling
  expected, kinds = [], set()
  for i in range(head_dim // 2):
    frequency = theta ** (-2 * i / head_dim)
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
      kinds.add('kept')
    elif wavelength > original / low:
      kinds.add('slowed')
      frequency /= factor
    else:
      kinds.add('blended')
      smooth = (original / wavelength - low) / (high - low)
      frequency = (1 - smooth) * frequency / factor + smooth * frequency
    expected.append(frequency)
  assert kinds == {'kept', 'slowed', 'blended'}
  actual = layers.rope_frequencies(head_dim, theta, scaling)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_swiglu_by_hand():
  ffn = layers.SwiGLU(nnx.Rngs(params=0), num_layers=1, dim=1, ffn=2)
  weights = {
    'gate': jnp.array([[1.0, -1.0]]),
    'up': jnp.array([[2.0, 3.0]]),
    'down': jnp.array([[1.0], [10.0]]),
  }
  ffn = nnx.merge(nnx.split(ffn)[0], nnx.State(weights))  # of one layer
  sigmoid = 1 / (1 + math.exp(-2.0))
  # x = 2: silu(2) * 4 * 1 + silu(-2) * 6 * 10
  expected = 2 * sigmoid * 4 - 2 * (1 - sigmoid) * 60
  out = ffn(jnp.full((1, 1, 1), 2.0))
  np.testing.assert_allclose(out, [[[expected]]], rtol=1e-5)


def test_param_variance_is_one_over_fan_in():
  rngs = nnx.Rngs(params=0)
  value = layers.param(rngs, (400, 100), ('a', 'b'), fan_in=400)[...]
  assert value.dtype == jnp.float32
  assert abs(float(value.std()) * 20 - 1) < 0.02
  filled = layers.param(rngs, (3,), ('a',), fill=1.0)
  np.testing.assert_array_equal(filled[...], [1, 1, 1])
