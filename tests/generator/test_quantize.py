"""Int8 matrices: hand-computed numbers, and the same model around them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.generator.quantize import Packing, drift_by_layer
from rl_jax.models import base
from rl_jax.models.attention import segment_attention
from rl_jax.models.layers import Packed, product, quantized
from rl_jax.types import TrainBatch


def test_values_and_scales_by_hand():
  x = jnp.array([[1.0, -127.0], [63.6, 0.4], [0.0, 0.0]])
  values, scale = quantized(x, (1,))
  np.testing.assert_array_equal(values, [[1, -127], [127, 1], [0, 0]])
  np.testing.assert_allclose(scale, [[1.0], [63.6 / 127], [0.0]], rtol=1e-6)


def test_a_product_by_hand():
  # Tokens of scale 1 and 0.5; channels of scale 2 and 1; all of it exact.
  x = jnp.array([[127.0, 3.0], [63.5, -1.0]])
  values = jnp.array([[1, 127], [2, -127]], jnp.int8)
  weight = Packed(values, jnp.array([2.0, 1.0]), 1)
  found = product('TD,DF->TF', x, weight)
  expected = [[2 * (127 + 381), 254 - 381], [2 * (63.5 - 127), 127 + 127]]
  np.testing.assert_array_equal(found, expected)


PRODUCTS = {  # leaf: equation, shapes of tokens and of the learner's array
  ('attention', 'q'): ('BTD,DNH->BTNH', (2, 3, 64), (64, 4, 8)),
  ('attention', 'out'): ('BTAH,AHD->BTD', (2, 3, 4, 8), (4, 8, 16)),
  ('ffn', 'down'): ('BTF,FD->BTD', (2, 3, 64), (64, 8)),
  ('head',): ('BTD,VD->BTV', (2, 3, 64), (32, 64)),
}


def _at(path, leaf):
  for key in reversed(path):
    leaf = {key: leaf}
  return leaf


@pytest.mark.parametrize('path', PRODUCTS)
@pytest.mark.parametrize('tokens', [1, 30])  # few tokens, and more
@pytest.mark.parametrize('weight_format', ['dtype', 'int8'])
def test_a_packed_product_is_that_of_the_learner(path, tokens, weight_format):
  equation, x_shape, shape = PRODUCTS[path]
  rng = np.random.default_rng(0)
  x_shape = (x_shape[0], tokens * x_shape[1], *x_shape[2:])
  x = jnp.asarray(rng.standard_normal(x_shape), jnp.float32)
  weight = jnp.asarray(rng.standard_normal(shape), jnp.float32)
  expected = jnp.einsum(equation, x, weight)
  (packed,) = jax.tree.leaves(
    Packing(weight_format).pack(_at(path, weight)),
    is_leaf=lambda x: isinstance(x, Packed),
  )
  found = jax.jit(lambda x, w: product(equation, x, w))(x, packed)
  assert found.shape == expected.shape
  error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
  if weight_format == 'dtype':
    assert error < 1e-6
  else:
    assert 1e-4 < error < 0.02  # int8 indeed, and no worse than int8


def test_a_product_has_the_dtype_that_it_is_asked_for():
  x, weight = jnp.ones((1, 1, 4), jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)
  for weight_format in ('dtype', 'int8'):
    packed = Packing(weight_format).pack({'head': weight})['head']
    assert product('BTD,VD->BTV', x, packed).dtype == jnp.bfloat16
    asked = product(
      'BTD,VD->BTV', x, packed, preferred_element_type=jnp.float32
    )
    assert asked.dtype == jnp.float32


def test_zeros_stay_zeros_and_what_is_not_finite_shows():
  head = lambda x: Packing('int8').pack({'head': x})['head']  # noqa: E731
  zeros, ones = head(jnp.zeros((2, 4))), head(jnp.ones((2, 4)))
  x = jnp.ones((1, 1, 4))
  times = lambda x, w: product('BTD,VD->BTV', x, w)[0]  # noqa: E731
  np.testing.assert_array_equal(times(x, zeros), [[0.0, 0.0]])
  np.testing.assert_array_equal(times(0 * x, ones), [[0.0, 0.0]])
  for bad in (jnp.nan, jnp.inf):
    assert not jnp.isfinite(times(x.at[0, 0, 1].set(bad), ones)).any()


MODEL = base.Model(base.ModelConfig(tie_embeddings=False, vocab_size=64))


@pytest.mark.parametrize('weight_format', ['dtype', 'int8'])
def test_every_matrix_is_packed_and_nothing_else(weight_format):
  params = MODEL.init(jax.random.key(0))
  layer = base.unroll(params)['blocks'][0]
  matrices = {
    'attention': ['k', 'out', 'q', 'v'],
    'ffn': ['down', 'gate', 'up'],
  }
  found = Packing(weight_format).pack(layer)
  for name, expected in matrices.items():
    assert sorted(found[name]) == expected
    assert all(isinstance(x, Packed) for x in found[name].values())
  assert found['attention_norm'] is layer['attention_norm']
  stem = Packing(weight_format).pack(params['stem'])
  assert isinstance(stem['embed'], Packed)
  assert isinstance(stem['head'], Packed)
  assert stem['final_norm'] is params['stem']['final_norm']
  dtype = {'dtype': jnp.float32, 'int8': jnp.int8}[weight_format]
  assert stem['head'].values.dtype == dtype


def test_the_scale_of_each_channel_serves_that_channel_only():
  """One huge output channel does not coarsen the others."""
  params = base.unroll(MODEL.init(jax.random.key(0)))
  layer = params['blocks'][0]
  layer['ffn']['up'] = layer['ffn']['up'].at[:, 3].mul(1e4)
  up = Packing('int8').pack(layer)['ffn']['up']
  back = (up.values * up.scale[:, None]).T
  rest = np.delete(np.arange(layer['ffn']['up'].shape[1]), 3)
  error = np.abs(back - layer['ffn']['up'])[:, rest]
  assert error.max() <= 0.5 * np.abs(layer['ffn']['up'][:, rest]).max() / 127


@pytest.mark.parametrize('weight_format', ['dtype', 'int8'])
def test_the_same_model_runs_on_packed_parameters(weight_format):
  params = MODEL.init(jax.random.key(1))
  stacked = {
    'stem': Packing(weight_format).pack(params['stem']),
    'blocks': Packing(weight_format).pack(params['blocks'], stacked=True),
  }
  tokens = jax.random.randint(jax.random.key(2), (2, 16), 0, 64)
  positions = jnp.broadcast_to(jnp.arange(16), (2, 16))

  @jax.jit
  def logprobs(params):
    attend = segment_attention(jnp.ones_like(tokens))
    hidden, _ = MODEL.hidden(params, tokens, positions, attend)
    return jax.nn.log_softmax(MODEL.logits(params, hidden))

  gap = jnp.abs(logprobs(stacked) - logprobs(params)).max()
  if weight_format == 'dtype':
    assert gap < 1e-5
  else:
    assert 1e-4 < gap < 0.15
  np.testing.assert_allclose(
    logprobs(base.unroll(stacked)), logprobs(stacked), atol=1e-5
  )


def test_a_scale_is_sharded_as_its_channels():
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ('data', 'tensor'))
  named = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
  tree = {
    'attention': {
      'q': named(None, 'tensor', None),
      'out': named('tensor', None, None),
    }
  }
  attention = Packing('int8').shardings(tree)['attention']
  assert attention['q'].values.spec == PartitionSpec('tensor', None, None)
  assert attention['q'].scale.spec == PartitionSpec('tensor', None)
  assert attention['out'].values.spec == PartitionSpec(None, 'tensor', None)
  assert attention['out'].scale.spec == PartitionSpec(None)


@pytest.mark.slow
def test_the_drift_of_a_layer_is_that_of_what_it_attends_to():
  """Only the second layer's matrices are cut to three values."""
  params = MODEL.init(jax.random.key(1))
  rows = np.random.default_rng(0).integers(0, 64, (2, 16)).astype(np.int32)
  segments = np.ones((2, 16), np.int32)
  segments[1, 9:] = 0
  zeros = np.zeros((2, 16), np.float32)
  positions = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))
  batch = TrainBatch(
    rows,
    segments,
    positions,
    *(zeros,) * (len(dataclasses.fields(TrainBatch)) - 3),
  )
  drift = lambda packing, params: np.asarray(  # noqa: E731
    drift_by_layer(
      MODEL, params, packing, 'float32', jax.tree.map(jnp.asarray, batch)
    )
  )
  assert drift(Packing(), params).max() < 1e-6
  found = drift(Packing('int8'), params)
  assert found.shape == (MODEL.config.num_layers,)
  assert (found > 1e-4).all() and (found < 0.1).all()

  class Coarse(Packing):
    """Three values in the last layer, exact elsewhere."""

    def pack(self, tree, stacked=False):
      if not stacked:
        return tree
      cut = lambda x: x.at[-1].set(jnp.sign(x[-1]) * jnp.abs(x[-1]).mean())  # noqa: E731
      return jax.tree.map(cut, tree)

  found = drift(Coarse(), params)
  assert found[:-1].max() < 1e-6 and found[-1] > 0.1
