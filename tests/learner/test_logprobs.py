"""Token log-probs: the shift, the chunks, the masks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from rl_jax.algorithms import base as algorithms
from rl_jax.algorithms import grpo
from rl_jax.learner.learner import Config, Learner
from rl_jax.learner.logprobs import token_logprobs
from rl_jax.models import base
from rl_jax.models.attention import segment_attention
from rl_jax.types import TrainBatch

MODEL = base.Model(
  base.ModelConfig(vocab_size=64, d_model=32, head_dim=8, d_ffn=48)
)


class Table:
  """Params are [B, T, D] hidden states and a [V, D] head: no context."""

  def hidden(self, params, tokens, positions, attend, remat=False):
    del tokens, positions, attend, remat
    return params['hidden'], None

  def logits(self, params, hidden):
    return jnp.einsum(
      'BTD,VD->BTV', hidden, params['head'], preferred_element_type=jnp.float32
    )


TABLE = Table()  # one: it is a static argument


def _table(B=2, T=12, V=7, seed=0):
  """Hidden states that are logits: the head is the identity."""
  rng = np.random.default_rng(seed)
  hidden = 2 * rng.standard_normal((B, T, V)).astype(np.float32)
  return {'hidden': hidden, 'head': np.eye(V, dtype=np.float32)}


def _row(*sequences, T=12):
  """One row of (tokens, prompt length) sequences, and what surrounds it."""
  tokens, segments, positions, mask = np.zeros((4, 1, T), np.int32)
  begin = 0
  for i, (ids, prompt) in enumerate(sequences, start=1):
    at = slice(begin, begin + len(ids))
    tokens[0, at], segments[0, at] = ids, i
    positions[0, at] = np.arange(len(ids))
    mask[0, begin + prompt : begin + len(ids)] = 1
    begin += len(ids)
  return tokens, segments, positions, mask.astype(np.float32)


@functools.partial(jax.jit, static_argnames=('model', 'chunk', 'remat'))
def _score(model, params, row, temperature=1.0, chunk=4, remat=False):
  return token_logprobs(
    model, params, *row, temperature, chunk=chunk, remat=remat
  )


@functools.partial(jax.jit, static_argnames=('model', 'chunk'))
def _gradient(model, params, row, weights, chunk=4):
  """Of the weighted sum of log-probs."""

  def total(params):
    return (_score(model, params, row, chunk=chunk)[0] * weights).sum()

  return jax.grad(total)(params)


def _log_softmax(logits):
  logits = np.asarray(logits, np.float64)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


TOKENS = np.random.default_rng(1).integers(0, 7, (2, 12)).astype(np.int32)
WHOLE = (  # two unpacked rows, everything but the first token in the loss
  TOKENS,
  np.ones((2, 12), np.int32),
  np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12)),
  np.broadcast_to((np.arange(12) > 0).astype(np.float32), (2, 12)),
)


@pytest.mark.parametrize('chunk', [1, 3, 12])
@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_chunks_equal_the_full_softmax(chunk, temperature):
  params = _table()
  found, entropies = _score(
    TABLE, params, WHOLE, temperature=temperature, chunk=chunk
  )
  full = _log_softmax(np.asarray(params['hidden'], np.float64) / temperature)
  expected = np.take_along_axis(full[:, :-1], TOKENS[:, 1:, None], -1)[..., 0]
  np.testing.assert_allclose(found[:, 1:], expected, rtol=1e-5, atol=1e-6)
  entropy = -(np.exp(full) * full).sum(-1)[:, :-1]
  np.testing.assert_allclose(entropies[:, 1:], entropy, rtol=1e-5)
  assert (found[:, 0] == 0).all()
  assert (entropies[:, 0] == 0).all()


@pytest.fixture(scope='module')
def params():
  rng = np.random.default_rng(0)

  def one(path, spec):
    values = 0.3 * rng.standard_normal(spec.shape)
    return jnp.asarray(values + ('norm' in path[-1].key), jnp.float32)

  return jax.tree_util.tree_map_with_path(one, MODEL.specs())


@functools.partial(jax.jit, static_argnums=0)
def _full_logits(model, params, tokens, segments, positions):
  hidden, _ = model.hidden(
    params, tokens, positions, segment_attention(segments)
  )
  return model.logits(params, hidden)


@pytest.mark.parametrize(
  ('dtype', 'tolerance'),
  [
    ('float32', 1e-5),
    pytest.param('bfloat16', 0.05, marks=pytest.mark.slow),
  ],
)
def test_a_decoder_equals_its_full_logits(params, dtype, tolerance):
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  found, entropies = _score(MODEL, params, WHOLE, temperature=0.7, remat=True)
  assert (found.dtype, entropies.dtype) == (jnp.float32, jnp.float32)
  tokens, segments, positions, _ = WHOLE
  logits = _full_logits(MODEL, params, tokens, segments, positions)
  full = _log_softmax(np.asarray(logits) / 0.7)
  expected = np.take_along_axis(full[:, :-1], tokens[:, 1:, None], -1)[..., 0]
  np.testing.assert_allclose(found[:, 1:], expected, atol=tolerance)


def test_bfloat16_states_are_normalised_in_float32():
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _table())
  found, _ = _score(TABLE, params, WHOLE)
  full = _log_softmax(params['hidden'])
  expected = np.take_along_axis(full[:, :-1], TOKENS[:, 1:, None], -1)[..., 0]
  # A softmax in bfloat16 would be off by 1e-2.
  np.testing.assert_allclose(found[:, 1:], expected, atol=1e-5)


def _rows_with_gradient(gradient):
  return np.flatnonzero(np.abs(np.asarray(gradient['hidden'])[0]).sum(-1))


def test_logits_of_p_minus_1_to_p_plus_k_minus_2_learn_and_no_others():
  prompt, k = 3, 5
  row = _row(([1, 2, 3, 4, 5, 6, 0, 2], prompt))
  params = _table(B=1)
  gradient = _gradient(TABLE, params, row, np.ones((1, 12)))
  expected = np.arange(prompt - 1, prompt + k - 1)
  np.testing.assert_array_equal(_rows_with_gradient(gradient), expected)
  # Each is one-hot(target) - softmax: every target, the last too, once.
  softmax = np.exp(_log_softmax(params['hidden'][0]))
  one_hot = np.eye(7)[row[0][0, expected + 1]]
  np.testing.assert_allclose(
    gradient['hidden'][0, expected], one_hot - softmax[expected], atol=1e-6
  )


def test_nothing_leaks_across_the_seam_of_packed_sequences():
  row = _row(([1, 2, 3, 4], 2), ([5, 6, 1, 2, 3], 1))
  gradient = _gradient(TABLE, _table(B=1), row, np.ones((1, 12)))
  # First: P=2, k=2 -> 1, 2. Second begins at 4: P=1, k=4 -> 4 ... 7.
  np.testing.assert_array_equal(
    _rows_with_gradient(gradient), [1, 2, 4, 5, 6, 7]
  )


def test_the_first_token_of_a_sequence_has_no_prediction():
  # Prompts without tokens: what precedes is another sequence, or nothing.
  row = _row(([1, 2, 3], 0), ([5, 6, 1], 0))
  found, entropies = _score(TABLE, _table(B=1), row)
  scored = np.flatnonzero(np.asarray(found)[0])
  np.testing.assert_array_equal(scored, [1, 2, 4, 5])
  np.testing.assert_array_equal(
    np.flatnonzero(np.asarray(entropies)[0]), scored
  )
  gradient = _gradient(TABLE, _table(B=1), row, np.ones((1, 12)))
  np.testing.assert_array_equal(_rows_with_gradient(gradient), [0, 1, 3, 4])


def test_a_completion_of_one_token():
  row = _row(([1, 2, 3], 2))
  params = _table(B=1)
  found, _ = _score(TABLE, params, row)
  expected = np.zeros(12)
  expected[2] = _log_softmax(params['hidden'])[0, 1, 3]
  np.testing.assert_allclose(found[0], expected, atol=1e-6)
  gradient = _gradient(TABLE, params, row, np.ones((1, 12)))
  np.testing.assert_array_equal(_rows_with_gradient(gradient), [1])


@pytest.mark.parametrize('poison', [np.nan, np.inf, -np.inf])
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(poison):
  row = _row(([1, 2, 3, 4], 2), ([5, 6, 1, 2, 3], 1))
  clean = _table(B=1)
  used = np.zeros((1, 12, 1), bool)
  used[0, [1, 2, 4, 5, 6, 7]] = True
  dirty = clean | {
    'hidden': np.where(used, clean['hidden'], np.float32(poison))
  }
  # Weights that are not finite under the mask must not matter either way.
  weights = np.linspace(1, 2, 12)[None]
  np.testing.assert_array_equal(
    _score(TABLE, dirty, row), _score(TABLE, clean, row)
  )
  expected = _gradient(TABLE, clean, row, weights)
  found = _gradient(TABLE, dirty, row, weights)
  np.testing.assert_array_equal(found['hidden'], expected['hidden'])
  np.testing.assert_array_equal(found['head'], expected['head'])


def test_a_row_of_padding_is_zero():
  row, params = _row(), _table(B=1)
  found, entropies = _score(TABLE, params, row)
  assert (found == 0).all()
  assert (entropies == 0).all()
  gradient = _gradient(TABLE, params, row, np.ones((1, 12)))
  assert (gradient['hidden'] == 0).all()
  assert (gradient['head'] == 0).all()


def test_entropy_of_known_distributions():
  hidden = np.zeros((1, 12, 7), np.float32)
  hidden[0, 1, 1:] = -100.0  # certain
  hidden[0, 2, 2:] = -100.0  # one bit
  row = _row(([0] * 5, 1))
  _, entropies = _score(TABLE, _table() | {'hidden': hidden}, row)
  expected = [0, np.log(7), 0, np.log(2), np.log(7)] + [0] * 7
  np.testing.assert_allclose(entropies[0], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('data', [1, 2])
def test_memory_stays_far_below_that_of_all_logits(data):
  """In scoring, and in the update with its reference: 256 MiB of logits."""
  B, T, V = 4, 256, 65536
  model = base.Model(
    base.ModelConfig(
      vocab_size=V,
      num_layers=1,
      d_model=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=16,
      d_ffn=16,
    )
  )
  learner = Learner(
    model,
    Mesh(
      np.array(jax.devices()[:data]).reshape(data, 1, 1),
      ('data', 'fsdp', 'tensor'),
    ),
    Config(row_tokens=T, rows_per_microbatch=B, logprob_chunk=8),
    optax.sgd(1.0),
    algorithms.bind(grpo, grpo.Config(kl_coef=0.1)),
    temperature=1.0,
  )
  params = learner.init_params(jax.random.key(0))
  learner.set_reference(params)
  ints = ('tokens', 'segment_ids', 'positions')
  batch = TrainBatch(
    **{
      f.name: np.zeros((B, T), np.int32 if f.name in ints else np.float32)
      for f in dataclasses.fields(TrainBatch)
    }
  )
  (micro,) = learner.microbatches(batch)
  sums = learner._zero_sums(params, micro)
  for lowered in (
    learner._score.lower(params, micro),
    learner._accumulate.lower(params, params, sums, micro),
  ):
    memory = lowered.compile().memory_analysis()
    mebibytes = memory.temp_size_in_bytes / 2**20  # of one device
    assert mebibytes < B * T * V * 4 / data / 2**20 / 4, mebibytes
