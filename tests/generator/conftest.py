"""A tiny model, its engines (each compiled once), and the learner's opinion.

`lab.run` drives a scheduler to the end and checks what must hold of every
run: all samples come back once, within their budget, and no page is lost.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax import meshes
from rl_jax.generator.engine import Engine
from rl_jax.generator.programs import Config, Limits
from rl_jax.generator.quantize import Packing
from rl_jax.generator.scheduler import Scheduler
from rl_jax.learner.logprobs import token_logprobs
from rl_jax.models import base
from rl_jax.models.attention import segment_attention
from rl_jax.types import Prompt, Request, SamplingParams

MAX_LENGTH, MAX_STOP_IDS = 32, 3
ROWS = 8  # sequences that the learner scores at once
MODEL = base.Model(
  base.ModelConfig(vocab_size=64, d_model=32, head_dim=8, d_ffn=48)
)
BASE = Config(
  num_slots=4,
  page_size=4,
  steps_per_dispatch=4,
  prefill_tokens=6,
  prefill_chunk=3,
)


class Lab:
  """What the tests of the generator share."""

  model, max_length, base = MODEL, MAX_LENGTH, BASE

  # ---- engines

  def engine(
    self,
    *,
    tensor=1,
    on_new_weights='keep',
    order='fifo',
    prefix_cache=True,
    speculate=0,
    logit_biases=None,
    **overrides,
  ) -> Engine:
    """The engine of BASE with other settings; compiled at most once."""
    config = dataclasses.replace(BASE, **overrides)
    engine = _engine(tensor, config, logit_biases)
    if engine.pool.num_free < engine.num_pages - 1:  # left by a failed test
      _engine.cache_clear()
      engine = _engine(tensor, config, logit_biases)
    # Read on the host only, so they need no other program.
    engine.config = dataclasses.replace(
      config,
      on_new_weights=on_new_weights,
      order=order,
      prefix_cache=prefix_cache,
      speculate=speculate,
    )
    return engine

  def minimum(self, engine: Engine) -> int:
    """Pages of the smallest legal pool, without the trash page."""
    return 2 * -(-MAX_LENGTH // engine.config.page_size)

  def weights(self, engine: Engine, seed: int):
    """Parameters of `stacked(seed)` as this engine takes them."""
    return _weights(engine, seed)

  def scheduler(self, engine: Engine, seed: int = 0, decode=None) -> Scheduler:
    """A new scheduler with the weights of `seed`, version `seed`."""
    scheduler = Scheduler(engine, decode)
    scheduler.offer_params(self.weights(engine, seed), seed)
    return scheduler

  # ---- requests

  def request(
    self, prompt_id=0, length=5, num_samples=1, step=0, tokens=None, **sampling
  ) -> Request:
    if tokens is None:
      tokens = np.random.default_rng(prompt_id).integers(0, 64, length)
    prompt = Prompt(
      prompt_id, f'lab/{prompt_id}', '', np.asarray(tokens, np.int32), None
    )
    sampling = SamplingParams(**{'max_tokens': 15, **sampling})
    return Request(prompt, num_samples, sampling, step)

  def mixture(self) -> list[Request]:
    """Prompts of all lengths, each way to sample; more samples than slots."""
    ways = [
      {'temperature': 0},
      {'stop_ids': (8, 14, 0)},
      {'temperature': 0.7},
      {'temperature': 0, 'stop_ids': (62, 63)},
      {'top_k': 5, 'temperature': 1.3},
      {'top_p': 0.8},
      {'min_p': 0.1, 'stop_ids': (25,)},
      {'temperature': 1.2, 'top_k': 30, 'top_p': 0.9, 'min_p': 0.02},
    ]
    lengths = [1, 3, 4, 9, 16, 17, 8, 2]  # pages of 1, 3, 4, 16 end at some
    samples = [2, 6, 3, 1, 2, 3, 2, 1]
    return [
      self.request(i, length, number, step=i % 3, **way)
      for i, (way, length, number) in enumerate(zip(ways, lengths, samples))
    ]

  # ---- runs

  def run(
    self,
    engine: Engine,
    requests: list[Request],
    *,
    scheduler: Scheduler | None = None,
    pages: int = 0,
    arrivals: list[int] | None = None,
    before_step=None,
  ):
    """Completions by (step, prompt id, sample index).

    Args:
      pages: how many pages there are, if not all.
      arrivals: before which step each request is submitted; default 0.
      before_step: called with (scheduler, number of the step).
    """
    scheduler = scheduler or self.scheduler(engine)
    before, num_free = scheduler.tokens_generated, engine.pool.num_free
    assert num_free == engine.num_pages - 1
    hoard = engine.pool.allocate(num_free - pages if pages else 0)
    waiting = sorted(zip(arrivals or [0] * len(requests), range(len(requests))))
    done, steps = [], 0
    while waiting or not scheduler.idle:
      while waiting and waiting[0][0] <= steps:
        scheduler.submit(requests[waiting.pop(0)[1]])
      if before_step:
        before_step(scheduler, steps)
      done += scheduler.step()
      steps += 1
      assert steps < 2000, 'no end in sight'
    engine.pool.release(hoard)
    assert engine.pool.num_free == num_free
    assert scheduler.tokens_in_flight == 0
    drawn = sum(len(c.tokens) for c in done)
    assert scheduler.tokens_generated - before == drawn
    return _checked(requests, done)

  def assert_equal(self, got, want):
    """Equal tokens, bit by bit; log-probs but for the order of sums."""
    assert got.keys() == want.keys()
    for key in want:
      a, b = got[key], want[key]
      np.testing.assert_array_equal(a.tokens, b.tokens, err_msg=str(key))
      assert a.finish_reason == b.finish_reason
      np.testing.assert_allclose(
        a.behavior_logprobs, b.behavior_logprobs, atol=1e-4
      )

  # ---- the learner

  def stacked(self, seed: int):
    return stacked(seed)

  def logprobs(self, completions, seed=0, dtype='float32'):
    """The learner's log-probs of each completion's tokens, unrenormalised."""
    params = jax.tree.map(lambda x: x.astype(dtype), stacked(seed))
    scored = []
    for begin in range(0, len(completions), ROWS):
      part = completions[begin : begin + ROWS]
      tokens, segments = self.rows(part)
      mask = (segments > 0).astype(np.float32)
      positions = np.broadcast_to(
        np.arange(MAX_LENGTH, dtype=np.int32), tokens.shape
      )
      temperature = np.ones((ROWS, 1, 1), np.float32)
      for b, c in enumerate(part):
        temperature[b] = c.request.sampling.temperature or 1.0
      rows, _ = _score(params, tokens, segments, positions, mask, temperature)
      for b, c in enumerate(part):
        start = len(c.request.prompt.tokens)
        scored.append(np.asarray(rows[b, start : start + len(c.tokens)]))
    return scored

  def logits(self, tokens):
    """[T, V] of one sequence, by the model without pages."""
    padded = np.zeros((1, MAX_LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_logits(stacked(0), padded))[0, : len(tokens)]

  def rows(self, completions):
    """Prompt and completion of each, padded: (tokens, segment ids)."""
    tokens = np.zeros((ROWS, MAX_LENGTH), np.int32)
    segments = np.zeros((ROWS, MAX_LENGTH), np.int32)
    for b, c in enumerate(completions):
      whole = np.concatenate([c.request.prompt.tokens, c.tokens])
      tokens[b, : len(whole)], segments[b, : len(whole)] = whole, 1
    return tokens, segments

  def assert_parity(self, results, seed=0, atol=5e-5, dtype='float32'):
    """behavior + kept == the learner's log-prob, token by token."""
    completions = list(results.values())
    for c, want in zip(completions, self.logprobs(completions, seed, dtype)):
      np.testing.assert_allclose(
        c.behavior_logprobs + c.kept_logmass, want, atol=atol
      )


@functools.cache
def stacked(seed: int):
  """Random parameters as the learner has them. (`init` compiles slowly.)"""
  rng = np.random.default_rng(seed)

  def one(path, spec):
    values = 0.3 * rng.standard_normal(spec.shape)
    return jnp.asarray(values + ('norm' in path[-1].key), jnp.float32)

  return jax.tree_util.tree_map_with_path(one, MODEL.specs())


@functools.cache
def _engine(tensor: int, config: Config, logit_biases: int | None) -> Engine:
  devices = np.array(jax.devices()[:tensor]).reshape(1, tensor)
  return Engine(
    MODEL,
    Mesh(devices, ('data', 'tensor')),
    config,
    limits=Limits(MAX_LENGTH, MAX_STOP_IDS, logit_biases),
    seed=0,
  )


@functools.cache
def _weights(engine: Engine, seed: int):
  mesh, packing = engine.mesh, Packing(engine.config.weight_format)
  places = meshes.shardings(mesh, MODEL.specs(), meshes.GENERATION_RULES)
  params = jax.tree.map(lambda x: x.astype(engine.config.dtype), stacked(seed))
  params, places = (
    {
      'stem': convert(tree['stem']),
      'blocks': convert(tree['blocks'], stacked=True),
    }
    for convert, tree in ((packing.pack, params), (packing.shardings, places))
  )
  if engine.config.unroll_layers:
    layer = jax.tree.map(
      lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])),
      places['blocks'],
    )
    params = base.unroll(params)
    places = places | {'blocks': (layer,) * len(params['blocks'])}
  return jax.device_put(params, places)


@jax.jit
def _logits(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  attend = segment_attention(jnp.ones_like(tokens))
  hidden, _ = MODEL.hidden(params, tokens, positions, attend)
  return MODEL.logits(params, hidden)


@jax.jit
def _score(params, tokens, segments, positions, mask, temperature):
  return token_logprobs(
    MODEL, params, tokens, segments, positions, mask, temperature, chunk=8
  )


def _checked(requests, done):
  """What holds of the completions of every run; keyed by sample."""
  results = {}
  for c in done:
    key = (c.request.step, c.request.prompt.prompt_id, c.sample_index)
    assert key not in results, f'{key} came back twice'
    results[key] = c
    sampling, number = c.request.sampling, len(c.tokens)
    assert 1 <= number <= sampling.max_tokens
    stops = np.isin(c.tokens, sampling.stop_ids)
    assert not stops[:-1].any(), 'went on after a stop token'
    if not sampling.stop_strings:
      assert (c.finish_reason == 'stop') == stops[-1]
    assert c.finish_reason == 'stop' or number == sampling.max_tokens
    for values in (c.behavior_logprobs, c.kept_logmass, c.policy_versions):
      assert len(values) == number
    assert (np.diff(c.policy_versions) >= 0).all()
  assert results.keys() == {
    (r.step, r.prompt.prompt_id, i)
    for r in requests
    for i in range(r.num_samples)
  }
  return results


@pytest.fixture(scope='session')
def lab() -> Lab:
  return Lab()


@pytest.fixture(scope='session')
def plain(lab):
  """The mixture, undisturbed, on the base engine."""
  return lab.run(lab.engine(), lab.mixture())
