"""Int8 matrices: hand-computed numbers, and the same model around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.generator import quantize
from rl_jax.models import base
from rl_jax.models.attention import segment_attention
from rl_jax.models.layers import Quantized, product, quantized


def test_values_and_scales_by_hand():
  x = jnp.array([[1.0, -127.0], [63.6, 0.4], [0.0, 0.0]])
  values, scale = quantized(x, (1,))
  np.testing.assert_array_equal(values, [[1, -127], [127, 1], [0, 0]])
  np.testing.assert_allclose(scale, [[1.0], [63.6 / 127], [0.0]], rtol=1e-6)


def test_a_product_by_hand():
  # Tokens of scale 1 and 0.5; channels of scale 2 and 1; all of it exact.
  x = jnp.array([[127.0, 3.0], [63.5, -1.0]])
  weight = Quantized(
    jnp.array([[1, 2], [127, -127]], jnp.int8), jnp.array([[2.0, 1.0]])
  )
  found = product('TD,DF->TF', x, weight)
  expected = [[2 * (127 + 381), 254 - 381], [2 * (63.5 - 127), 127 + 127]]
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  ('equation', 'x_shape', 'shape', 'axes'),
  [
    ('BTD,DNH->BTNH', (2, 3, 64), (64, 4, 8), (0,)),
    ('BTNH,NHD->BTD', (2, 3, 4, 8), (4, 8, 16), (0, 1)),
    ('BTF,FD->BTD', (2, 3, 64), (64, 8), (0,)),
    ('BTD,VD->BTV', (2, 3, 64), (32, 64), (1,)),
  ],
)
def test_a_product_is_close_to_that_of_floats(equation, x_shape, shape, axes):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal(x_shape), jnp.float32)
  weight = jnp.asarray(rng.standard_normal(shape), jnp.float32)
  expected = jnp.einsum(equation, x, weight)
  found = product(equation, x, Quantized(*quantized(weight, axes)))
  error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
  assert 1e-4 < error < 0.02  # int8 indeed, and no worse than int8


def test_zeros_stay_zeros_and_what_is_not_finite_shows():
  zeros = Quantized(*quantized(jnp.zeros((4, 2)), (0,)))
  x = jnp.ones((1, 4))
  np.testing.assert_array_equal(product('TD,DF->TF', x, zeros), [[0.0, 0.0]])
  ones = Quantized(*quantized(jnp.ones((4, 2)), (0,)))
  empty = product('TD,DF->TF', 0 * x, ones)
  np.testing.assert_array_equal(empty, [[0.0, 0.0]])
  for bad in (jnp.nan, jnp.inf):
    found = product('TD,DF->TF', x.at[0, 1].set(bad), ones)
    assert not jnp.isfinite(found).any()


MODEL = base.Model(base.ModelConfig(tie_embeddings=False, vocab_size=64))


def test_every_matrix_is_quantised_and_nothing_else():
  params = MODEL.init(jax.random.key(0))
  layer = base.unroll(params)['blocks'][0]
  found = quantize.weights(layer, 'int8')
  assert {
    k: isinstance(v, Quantized) for k, v in found['attention'].items()
  } == {
    'q': True,
    'k': True,
    'v': True,
    'out': True,
  }
  assert {k: isinstance(v, Quantized) for k, v in found['ffn'].items()} == {
    'gate': True,
    'up': True,
    'down': True,
  }
  assert found['attention_norm'] is layer['attention_norm']
  stem = quantize.weights(params['stem'], 'int8')
  assert isinstance(stem['embed'], Quantized)
  assert isinstance(stem['head'], Quantized)
  assert stem['final_norm'] is params['stem']['final_norm']
  assert quantize.weights(layer, 'dtype')['ffn'] == layer['ffn']


def test_the_scale_of_each_channel_serves_that_channel_only():
  """One huge output channel does not coarsen the others."""
  params = base.unroll(MODEL.init(jax.random.key(0)))
  layer = params['blocks'][0]
  layer['ffn']['up'] = layer['ffn']['up'].at[:, 3].mul(1e4)
  up = quantize.weights(layer, 'int8')['ffn']['up']
  back = up.values * up.scale
  rest = np.delete(np.arange(layer['ffn']['up'].shape[1]), 3)
  error = np.abs(back - layer['ffn']['up'])[:, rest]
  assert error.max() <= 0.5 * np.abs(layer['ffn']['up'][:, rest]).max() / 127


def test_the_same_model_runs_on_quantised_parameters():
  params = MODEL.init(jax.random.key(1))
  int8 = {
    'stem': quantize.weights(params['stem'], 'int8'),
    'blocks': quantize.weights(params['blocks'], 'int8', stacked=True),
  }
  tokens = jax.random.randint(jax.random.key(2), (2, 16), 0, 64)
  positions = jnp.broadcast_to(jnp.arange(16), (2, 16))

  def logprobs(params):
    attend = segment_attention(jnp.ones_like(tokens))
    hidden, _ = MODEL.hidden(params, tokens, positions, attend)
    return jax.nn.log_softmax(MODEL.logits(params, hidden))

  gap = jnp.abs(logprobs(int8) - logprobs(params))
  assert 1e-4 < gap.max() < 0.15
  unrolled = logprobs(
    base.unroll({'stem': int8['stem'], 'blocks': int8['blocks']})
  )
  np.testing.assert_allclose(unrolled, logprobs(int8), atol=1e-5)


def test_a_scale_is_sharded_as_its_channels():
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ('data', 'tensor'))
  named = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
  tree = {
    'attention': {
      'q': named(None, 'tensor', None),
      'out': named('tensor', None, None),
    }
  }
  attention = quantize.shardings(tree, 'int8')['attention']
  assert attention['q'].scale.spec == PartitionSpec(None, 'tensor', None)
  assert attention['out'].scale.spec == PartitionSpec(None, None, None)
  assert attention['out'].values == named('tensor', None, None)
