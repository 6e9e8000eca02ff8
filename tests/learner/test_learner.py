"""The update does not depend on how a batch is cut, laid out or sharded."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from rl_jax.algorithms import base as algorithms
from rl_jax.algorithms import grpo
from rl_jax.learner import optimizer
from rl_jax.learner.learner import Config, Learner, NonFinite
from rl_jax.models import base
from rl_jax.models.attention import segment_attention
from rl_jax.rollout.packing import Item, pack
from rl_jax.types import TrainBatch

V = 64
ROW = 32
MODEL = base.Model(
  base.ModelConfig(
    vocab_size=V, d_model=32, num_heads=8, num_kv_heads=4, head_dim=4, d_ffn=48
  )
)
TEMPERATURE = 0.8
KL = grpo.Config(kl_coef=0.1)
# Without clipping the first moment is (1 - b1) times the gradient; a large
# eps keeps Adam from turning rounding of small gradients into whole steps.
OPTIMIZER = optimizer.Config(learning_rate=1e-2, eps=1e-3, max_grad_norm=0.0)


def _numbers(seed):
  rng = np.random.default_rng(seed)

  def one(path, spec):
    values = 0.1 * rng.standard_normal(spec.shape)
    return (values + ('norm' in path[-1].key)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(one, MODEL.specs())


PARAMS, OTHER = _numbers(0), _numbers(1)


@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  """Compiling is what takes time here: half of it goes without passes."""
  name = 'jax_disable_most_optimizations'
  jax.config.update(name, True)
  yield
  jax.config.update(name, False)


def _mesh(data, fsdp, tensor):
  devices = np.array(jax.devices()[: data * fsdp * tensor])
  return Mesh(devices.reshape(data, fsdp, tensor), ('data', 'fsdp', 'tensor'))


def _learner(sizes=(1, 1, 1), rows=2, loss_config=KL, dtype='float32'):
  """The one with these programs: every default spelt out is the same key."""
  return _built(sizes, rows, loss_config, dtype)


@functools.cache
def _built(sizes, rows, loss_config, dtype):
  learner = Learner(
    MODEL,
    _mesh(*sizes),
    Config(
      row_tokens=ROW,
      rows_per_microbatch=rows,
      logprob_chunk=8,
      compute_dtype=dtype,
    ),
    optimizer.build(OPTIMIZER, num_steps=10),
    algorithms.bind(grpo, loss_config),
    temperature=TEMPERATURE,
  )
  learner.set_reference(jax.device_put(OTHER, learner.param_shardings))
  return learner


def _state(learner, params=PARAMS):
  return learner.init_state(jax.device_put(params, learner.param_shardings))


def _items(aggregation='token_mean', seed=0):
  """Eight ragged sequences: prompts of 1-6 tokens, completions of 1-9."""
  rng = np.random.default_rng(seed)
  prompts, lengths = [1, 6, 2, 3, 5, 1, 4, 2], [9, 1, 4, 7, 2, 8, 1, 6]
  config = algorithms.Config(aggregation=aggregation, constant=9.0)
  weights = algorithms.token_weights(lengths, config)
  items = []
  for prompt, length, weight in zip(prompts, lengths, weights):
    mask = np.repeat([0, 1], [prompt, length]).astype(np.float32)
    noise = rng.standard_normal(len(mask)).astype(np.float32)
    items.append(
      Item(
        tokens=rng.integers(0, V, len(mask)).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=mask * (0.3 * noise - 4.2),
        kept_logmass=np.zeros_like(mask),
        advantage=float(rng.standard_normal()),
        weight=float(weight),
      )
    )
  return items


def _joined(*batches):
  return TrainBatch(
    **{
      f.name: np.concatenate([getattr(b, f.name) for b in batches])
      for f in dataclasses.fields(TrainBatch)
    }
  )


def _empty(num_rows, row=ROW):
  padding = pack([_items()[0]], row)
  return jax.tree.map(lambda x: np.zeros((num_rows, row), x.dtype), padding)


def _packed(aggregation='token_mean'):
  return pack(_items(aggregation), ROW)


def _alone(aggregation='token_mean', row=ROW):
  """A sequence a row."""
  return _joined(*(pack([item], row) for item in _items(aggregation)))


def _result(learner, batch):
  """(loss, gradient, updated parameters), on the host."""
  state, metrics = learner.update(_state(learner), batch, step=0)
  gradient = jax.tree.map(
    lambda m: np.asarray(m) / (1 - OPTIMIZER.b1),
    optax.tree.get(state.opt_state, 'mu'),
  )
  return metrics['loss'], gradient, jax.device_get(state.params)


def _assert_close(found, expected, tolerance=1e-6):
  """Parameters relative to their norm, the rest to the size of its terms.

  Terms of either sign partly cancel in the loss and in the gradient, and
  float32 rounds relative to them: the absolute values of the loss's add to
  0.4 or more in this file, the norms of the 8 sequences' gradients to 2.2
  times the norm of their sum or more.
  """
  assert abs(found[0] - expected[0]) <= tolerance * 0.4, found[0] - expected[0]
  rest = zip(found[1:], expected[1:], (2.2, 1.0), strict=False)
  for one, other, terms in rest:
    scale = terms * optax.tree.norm(other)
    gap = optax.tree.norm(jax.tree.map(np.subtract, one, other))
    assert gap <= tolerance * scale, float(gap / scale)


@functools.cache
def _expected(aggregation):
  return _result(_learner(), _packed(aggregation))


# ---- against a plain loss


@jax.jit
def _plain_logprobs(params, tokens):
  """[B, T] of rows of one sequence each, from whole logits."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  attend = segment_attention(jnp.ones_like(tokens))
  hidden, _ = MODEL.hidden(params, tokens, positions, attend)
  logits = MODEL.logits(params, hidden) / TEMPERATURE
  full = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(full[:, :-1], tokens[:, 1:, None], -1)[..., 0]
  return jnp.pad(chosen, ((0, 0), (1, 0)))


@jax.jit
def _plain(params, reference, batch):
  def total(params):
    logprobs = _plain_logprobs(params, batch.tokens)
    ratio = jnp.exp(logprobs - batch.behavior_logprobs)
    gain = jnp.minimum(
      ratio * batch.advantages, jnp.clip(ratio, 0.8, 1.2) * batch.advantages
    )
    gap = _plain_logprobs(reference, batch.tokens) - logprobs
    token_loss = 0.1 * (jnp.exp(gap) - gap - 1) - gain
    return jnp.sum(
      jnp.where(batch.loss_mask > 0, token_loss, 0.0) * batch.loss_weights
    )

  return jax.value_and_grad(total)(params)


@pytest.mark.parametrize('aggregation', algorithms.AGGREGATIONS)
def test_loss_and_gradient_are_those_of_a_plain_loss(aggregation):
  # Every sequence alone in its row, all of the logits at once.
  loss, gradient = _plain(PARAMS, OTHER, _alone(aggregation))
  found = _expected(aggregation)
  _assert_close(found[:2], (float(loss), gradient), tolerance=2e-6)


# ---- invariance


@pytest.mark.parametrize('aggregation', algorithms.AGGREGATIONS)
@pytest.mark.parametrize('layout', ['alone', 'reversed', 'empty rows'])
def test_an_update_does_not_depend_on_packing_or_padding(layout, aggregation):
  batch = {
    'alone': lambda: _alone(aggregation),
    'reversed': lambda: pack(_items(aggregation)[::-1], ROW),
    'empty rows': lambda: _joined(_empty(3), _packed(aggregation), _empty(2)),
  }[layout]()
  _assert_close(_result(_learner(), batch), _expected(aggregation))


@pytest.mark.slow
@pytest.mark.parametrize('aggregation', algorithms.AGGREGATIONS)
def test_an_update_does_not_depend_on_the_length_of_a_row(aggregation):
  batch = _alone(aggregation, row=16)
  _assert_close(_result(_learner(), batch), _expected(aggregation))


CUTS = [  # mesh sizes, rows per micro-batch
  ((2, 2, 2), 4),
  *(
    pytest.param(sizes, rows, marks=pytest.mark.slow)
    for sizes, rows in [
      ((1, 1, 1), 1),
      ((1, 1, 1), 4),
      ((1, 1, 1), 8),
      ((2, 1, 1), 2),
      ((1, 2, 2), 2),
      ((8, 1, 1), 8),
      ((1, 8, 1), 8),
      ((2, 1, 4), 2),
    ]
  ),
]


@pytest.mark.parametrize(('sizes', 'rows'), CUTS)
def test_an_update_does_not_depend_on_micro_batches_or_mesh(sizes, rows):
  learner = _learner(sizes, rows)
  for aggregation in algorithms.AGGREGATIONS:
    expected = _expected(aggregation)
    _assert_close(_result(learner, _packed(aggregation)), expected)
    # Ragged over shards: most of them have one sequence, some have none.
    _assert_close(_result(learner, _alone(aggregation)), expected)


def test_shards_and_micro_batches_without_a_token_are_finite():
  learner = _learner((2, 2, 2), 4)
  one = pack(_items()[:1], ROW)
  expected = _result(_learner(), one)
  _assert_close(_result(learner, one), expected)  # three shards of padding
  _assert_close(_result(learner, _joined(_empty(5), one)), expected)


def test_a_batch_of_padding_changes_nothing():
  loss, gradient, params = _result(_learner(), _empty(3))
  assert loss == 0
  assert all((g == 0).all() for g in jax.tree.leaves(gradient))
  jax.tree.map(np.testing.assert_array_equal, params, PARAMS)


def test_two_runs_are_bitwise_equal():
  for learner in (_learner(), _learner((2, 2, 2), 4)):
    one, two = (_result(learner, _packed()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_nothing_recompiles_when_the_number_of_rows_changes():
  learner = _learner((2, 2, 2), 4)
  state = _state(learner)
  batches = [_packed(), _alone(), pack(_items()[:1], ROW), _empty(9)]
  for step, batch in enumerate(batches):
    state, _ = learner.update(state, batch, step)
  # The second micro-batch of the first step would be the usual culprit.
  assert learner._accumulate._cache_size() == 1
  assert learner._apply._cache_size() == 1


def test_gradients_cross_the_data_axis_once_a_step_not_once_a_micro_batch():
  learner = _learner((2, 1, 1), 2)
  state = _state(learner)
  micro = next(learner.microbatches(_packed()))
  sums = learner._zero_sums(state.params, micro)
  accumulate = learner._accumulate.lower(
    state.params, learner._reference, sums, micro
  )
  text = accumulate.compile().as_text()
  # What crosses is one number: how long the longest row is, to skip the rest.
  crossing = re.findall(r'= (.*) (?:all-|reduce-sc|collective-).*\(%', text)
  assert crossing and 'f32' not in ''.join(crossing)
  assert 'conditional(' in text  # chunks are still skipped, not masked
  text = learner._apply.lower(state, sums).compile().as_text()
  assert 'all-reduce(' in text


# ---- metrics


def test_means_are_over_all_tokens_and_maxima_are_maxima():
  learner, batch = _learner(), _alone()
  params = jax.device_put(PARAMS, learner.param_shardings)
  logprobs = learner.logprobs(params, batch)
  mask = batch.loss_mask > 0
  expected = np.where(mask, _plain_logprobs(PARAMS, batch.tokens), 0)
  np.testing.assert_allclose(logprobs, expected, atol=2e-5)
  ratio = np.exp(logprobs - batch.behavior_logprobs)[mask]
  # Wherever the extreme row is: first, in the middle, last micro-batch.
  for shift in range(0, 8, 2):
    rolled = jax.tree.map(
      functools.partial(np.roll, shift=shift, axis=0), batch
    )
    _, metrics = learner.update(_state(learner), rolled, step=0)
    assert metrics['tokens'] == mask.sum() == 38
    assert metrics['logprob'] == pytest.approx(logprobs[mask].mean(), rel=1e-5)
    assert metrics['logprob_max'] == pytest.approx(
      logprobs[mask].max(), rel=1e-5
    )
    assert metrics['ratio'] == pytest.approx(ratio.mean(), rel=1e-4)
    assert metrics['ratio_max'] == pytest.approx(ratio.max(), rel=1e-4)
    assert metrics['ratio_min'] == pytest.approx(ratio.min(), rel=1e-4)
    clipped = np.where(batch.advantages[mask] > 0, ratio > 1.2, ratio < 0.8)
    assert metrics['clip_fraction'] == pytest.approx(clipped.mean(), rel=1e-5)
  assert 0 < metrics['entropy'] < metrics['entropy_max'] < math.log(V)


def test_the_norm_of_the_gradient_is_reported_before_clipping():
  learner = _learner()
  _, metrics = learner.update(_state(learner), _packed(), step=0)
  expected = optax.tree.norm(_expected('token_mean')[1])
  assert metrics['grad_norm'] == pytest.approx(float(expected), rel=1e-5)


def test_a_loss_that_is_not_finite_names_the_step():
  learner, batch = _learner(), _packed()
  broken = dataclasses.replace(batch, advantages=batch.advantages * np.nan)
  with pytest.raises(NonFinite, match=r'step 7: loss=nan, grad_norm='):
    learner.update(_state(learner), broken, step=7)


def test_what_the_mask_hides_reaches_no_parameter():
  batch = _alone()
  hidden = batch.loss_mask == 0
  poison = {
    name: np.where(hidden, np.float32(np.nan), getattr(batch, name))
    for name in ('advantages', 'behavior_logprobs', 'kept_logmass')
  }
  found = _result(_learner(), dataclasses.replace(batch, **poison))
  jax.tree.map(np.testing.assert_array_equal, found, _result(_learner(), batch))


# ---- truncated sampling


def test_the_mass_that_sampling_kept_is_divided_out():
  """The mean ratio of what was drawn from the top 8 is 1, not the mass."""
  learner, batch = _learner(), _alone()
  params = jax.device_put(PARAMS, learner.param_shardings)
  plain = learner.logprobs(params, batch)
  mass = np.where(batch.loss_mask > 0, np.log(0.7), 0).astype(np.float32)
  cut = dataclasses.replace(
    batch, kept_logmass=mass, behavior_logprobs=plain - mass
  )
  found = learner.logprobs(params, cut)
  np.testing.assert_allclose(found, plain - mass, atol=1e-6)
  _, metrics = learner.update(_state(learner), cut, step=0)
  assert metrics['ratio'] == pytest.approx(1, abs=1e-5)
  assert metrics['ratio_max'] == pytest.approx(1, abs=1e-5)
  uncorrected = dataclasses.replace(cut, kept_logmass=0 * mass)
  _, metrics = learner.update(_state(learner), uncorrected, step=0)
  assert metrics['ratio'] == pytest.approx(0.7, abs=1e-5)


# ---- the reference


def _all_next_tokens(params, prompts=(3, 9)):
  """Every token after each prompt, weighted by its probability.

  A sum over it is the exact expectation on policy, for completions of one
  token.
  """
  prompts = np.asarray(prompts, np.int32)
  tokens = np.repeat(prompts, V)
  pairs = np.stack([tokens, np.tile(np.arange(V), len(prompts))], 1)
  logprobs = np.asarray(_plain_logprobs(params, pairs.astype(np.int32)))[:, 1]
  items = [
    Item(
      tokens=pair.astype(np.int32),
      loss_mask=np.array([0, 1], np.float32),
      behavior_logprobs=np.array([0, logprob], np.float32),
      kept_logmass=np.zeros(2, np.float32),
      advantage=0.0,
      weight=math.exp(logprob) / len(prompts),
    )
    for pair, logprob in zip(pairs, logprobs)
  ]
  return pack(items, ROW), logprobs


def _divergence(params, reference=OTHER):
  """The exact KL(pi || reference) of the next token, mean over prompts."""
  _, ours = _all_next_tokens(params)
  _, theirs = _all_next_tokens(reference)
  return float(np.sum(np.exp(ours) * (ours - theirs)) / 2)


@pytest.mark.parametrize(
  'estimator', ['k3', pytest.param('k2', marks=pytest.mark.slow)]
)
def test_without_advantages_updates_shrink_the_kl(estimator):
  config = grpo.Config(kl_coef=0.1, kl_estimator=estimator)
  learner = _learner(loss_config=config)
  state, before = _state(learner), _divergence(PARAMS)
  assert before > 0.1
  for step in range(20):
    batch, _ = _all_next_tokens(jax.device_get(state.params))
    state, metrics = learner.update(state, batch, step)
  after = _divergence(jax.device_get(state.params))
  assert after < 0.3 * before
  assert metrics['grad_norm'] > 0


@pytest.mark.slow
def test_k1_in_a_loss_has_a_gradient_of_mean_zero():
  """It measures; k2 and k3 are the ones that pull."""
  learner = _learner(loss_config=grpo.Config(kl_coef=0.1, kl_estimator='k1'))
  batch, _ = _all_next_tokens(PARAMS)
  _, metrics = learner.update(_state(learner), batch, step=0)
  assert metrics['loss'] == pytest.approx(0.1 * _divergence(PARAMS), rel=1e-4)
  assert metrics['grad_norm'] < 1e-5


def test_the_reference_outlives_the_parameters_it_was_taken_from():
  learner, batch = _learner(), _packed()
  state = _state(learner)
  learner.set_reference(state.params)
  try:
    # The first update gives up the parameters that the copy was taken from.
    state, first = learner.update(state, batch, step=0)
    _, moved = learner.update(state, batch, step=1)
    _, again = learner.update(_state(learner), batch, step=2)
  finally:
    learner.set_reference(jax.device_put(OTHER, learner.param_shardings))
  assert first['kl_reference_max'] == 0
  assert moved['kl_reference_max'] > 1e-4
  assert again['kl_reference_max'] == 0


def test_a_kl_without_reference_is_an_error():
  learner = Learner(
    MODEL,
    _mesh(1, 1, 1),
    Config(row_tokens=ROW, rows_per_microbatch=2, logprob_chunk=8),
    optimizer.build(OPTIMIZER, num_steps=10),
    algorithms.bind(grpo, KL),
    temperature=TEMPERATURE,
  )
  with pytest.raises(ValueError, match='set_reference'):
    learner.update(_state(learner), _packed(), step=0)


# ---- where things are, and in which dtype


@pytest.mark.parametrize('sizes', [(1, 1, 1), (2, 2, 2)])
def test_all_of_a_state_is_on_the_mesh_as_promised(sizes):
  learner = _learner(sizes, 4 if sizes == (2, 2, 2) else 2)
  devices = set(learner.mesh.devices.ravel())
  fresh = _state(learner)
  abstract = learner.abstract_state()

  def check(path, leaf, promised):
    assert leaf.sharding.device_set == devices, path  # scalars too
    assert leaf.sharding.is_equivalent_to(promised.sharding, leaf.ndim), path
    assert (leaf.shape, leaf.dtype) == (promised.shape, promised.dtype), path

  jax.tree_util.tree_map_with_path(check, fresh, abstract)
  updated, _ = learner.update(fresh, _packed(), step=0)
  jax.tree_util.tree_map_with_path(check, updated, abstract)
  moments = optax.tree.get(updated.opt_state, 'mu')
  for moment, param in zip(
    jax.tree.leaves(moments), jax.tree.leaves(updated.params), strict=True
  ):
    assert moment.sharding.is_equivalent_to(param.sharding, param.ndim)
  if len(devices) > 1:
    query = updated.params['blocks']['attention']['q']  # [L, D, N, H]
    assert query.addressable_shards[0].data.shape == (2, 16, 4, 4)


@pytest.mark.slow
def test_random_parameters_are_created_where_they_live():
  learner = _learner((2, 2, 2), 4)
  params = learner.init_params(jax.random.key(0))
  jax.tree.map(
    lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)),
    params,
    learner.param_shardings,
  )


@pytest.mark.slow
def test_masters_stay_float32_when_bfloat16_computes():
  learner = _learner(dtype='bfloat16')
  params = jax.device_put(PARAMS, learner.param_shardings)
  gap = learner.logprobs(params, _packed()) - _learner().logprobs(
    params, _packed()
  )
  assert 1e-4 < np.abs(gap).max() < 0.3
  tiny = dataclasses.replace(
    _packed(), loss_weights=_packed().loss_weights * 1e-4
  )
  state, _ = learner.update(_state(learner), tiny, step=0)
  for leaf in jax.tree.leaves(state):
    assert leaf.dtype in (jnp.float32, jnp.int32)
  # Steps that bfloat16 masters would lose: of weights near 1, below 2^-8.
  norm = np.asarray(state.params['stem']['final_norm'])
  moved = np.abs(norm - PARAMS['stem']['final_norm'])
  assert (moved > 0).mean() > 0.9
  assert moved.max() < 2**-9
  _, gradient, _ = _result(learner, _packed())
  expected = _expected('token_mean')[1]
  _assert_close((1, gradient), (1, expected), tolerance=0.1)


# ---- settings


@pytest.mark.parametrize(
  ('keys', 'message'),
  [
    ({'row_tokens': 0}, 'row_tokens=0: must be >= 1'),
    ({'rows_per_microbatch': 0}, 'rows_per_microbatch=0: must be >= 1'),
    ({'logprob_chunk': 0}, 'logprob_chunk=0: must be >= 1'),
    (
      {'row_tokens': 48, 'logprob_chunk': 20},
      'logprob_chunk=20 must divide .*row_tokens=48; nearest legal: (16|24)',
    ),
    (
      {'row_tokens': 48, 'logprob_chunk': 128},
      'must divide .*row_tokens=48; nearest legal: 48',
    ),
    ({'compute_dtype': 'float16'}, "'float16': must be float32 or bfloat16"),
  ],
)
def test_illegal_settings_say_what_is_legal(keys, message):
  with pytest.raises(ValueError, match=message):
    Config(**keys)
