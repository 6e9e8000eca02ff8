"""Generation agrees with the learner, whatever the engine's settings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.generator import scheduler as scheduling
from rl_jax.generator.engine import Engine
from rl_jax.generator.pages import OutOfPages
from rl_jax.generator.programs import Config, Limits
from rl_jax.models.attention import segment_attention
from rl_jax.types import SamplingParams

slow = pytest.mark.slow


# ---- one distribution: learner == prefill == paged decode


def test_the_mixture_is_worth_testing(lab, plain):
  """Else parity below would hold of too little."""
  reasons = {c.finish_reason for c in plain.values()}
  assert reasons == {'stop', 'length'}
  for c in plain.values():
    sampling = c.request.sampling
    greedy = sampling.temperature == 0
    assert (c.kept_logmass < -1e-3).any() == (greedy or sampling.truncated)
    assert (c.behavior_logprobs == 0).all() == greedy
  group = [c.tokens.tolist() for (_, p, _), c in plain.items() if p == 1]
  assert len({tuple(tokens) for tokens in group}) == len(group) == 6


def test_logprobs_equal_the_learners(lab, plain):
  lab.assert_parity(plain)


@pytest.mark.parametrize(
  'settings',
  [
    'num_slots=8 page_size=16 prefill_tokens=256 prefill_chunk=64 '
    'steps_per_dispatch=1',
    pytest.param(
      'num_slots=1 page_size=1 unroll_layers=0 tensor=2', marks=slow
    ),
    pytest.param(
      'num_slots=3 page_size=3 num_pages=23 prefill_tokens=64 prefill_chunk=64 '
      'steps_per_dispatch=7',
      marks=slow,
    ),
    pytest.param('tensor=2', marks=slow),
    'dispatches_ahead=1',
    pytest.param(
      'num_slots=3 num_pages=23 page_size=3 steps_per_dispatch=2 '
      'dispatches_ahead=2',
      marks=slow,
    ),
  ],
)
def test_tokens_and_logprobs_do_not_depend_on_settings(lab, plain, settings):
  pairs = (setting.split('=') for setting in settings.split())
  engine = lab.engine(**{name: int(value) for name, value in pairs})
  results = lab.run(engine, lab.mixture())
  lab.assert_equal(results, plain)
  lab.assert_parity(results)


@pytest.mark.parametrize(
  'overrides',
  [
    {'kv_format': 'int8'},
    pytest.param({'kv_format': 'int8', 'page_size': 16}, marks=slow),
    pytest.param({'weight_format': 'int8'}, marks=slow),
    pytest.param({'kv_format': 'int8', 'weight_format': 'int8'}, marks=slow),
  ],
)
def test_quantised_generation_is_near_the_learner(lab, overrides):
  """In company and preempted too, where nothing but rounding may change."""
  engine = lab.engine(**overrides)
  results = lab.run(engine, lab.mixture())
  completions = list(results.values())
  gaps = np.concatenate(
    [
      c.behavior_logprobs + c.kept_logmass - want
      for c, want in zip(completions, lab.logprobs(completions))
    ]
  )
  assert 1e-4 < np.abs(gaps).mean() < 0.1, np.abs(gaps).mean()
  pages = lab.minimum(engine)
  scheduler = lab.scheduler(engine)
  again = lab.run(engine, lab.mixture(), scheduler=scheduler, pages=pages)
  assert scheduler.preemptions > 0
  lab.assert_equal(again, results)


@slow
def test_bfloat16_agrees_with_a_bfloat16_learner(lab):
  results = lab.run(lab.engine(dtype='bfloat16'), lab.mixture())
  lab.assert_parity(results, dtype='bfloat16', atol=0.15)
  gaps = np.concatenate(
    [
      c.behavior_logprobs + c.kept_logmass - want
      for c, want in zip(
        results.values(), lab.logprobs(list(results.values()), 0, 'bfloat16')
      )
    ]
  )
  assert np.abs(gaps).mean() < 0.02


def test_samples_of_a_prompt_share_its_full_pages(lab):
  """9 tokens on pages of 4: two full pages and a partial one."""
  engine = lab.engine()
  engine.load_params(lab.weights(engine, 0), 0)
  free = engine.pool.num_free
  request = lab.request(length=9, num_samples=3)
  prefix = engine.start(request, request.prompt.tokens, range(3))
  while not prefix.complete:
    engine.prefill([prefix])
  assert engine.pool.num_free == free - 3
  engine.insert(prefix, {0: 3, 2: 0})
  assert engine.pool.num_free == free - 3 - 2  # a copy of the last page each
  engine.insert(prefix, {1: 1})
  assert prefix.sample_indices == []
  engine.drop(prefix)
  assert engine.pool.num_free == free - 2 - 3
  for slot in (0, 1, 3):
    engine.reserve(slot)  # positions 9 .. 12: one more page
  assert engine.pool.num_free == free - 2 - 6
  drawn = engine.generate()
  assert {slot: len(d) for slot, d in drawn.items()} == {0: 4, 1: 4, 3: 4}
  for slot, left in ((0, 2 + 4), (3, 2 + 2), (1, 0)):
    engine.free(slot)
    assert engine.pool.num_free == free - left


def test_out_of_pages_changes_nothing(lab):
  engine = lab.engine()
  engine.load_params(lab.weights(engine, 0), 0)
  request = lab.request(length=5, num_samples=2)
  prefix = engine.start(request, request.prompt.tokens, range(2))
  while not prefix.complete:
    engine.prefill([prefix])
  hoard = engine.pool.allocate(engine.pool.num_free - 1)
  with pytest.raises(OutOfPages):
    engine.start(request, request.prompt.tokens[::-1], [0])
  longer = np.tile(request.prompt.tokens, 2)  # of which one page is known
  with pytest.raises(OutOfPages):
    engine.start(request, longer, [0])
  with pytest.raises(OutOfPages):
    engine.insert(prefix, {0: 0, 1: 1})
  assert prefix.sample_indices == [0, 1]
  assert not engine.is_active(0)
  assert engine.pool.num_free == 1
  engine.insert(prefix, {0: 0})
  with pytest.raises(OutOfPages):
    engine.reserve(0)
  assert engine.is_active(0)
  engine.drop(prefix)
  engine.reserve(0)
  assert engine.pool.num_free == 0
  engine.free(0)
  engine.pool.release(hoard)
  assert engine.pool.num_free == engine.num_pages - 1


def test_results_are_read_a_dispatch_late(lab):
  """As of the weights that drew them, and never those of a slot's last one."""
  requests = [lab.request(i, length=5) for i in range(3)]
  wanted = [c.tokens.tolist() for c in lab.run(lab.engine(), requests).values()]
  engine = lab.engine(dispatches_ahead=1)

  def fill(slot, request):
    prefix = engine.start(request, request.prompt.tokens, [0])
    while not prefix.complete:
      engine.prefill([prefix])
    engine.insert(prefix, {0: slot})
    engine.drop(prefix)

  def generate():
    for slot in range(4):
      if engine.is_active(slot):
        engine.reserve(slot)
    return {
      slot: ([d.token for d in drawn], {d.policy_version for d in drawn})
      for slot, drawn in engine.generate().items()
    }

  engine.load_params(lab.weights(engine, 0), 0)
  fill(0, requests[0])
  fill(1, requests[1])
  assert generate() == {}
  engine.free(1)
  fill(1, requests[2])
  assert generate() == {0: (wanted[0][1:5], {0})}  # slot 1's are lost
  engine.load_params(lab.weights(engine, 0), 7)
  assert generate() == {
    0: (wanted[0][5:9], {0}),
    1: (wanted[2][1:5], {0}),
  }
  assert generate() == {
    0: (wanted[0][9:13], {7}),
    1: (wanted[2][5:9], {7}),
  }
  engine.free(0)
  engine.free(1)
  assert engine.pool.num_free == engine.num_pages - 1


@pytest.mark.parametrize(
  ('overrides', 'message'),
  [
    ({'speculate': 2}, 'dispatches_ahead=1 with speculate=2: drafts need'),
    ({'dispatches_ahead': -2}, 'dispatches_ahead=-2: must be >= -1'),
  ],
)
def test_what_cannot_be_read_late_is_refused(overrides, message):
  with pytest.raises(ValueError, match=message):
    Config(**{'dispatches_ahead': 1, **overrides})


def test_penalties_cannot_be_read_late(lab):
  with pytest.raises(ValueError, match='dispatches_ahead=1: with penalties'):
    lab.engine(dispatches_ahead=1, logit_biases=1)


@pytest.mark.slow
@pytest.mark.parametrize('page_size', [1, 8, 16, 32, 128])
def test_the_parity_chain(lab, plain, monkeypatch, page_size):
  """Prefill in chunks, decode, preempted, guessed: all are the learner."""
  monkeypatch.setattr(scheduling, '_WORTH', 0.0)  # guesses as often as it can
  engine = lab.engine(page_size=page_size, speculate=2)
  for pages in (0, lab.minimum(engine)):
    scheduler = lab.scheduler(engine)
    results = lab.run(engine, lab.mixture(), scheduler=scheduler, pages=pages)
    assert scheduler.tokens_guessed > 0
    lab.assert_equal(results, plain)
    lab.assert_parity(results)


@pytest.mark.parametrize('speculate', [0, 2])
def test_the_likeliest_tokens_are_told_before_truncation(
  lab, plain, monkeypatch, speculate
):
  monkeypatch.setattr(scheduling, '_WORTH', 0.0)  # guesses as often as it can
  engine = lab.engine(top_logprobs=3, speculate=speculate)
  results = lab.run(engine, lab.mixture())
  lab.assert_equal(results, plain)
  for c in results.values():
    prompt = c.request.prompt.tokens
    logits = lab.logits(np.concatenate([prompt, c.tokens]))[len(prompt) - 1 :]
    temperature = c.request.sampling.temperature or 1.0
    logprobs = np.asarray(jax.nn.log_softmax(logits / temperature))
    assert len(c.likeliest) == len(c.tokens)
    for t, likeliest in enumerate(c.likeliest):
      ids, values = zip(*likeliest)
      assert list(ids) == np.argsort(-logprobs[t])[:3].tolist()
      np.testing.assert_allclose(values, logprobs[t, list(ids)], atol=5e-5)
      if c.tokens[t] in ids:
        own = values[ids.index(c.tokens[t])]
        assert own == pytest.approx(
          float(c.behavior_logprobs[t] + c.kept_logmass[t]), abs=1e-5
        )


# ---- prompts that begin alike


def _conversation(lab, engine, turns=3, swap=0):
  """Each turn is the one before, its completion and two more tokens.

  Before turn `swap` the engine gets other weights.
  """
  scheduler = lab.scheduler(engine)
  tokens, results, matched = [3, 1, 4, 1, 5], {}, []
  for turn in range(1, turns + 1):
    if turn == swap:
      scheduler.offer_params(lab.weights(engine, 1), 1)
    request = lab.request(turn, tokens=tokens, max_tokens=6)
    before = engine.tokens_matched
    results |= lab.run(engine, [request], scheduler=scheduler)
    matched.append(engine.tokens_matched - before)
    drawn = results[0, turn, 0].tokens.tolist()
    assert len(drawn) == 6
    tokens = [*tokens, *drawn, 7, turn]
  return results, matched


def test_turns_of_a_conversation_find_their_pages(lab):
  engine = lab.engine()
  found, matched = _conversation(lab, engine)
  # 5 + 5 tokens with pages of 4 each, and 13 + 5 of the second turn.
  assert matched == [0, 8, 16]
  lab.assert_parity(found)
  without = lab.engine(prefix_cache=False)
  anew, matched = _conversation(lab, without)
  assert matched == [0, 0, 0]
  lab.assert_equal(found, anew)


def test_pages_of_old_weights_are_not_found(lab):
  engine = lab.engine()
  results, matched = _conversation(lab, engine, swap=3)
  assert matched == [0, 8, 0]
  lab.assert_parity({k: c for k, c in results.items() if k[1] == 3}, seed=1)


@pytest.mark.parametrize('policy', ['keep', 'recompute'])
def test_what_was_under_way_when_the_weights_came_is_not_found(lab, policy):
  """Its pages are of both, or of the old ones only."""
  engine = lab.engine(on_new_weights=policy)
  scheduler = lab.scheduler(engine)

  def before_step(scheduler, n):
    if n == 2:
      scheduler.offer_params(lab.weights(engine, 1), 1)

  first = lab.request(0, 9, max_tokens=12)
  results = lab.run(
    engine, [first], scheduler=scheduler, before_step=before_step
  )
  versions = results[0, 0, 0].policy_versions
  assert set(versions) == {0, 1}
  before = engine.tokens_matched
  again = lab.request(1, tokens=[*first.prompt.tokens, 1, 2])
  after = lab.run(engine, [again], scheduler=scheduler)
  # Recomputed, they are all of the new ones.
  assert engine.tokens_matched - before == {'keep': 0, 'recompute': 8}[policy]
  lab.assert_parity(after, seed=1)


# ---- sampling parameters


CHANGES = {  # what each field changes; four of them tell the greedy tokens
  'max_tokens': 5,
  'stop_ids': None,  # the third token
  'temperature': 0.0,
  'top_k': 1,
  'top_p': 1e-6,
  'min_p': 0.9999,
  'min_tokens': 9,
  'logit_bias': ((9, 1e3),),
  'repetition_penalty': 5.0,
  'presence_penalty': 9.0,
  'frequency_penalty': 9.0,
  'stop_strings': ('3',),
}


def test_every_sampling_parameter_is_honoured(lab):
  assert set(CHANGES) == {f.name for f in dataclasses.fields(SamplingParams)}

  def tokens(**sampling):
    request = lab.request(length=4, **sampling)
    engine = lab.engine(logit_biases=2)
    scheduler = lab.scheduler(engine, decode=str)
    (completion,) = lab.run(engine, [request], scheduler=scheduler).values()
    return completion.tokens.tolist()

  plain = tokens()
  assert tokens(max_tokens=5) == plain[:5]
  third = plain.index(plain[2])
  assert tokens(stop_ids=(63, plain[2])) == plain[: third + 1]
  greedy = tokens(temperature=0.0)
  assert greedy != plain
  for name in ('top_k', 'top_p', 'min_p'):
    assert tokens(**{name: CHANGES[name]}) == greedy, name
  assert tokens(temperature=1e-3) == greedy
  assert tokens(temperature=3.0) not in (plain, greedy)
  # What these do exactly is for the scheduler's tests.
  late = tokens(stop_ids=(63, plain[2]), min_tokens=CHANGES['min_tokens'])
  assert len(late) >= 9 and not {63, plain[2]} & set(late[:8])
  assert tokens(logit_bias=CHANGES['logit_bias']) == [9] * 15
  for name in ('repetition', 'presence', 'frequency'):
    penalised = tokens(**{f'{name}_penalty': CHANGES[f'{name}_penalty']})
    assert len(set(penalised)) > len(set(plain)), name
  first = next(i for i, token in enumerate(plain) if '3' in str(token))
  assert tokens(stop_strings=CHANGES['stop_strings']) == plain[: first + 1]


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('max_tokens', 0),
    ('temperature', -0.1),
    ('temperature', float('nan')),
    ('temperature', float('inf')),
    ('top_k', -1),
    ('top_p', 0.0),
    ('top_p', 1.01),
    ('top_p', float('nan')),
    ('min_p', -0.1),
    ('min_p', 1.0),
    ('stop_ids', (3, -1)),
  ],
)
def test_illegal_sampling_parameters_are_refused(name, value):
  with pytest.raises(ValueError, match=f'sampling.{name}=.*must be'):
    SamplingParams(**{'max_tokens': 1, name: value})


# ---- new weights


def _swap(lab, on_new_weights, requests, at, pages=0):
  """Offers the weights of seed 1 before step `at`.

  Returns:
    The completions and how many of their tokens were drawn by then.
  """
  engine = lab.engine(on_new_weights=on_new_weights)
  drawn = []

  def before_step(scheduler, n):
    if n == at:
      drawn.append(scheduler.tokens_generated)
      scheduler.offer_params(lab.weights(engine, 1), 1)
      if on_new_weights != 'drain':
        assert scheduler.policy_version == 1
        assert not scheduler.awaits_params

  results = lab.run(engine, requests, pages=pages, before_step=before_step)
  return results, drawn[0]


def _old_tokens(results):
  return sum(int((c.policy_versions == 0).sum()) for c in results.values())


def _both(completion):
  return len(set(completion.policy_versions)) == 2


@pytest.mark.parametrize('at', [2, 5])
@pytest.mark.parametrize('small', [False, True])
def test_recomputed_rollouts_go_on_as_if_always_of_the_new_weights(
  lab, at, small
):
  pages = lab.minimum(lab.engine()) if small else 0
  results, drawn = _swap(lab, 'recompute', lab.mixture(), at, pages)
  assert _old_tokens(results) == drawn
  assert any(_both(c) for c in results.values())
  completions = list(results.values())
  scores = [lab.logprobs(completions, seed) for seed in (0, 1)]
  for c, old, new in zip(completions, *scores):
    want = np.where(c.policy_versions == 0, old, new)
    np.testing.assert_allclose(
      c.behavior_logprobs + c.kept_logmass, want, atol=5e-5
    )


@functools.partial(jax.jit, static_argnums=0)
def _logits_of_mixed_cache(model, old_params, params, tokens, segments, cut):
  """Logits where keys and values before `cut` are of the old weights."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  plain = segment_attention(segments)
  c = model.config
  empty = jnp.zeros((c.num_layers, *tokens.shape, c.num_kv_heads, c.head_dim))

  def remember(q, k, v, cache):
    return plain(q, k, v, None)[0], (k, v)

  def mixed(q, k, v, cache):
    old = (positions < cut[:, None])[..., None, None]
    k, v = jnp.where(old, cache[0], k), jnp.where(old, cache[1], v)
    return plain(q, k, v, None)[0], cache

  _, caches = model.hidden(
    old_params, tokens, positions, remember, (empty, empty)
  )
  hidden, _ = model.hidden(params, tokens, positions, mixed, caches)
  return model.logits(params, hidden)


def test_kept_caches_are_of_the_old_weights_up_to_the_swap(lab):
  """The last token drawn is not in the cache yet: new weights write it."""
  requests = [lab.request(i, length, 2) for i, length in enumerate((2, 3, 1))]
  results, drawn = _swap(lab, 'keep', requests, at=2)
  assert _old_tokens(results) == drawn
  completions = list(results.values())
  assert sum(_both(c) for c in completions) >= 4
  prompt = np.array([len(c.request.prompt.tokens) for c in completions])
  old = np.array([int((c.policy_versions == 0).sum()) for c in completions])
  tokens, segments = lab.rows(completions)
  cut = np.zeros(len(tokens), np.int32)
  cut[: len(old)] = np.maximum(prompt + old - 1, 0) * (old > 0)
  logits = _logits_of_mixed_cache(
    lab.model, lab.stacked(0), lab.stacked(1), tokens, segments, cut
  )
  logprobs = np.asarray(jax.nn.log_softmax(logits))
  before = lab.logprobs(completions, 0)
  for b, c in enumerate(completions):
    at = np.arange(old[b], len(c.tokens))
    want = logprobs[b, prompt[b] + at - 1, c.tokens[at]]
    np.testing.assert_allclose(c.behavior_logprobs[at], want, atol=5e-5)
    np.testing.assert_allclose(
      c.behavior_logprobs[: old[b]], before[b][: old[b]], atol=5e-5
    )


@pytest.mark.parametrize('small', [False, True])
def test_draining_mixes_no_versions(lab, small):
  """Also not where a rollout was preempted before the weights came."""
  pages = lab.minimum(lab.engine()) if small else 0
  results, _ = _swap(lab, 'drain', lab.mixture(), 5, pages)
  assert {int(c.policy_versions[0]) for c in results.values()} == {0, 1}
  assert not any(_both(c) for c in results.values())
  for version in (0, 1):
    mine = {k: c for k, c in results.items() if c.policy_versions[0] == version}
    lab.assert_parity(mine, seed=version)


# ---- compilation


def test_nothing_compiles_after_the_first_use_of_each_verb(lab, plain):
  compiled = []

  def listen(event, *_, **__):
    if 'compile' in event:
      compiled.append(event)

  engine = lab.engine(on_new_weights='recompute')
  lab.weights(engine, 1)
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    jax.jit(lambda x: x + 1)(np.float32(len(compiled)))
    assert compiled  # the listener hears
    compiled.clear()
    lab.run(engine, lab.mixture())
    _swap(lab, 'recompute', lab.mixture(), 4, lab.minimum(engine))
    requests = [
      lab.request(100 + i, 1 + i % 17, 1 + i % 6, stop_ids=(i, 5)[: i % 3])
      for i in range(30)
    ]
    lab.run(engine, requests, arrivals=list(range(30)))
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert compiled == []


# ---- settings


@pytest.mark.parametrize(
  ('name', 'value', 'legal'),
  [
    ('num_slots', 0, '>= 1'),
    ('page_size', 0, '>= 1'),
    ('num_pages', -1, '>= 0'),
    ('steps_per_dispatch', 0, '>= 1'),
    ('prefill_tokens', -3, '>= 1'),
    ('prefill_tokens', 100, 'multiple of prefill_chunk=32; nearest legal: 96'),
    ('prefill_chunk', 0, '>= 1'),
    ('dtype', 'float16', 'bfloat16'),
    ('on_new_weights', 'forget', 'recompute'),
  ],
)
def test_illegal_settings_name_themselves(name, value, legal):
  with pytest.raises(ValueError, match=f'generator.{name}=.*{legal}'):
    Config(**{name: value})


def test_a_pool_too_small_for_two_sequences_says_how_many_are_needed(lab):
  engine = lab.engine()
  config = dataclasses.replace(lab.base, num_pages=16)
  with pytest.raises(ValueError, match=r'num_pages=16.*at least 17; 49 never'):
    Engine(
      lab.model,
      engine.mesh,
      config,
      limits=Limits(32, stop_ids=3),
      seed=0,
    )
