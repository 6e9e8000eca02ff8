import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rl_jax import meshes
from rl_jax.models import base
from rl_jax.models.attention import segment_attention

TINY = base.ModelConfig(vocab_size=64, d_model=32, head_dim=8, d_ffn=48)
CONFIGS = {  # between them, every switch is on and off
  'llama3': dataclasses.replace(
    TINY, rope_scaling=(8.0, 1.0, 4.0, 64.0), tie_embeddings=False
  ),
  'qwen': dataclasses.replace(
    TINY, attention_bias=True, qk_norm=True, head_dim=16
  ),
}


@pytest.fixture(params=CONFIGS)
def model(request):
  return MODELS[request.param]


MODELS = {name: base.Model(config) for name, config in CONFIGS.items()}


@functools.cache
def _params(model):
  """Random parameters; norms and biases too. (`init` is slow to compile.)"""
  rng = np.random.default_rng(0)

  def one(path, spec):
    values = 0.2 * rng.standard_normal(spec.shape)
    return jnp.asarray(values + ('norm' in path[-1].key), jnp.float32)

  return jax.tree_util.tree_map_with_path(one, model.specs())


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens, positions, segments):
  attend = segment_attention(segments)
  hidden, caches = model.hidden(params, tokens, positions, attend)
  return model.logits(params, hidden), hidden, caches


def _outputs(model, params, tokens, positions=None, segments=None):
  tokens = np.asarray(tokens, np.int32)
  if positions is None:
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  if segments is None:
    segments = np.ones_like(tokens)
  return _forward(
    model, params, tokens, np.asarray(positions), np.asarray(segments)
  )


def _logits(*args, **kwargs):
  return _outputs(*args, **kwargs)[0]


TOKENS = np.random.default_rng(0).integers(0, 64, (2, 11))


def test_packed_rows_equal_separate_sequences(model):
  params = _params(model)
  packed = _logits(
    model,
    params,
    [
      [*TOKENS[0, :5], *TOKENS[1, :4], 0, 0],
      [*TOKENS[1, :5], 0, 0, 0, 0, 0, 0],
    ],
    positions=[[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0], range(11)],
    segments=[[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 5 + [0] * 6],
  )
  alone = _logits(model, params, TOKENS)  # causal: the rest does not matter
  np.testing.assert_allclose(packed[0, :5], alone[0, :5], atol=1e-5)
  np.testing.assert_allclose(packed[0, 5:9], alone[1, :4], atol=1e-5)
  np.testing.assert_allclose(packed[1, :5], alone[1, :5], atol=1e-5)
  assert jnp.isfinite(packed).all()


def test_unrolled_blocks_equal_stacked_ones(model):
  params = _params(model)
  unrolled = base.unroll(params)
  assert len(unrolled['blocks']) == 2
  logits, _, caches = _outputs(model, params, TOKENS)
  unrolled_logits, _, unrolled_caches = _outputs(model, unrolled, TOKENS)
  assert (caches, unrolled_caches) == (None, (None, None))
  np.testing.assert_allclose(unrolled_logits, logits, atol=1e-5)


def test_caches_go_through_layer_by_layer():
  plain = segment_attention(jnp.ones(TOKENS.shape, jnp.int32))

  def attend(q, k, v, cache):
    return plain(q, k, v, None)[0], cache + 1

  @jax.jit
  def updated(params, caches):
    positions = jnp.broadcast_to(jnp.arange(11), TOKENS.shape)
    tokens = jnp.asarray(TOKENS)
    return MODELS['llama3'].hidden(params, tokens, positions, attend, caches)[1]

  params = _params(MODELS['llama3'])
  stacked = updated(params, jnp.array([10, 20]))
  np.testing.assert_array_equal(stacked, [11, 21])
  assert updated(base.unroll(params), (10, 20)) == (11, 21)


def test_later_tokens_do_not_change_earlier_logits(model):
  params = _params(model)
  changed = TOKENS.copy()
  changed[:, 7] = (changed[:, 7] + 1) % 64
  before = _logits(model, params, TOKENS)
  after = _logits(model, params, changed)
  np.testing.assert_array_equal(after[:, :7], before[:, :7])
  assert (after[:, 7:] != before[:, 7:]).any(axis=-1).all()


@pytest.mark.slow
def test_every_parameter_has_an_effect(model):
  params = _params(model)

  def loss(params):
    return jnp.sum(_logits(model, params, TOKENS) ** 2)

  gradients = jax.jit(jax.grad(loss))(params)
  for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    assert float(jnp.abs(gradient).max()) > 1e-3, path


@pytest.mark.slow
def test_remat_changes_no_gradient():
  positions = jnp.broadcast_to(jnp.arange(11), TOKENS.shape)
  attend = segment_attention(jnp.ones(TOKENS.shape, jnp.int32))

  def loss(params, remat):
    hidden, _ = MODELS['llama3'].hidden(
      params, jnp.asarray(TOKENS), positions, attend, remat=remat
    )
    return jnp.sum(MODELS['llama3'].logits(params, hidden) ** 2)

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  params = _params(MODELS['llama3'])
  for a, b in zip(
    jax.tree.leaves(gradient(params, False)),
    jax.tree.leaves(gradient(params, True)),
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_bfloat16_parameters_give_bfloat16_hidden_and_float32_logits(model):
  params = _params(model)
  exact = _logits(model, params, TOKENS)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  logits, hidden, _ = _outputs(model, half, TOKENS)
  assert hidden.dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, exact, atol=0.3)
  assert np.abs(logits - exact).mean() < 0.05


def test_the_head_is_the_embedding_exactly_if_tied():
  tied, untied = MODELS['qwen'], MODELS['llama3']
  assert 'head' not in tied.specs()['stem']
  hidden = np.random.default_rng(0).normal(size=(1, 3, 32))
  hidden = jnp.asarray(hidden, jnp.float32)
  for model, name in ((tied, 'embed'), (untied, 'head')):
    params = _params(model)
    np.testing.assert_allclose(
      model.logits(params, hidden)[0],
      hidden[0] @ params['stem'][name].T,
      rtol=1e-4,
      atol=1e-5,
    )


@pytest.mark.slow
def test_init_starts_norms_at_one_biases_at_zero_and_weights_at_random():
  params = MODELS['qwen'].init(jax.random.key(0))

  def check(path, value):
    name = path[-1].key
    if 'norm' in name:
      np.testing.assert_array_equal(value, 1)
    elif 'bias' in name:
      np.testing.assert_array_equal(value, 0)
    else:
      assert value.dtype == jnp.float32
      assert 0.5 < float(value.std()) * np.sqrt(FAN_IN[name]) < 1.5, name

  jax.tree_util.tree_map_with_path(check, params)
  q = params['blocks']['attention']['q']
  assert (q[0] != q[1]).any()  # layers differ


FAN_IN = dict.fromkeys(('embed', 'q', 'k', 'v', 'out', 'gate', 'up'), 32)
FAN_IN['down'] = 48


def test_specs_have_the_shape_and_known_axes_of_every_parameter(model):
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert jax.tree.structure(params) == jax.tree.structure(model.specs())

  def check(path, value, spec):
    assert value.shape == spec.shape, path
    assert len(spec.axes) == value.ndim, path
    assert set(spec.axes) <= set(meshes.TRAINING_RULES), path
    stacked = path[0].key == 'blocks'
    assert (spec.axes[0] == 'layers') == stacked, path

  jax.tree_util.tree_map_with_path(check, params, model.specs())


def test_logits_do_not_depend_on_the_mesh(model):
  params = _params(model)
  expected = _logits(model, params, TOKENS)
  mesh = Mesh(
    np.array(jax.devices()).reshape(2, 2, 2), ('data', 'fsdp', 'tensor')
  )
  shardings = meshes.shardings(mesh, model.specs(), meshes.TRAINING_RULES)
  placed = jax.device_put(params, shardings)
  logits = _logits(model, placed, TOKENS)
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_program_does_not_grow_with_depth():
  def num_lines(num_layers):
    model = base.Model(dataclasses.replace(TINY, num_layers=num_layers))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    step = jax.grad(lambda p: _logits(model, p, TOKENS).sum())
    return len(jax.jit(step).lower(shapes).as_text().splitlines())

  assert num_lines(8) == num_lines(2)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'num_layers': 0}, 'model.architecture.num_layers=0: must be >= 1'),
    ({'num_kv_heads': 3}, 'num_heads=4 must be a multiple of .*=3'),
    ({'head_dim': 7}, 'model.architecture.head_dim=7'),
    ({'head_dim': 0}, 'model.architecture.head_dim=0: must be >= 2'),
    (
      {'rope_theta': float('nan')},
      'model.architecture.rope_theta=nan: must be > 0',
    ),
    ({'rope_theta': 0.0}, 'model.architecture.rope_theta=0.0: must be > 0'),
    (
      {'rope_scaling': (1,)},
      r'model.architecture.rope_scaling=\(1,\): must be',
    ),
    ({'rope_scaling': (8.0, 1, 4, 'x')}, 'model.architecture.rope_scaling='),
    ({'rope_scaling': (8.0, 4, 4, 10)}, 'low < high'),
    (
      {'norm_eps': float('inf')},
      'model.architecture.norm_eps=inf: must be > 0',
    ),
    ({'max_positions': -1}, 'model.architecture.max_positions=-1: must be > 0'),
  ],
)
def test_illegal_sizes_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(TINY, **change)
