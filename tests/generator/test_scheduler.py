"""What runs when changes no token, loses none and ends."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.generator.scheduler import Scheduler

# Pages of the pool: the least that is legal, and a few more.
PAGES = (16, 17, 21, 30)


# ---- tokens do not depend on company


def test_mixture_alone_or_in_any_order(lab, plain):
  engine, requests = lab.engine(), lab.mixture()
  lab.assert_equal(lab.run(engine, requests[::-1]), plain)
  one_by_one = {}
  for request in requests:
    one_by_one |= lab.run(engine, [request])
  lab.assert_equal(one_by_one, plain)
  arrivals = [7, 0, 3, 3, 12, 1, 5, 0]
  lab.assert_equal(lab.run(engine, requests, arrivals=arrivals), plain)


@pytest.mark.parametrize('pages', PAGES)
def test_preemption_changes_no_token(lab, plain, pages):
  engine = lab.engine()
  scheduler = lab.scheduler(engine)
  results = lab.run(engine, lab.mixture(), scheduler=scheduler, pages=pages)
  assert scheduler.preemptions > 0 or pages == max(PAGES)
  lab.assert_equal(results, plain)
  lab.assert_parity(results)


def test_the_same_calls_give_the_same_bits(lab):
  engine = lab.engine()
  first, second = (
    lab.run(engine, lab.mixture(), pages=PAGES[0], arrivals=list(range(8)))
    for _ in range(2)
  )
  for key, completion in first.items():
    np.testing.assert_array_equal(
      completion.behavior_logprobs, second[key].behavior_logprobs
    )


# ---- budgets and stops


def _tokens(results):
  return [c.tokens.tolist() for c in results.values()]


def test_max_tokens_of_one(lab):
  request = lab.request(3, num_samples=6, max_tokens=1)
  results = lab.run(lab.engine(), [request])
  assert [len(t) for t in _tokens(results)] == [1] * 6
  assert {c.finish_reason for c in results.values()} == {'length'}


def test_longest_request_fills_the_last_position(lab):
  request = lab.request(3, length=20, max_tokens=12, temperature=0)
  (tokens,) = _tokens(lab.run(lab.engine(), [request]))
  assert len(tokens) == 12


def test_stop_token_at_each_place(lab):
  """The first, one within a dispatch, and the last that the budget allows."""
  engine, options = lab.engine(), {'length': 3, 'temperature': 0.9}
  (free,) = _tokens(lab.run(engine, [lab.request(5, **options)]))
  for place in range(len(free)):
    stops = (free[place],)
    wanted = free[: free.index(free[place]) + 1]
    request = lab.request(5, stop_ids=stops, max_tokens=place + 1, **options)
    (completion,) = lab.run(engine, [request]).values()
    assert completion.tokens.tolist() == wanted
    assert completion.finish_reason == 'stop'


def test_any_of_several_stop_ids_stops(lab):
  engine = lab.engine()
  (free,) = _tokens(lab.run(engine, [lab.request(5)]))
  missing = [t for t in range(64) if t not in free]
  for slot in range(3):
    stops = missing[:3]
    stops[slot] = free[4]
    request = lab.request(5, stop_ids=tuple(stops))
    (tokens,) = _tokens(lab.run(engine, [request]))
    assert tokens == free[: free.index(free[4]) + 1]


def test_a_stop_id_in_the_prompt_or_in_padding_stops_nothing(lab):
  """0 pads prompts and empty slots inside the engine."""
  engine = lab.engine()
  options = {'tokens': [0, 7, 0, 0], 'num_samples': 3, 'temperature': 1.5}
  free = _tokens(lab.run(engine, [lab.request(6, **options)]))
  stopped = lab.run(engine, [lab.request(6, stop_ids=(0,), **options)])
  for tokens, want in zip(_tokens(stopped), free):
    end = want.index(0) + 1 if 0 in want else len(want)
    assert tokens == want[:end]


# ---- requests that cannot run


def test_requests_that_can_never_run_are_refused(lab):
  scheduler = lab.scheduler(lab.engine())
  with pytest.raises(ValueError, match=r'18 tokens .*=15 = 33.*32'):
    scheduler.submit(lab.request(0, length=18))
  with pytest.raises(ValueError, match='prompt of at least one token'):
    scheduler.submit(lab.request(0, length=0))
  with pytest.raises(ValueError, match='num_samples >= 1, got 0'):
    scheduler.submit(lab.request(0, num_samples=0))
  with pytest.raises(ValueError, match=r'4 stop ids.*at most 3'):
    scheduler.submit(lab.request(0, stop_ids=(1, 2, 3, 4)))
  assert scheduler.idle


# ---- pages run out


def test_work_preempted_while_slots_are_filled_is_not_inserted(lab):
  """Two prompts of 8 pages fill the pool of 16; each needs a page more."""
  engine = lab.engine()
  requests = [lab.request(i, length=29, max_tokens=3) for i in range(2)]
  wanted = lab.run(engine, requests)
  scheduler = lab.scheduler(engine)
  results = lab.run(engine, requests, scheduler=scheduler, pages=16)
  assert scheduler.preemptions == 1
  lab.assert_equal(results, wanted)


def test_work_that_makes_room_at_its_own_cost_is_not_inserted(lab):
  """The younger of two prompts of 8 pages, expected to take longer."""
  engine = lab.engine(order='longest')
  requests = [
    lab.request(0, length=31, max_tokens=1),
    lab.request(1, length=29, max_tokens=3),
  ]
  wanted = lab.run(engine, requests)
  scheduler = lab.scheduler(engine)
  results = lab.run(engine, requests, scheduler=scheduler, pages=16)
  assert scheduler.preemptions == 1
  lab.assert_equal(results, wanted)


def test_preempted_samples_of_one_prompt_wait_side_by_side(lab):
  """They share their request, and one may end before an older one."""
  engine = lab.engine()
  request = lab.request(1, length=13, num_samples=6)
  wanted = lab.run(engine, [request])
  for pages in range(16, 20):
    scheduler = lab.scheduler(engine)
    results = lab.run(engine, [request], scheduler=scheduler, pages=pages)
    assert scheduler.preemptions > 0 or pages > 16
    lab.assert_equal(results, wanted)


def _check_pages(scheduler):
  """Each page has as many owners as it counts, and one where it is written."""
  engine = scheduler.engine
  holders = [h.prefix.pages for h in scheduler._held]
  holders += [engine._pages[slot] for slot in scheduler._running]
  owned = np.bincount(
    [page for pages in holders for page in pages], minlength=engine.num_pages
  )
  hoarded = (engine.pool._counts > 0) & (owned == 0)
  np.testing.assert_array_equal(engine.pool._counts - hoarded, owned)
  for slot in scheduler._running:
    first = engine._slots.position[slot] // engine.config.page_size
    assert (owned[engine._pages[slot][first:]] == 1).all()
  return int(hoarded.sum())


@st.composite
def _traffic(draw):
  """Requests as (sizes, arrival), what is aborted when, and the pool."""
  integers = lambda low, high: draw(st.integers(low, high))  # noqa: E731
  requests = []
  for prompt_id in range(integers(1, 10)):
    length = integers(1, 29)
    sampling = {
      'max_tokens': integers(1, min(32 - length, 15)),
      'temperature': draw(st.sampled_from([0.0, 0.8, 1.0])),
      'stop_ids': tuple(draw(st.lists(st.integers(0, 63), max_size=3))),
    }
    step, samples, arrival = integers(0, 2), integers(1, 6), integers(0, 20)
    requests.append((prompt_id, length, samples, step, sampling, arrival))
  aborts = draw(st.dictionaries(st.integers(0, 30), st.integers(0, 9)))
  pages = integers(16, 24)
  order = draw(st.sampled_from(['fifo', 'longest']))
  late = draw(st.sampled_from([{}, {'speculate': 2}, {'dispatches_ahead': 1}]))
  return requests, aborts, pages, order, late


@settings(max_examples=40, deadline=None)
@given(traffic=_traffic())
def test_random_traffic(lab, traffic):
  """Every sample comes back once, with the tokens that it has alone.

  Of a request that is aborted, as far as it had come. No page is leaked, freed
  twice or written by one owner and read by another.
  """
  drawn, aborts, pages, order, late = traffic
  engine = lab.engine(order=order, **late)
  requests = [
    dataclasses.replace(
      lab.request(i, length, samples, step, **sampling), key=i
    )
    for i, length, samples, step, sampling, _ in drawn
  ]
  wanted = lab.run(engine, requests)
  scheduler = lab.scheduler(engine)
  hoard = engine.pool.allocate(engine.pool.num_free - pages)
  arrivals = [arrival for *_, arrival in drawn]
  done, steps = [], 0
  while steps <= max(arrivals) or not scheduler.idle:
    for request, arrival in zip(requests, arrivals, strict=True):
      if arrival == steps:
        scheduler.submit(request)
    if steps in aborts:
      ended = scheduler.abort(aborts[steps])
      assert {c.finish_reason for c in ended} <= {'abort'}
      done += ended
    assert _check_pages(scheduler) == len(hoard)
    done += scheduler.step()
    steps += 1
    assert steps < 1000, 'no end in sight'
  assert engine.pool.num_free == pages
  engine.pool.release(hoard)
  assert scheduler.tokens_in_flight == 0
  assert scheduler.tokens_generated == sum(len(c.tokens) for c in done)
  returned = {}
  for c in done:
    key = (c.request.step, c.request.prompt.prompt_id, c.sample_index)
    assert key not in returned
    returned[key] = c
    want = wanted[key]
    if c.finish_reason == 'abort':
      assert c.request.key in aborts.values()
      assert len(c.tokens) < len(want.tokens)
    else:
      assert c.finish_reason == want.finish_reason
      assert len(c.tokens) == len(want.tokens)
    np.testing.assert_array_equal(c.tokens, want.tokens[: len(c.tokens)])
  assert returned.keys() == wanted.keys()


def test_abort_takes_a_request_out_wherever_it_is(lab):
  """Running, waiting for slots, in prefill and queued; others do not notice."""
  engine = lab.engine()
  requests = [
    dataclasses.replace(lab.request(i, 6, num_samples=3), key=i)
    for i in range(4)
  ]
  wanted = lab.run(engine, requests)
  for stop_at in range(7):
    scheduler = lab.scheduler(engine)
    for request in requests:
      scheduler.submit(request)
    done = [c for _ in range(stop_at) for c in scheduler.step()]
    aborted = [c for key in (0, 2) for c in scheduler.abort(key)]
    assert scheduler.abort(0) == []
    while not scheduler.idle:
      done += scheduler.step()
    assert engine.pool.num_free == engine.num_pages - 1
    assert len(done) + len(aborted) == 12
    if stop_at == 0:
      assert [len(c.tokens) for c in aborted] == [0] * 6
    for c in done + aborted:
      want = wanted[0, c.request.key, c.sample_index].tokens
      np.testing.assert_array_equal(c.tokens, want[: len(c.tokens)])
      assert len(c.tokens) == len(want) or c.finish_reason == 'abort'


# ---- who goes first


def _ends(lab, order, requests, histories=()):
  """Prompt ids in the order in which they get a slot of an engine of one."""
  engine = lab.engine(num_slots=1, order=order)
  scheduler = lab.scheduler(engine)
  for request in histories:
    scheduler.submit(request)
    while not scheduler.idle:
      scheduler.step()
  for request in requests:
    scheduler.submit(request)
  done = []
  while not scheduler.idle:
    done += scheduler.step()
  return [c.request.prompt.prompt_id for c in done]


def test_the_longest_expected_go_first(lab):
  """By their last completions: 2, 9 and 5 tokens; 3 is new and may draw 7."""
  lengths = {0: 2, 1: 9, 2: 5}
  past = [lab.request(i, max_tokens=n) for i, n in lengths.items()]
  requests = [lab.request(i, max_tokens=15) for i in range(3)]
  requests.append(lab.request(3, max_tokens=7))
  assert _ends(lab, 'longest', requests, past) == [1, 3, 2, 0]
  assert _ends(lab, 'fifo', requests, past) == [0, 1, 2, 3]


def test_earlier_steps_go_first_in_either_order(lab):
  requests = [
    lab.request(0, max_tokens=3, step=1),
    lab.request(1, max_tokens=9, step=2),
    lab.request(2, max_tokens=5, step=0),
  ]
  for order in ('fifo', 'longest'):
    assert _ends(lab, order, requests) == [2, 0, 1]


def test_the_oldest_is_never_held_up(lab):
  """Younger requests in the smallest pool cost the oldest no step.

  12 tokens are prefilled in 2 steps, of which the last also decodes 4 tokens
  after the first one; 15 more take 4 steps.
  """
  engine = lab.engine()
  scheduler = lab.scheduler(engine)
  old = lab.request(0, length=12, max_tokens=20)
  scheduler.submit(old)
  hoard = engine.pool.allocate(engine.pool.num_free - 16)
  ended, steps = [], 0
  while not scheduler.idle:
    if steps < 20:
      scheduler.submit(lab.request(1 + steps, length=11, num_samples=2))
    steps += 1
    assert steps < 500
    ended += [(c.request.prompt.prompt_id, steps) for c in scheduler.step()]
  engine.pool.release(hoard)
  assert scheduler.preemptions > 0
  assert (0, 6) in ended
  # The others end about in the order they came: none starves.
  order = [prompt_id for prompt_id, _ in ended]
  assert len(order) == 1 + 2 * 20
  for place, prompt_id in enumerate(order):
    assert abs(place - 2 * prompt_id) <= 8


# ---- the ledger


def test_tokens_in_flight_and_generated(lab):
  """Preemption neither loses tokens nor counts them twice."""
  engine = lab.engine()
  scheduler = lab.scheduler(engine)
  returned = []

  def before_step(scheduler, _):
    in_flight = scheduler.tokens_generated - sum(returned)
    assert scheduler.tokens_in_flight == in_flight

  step = scheduler.step

  def counted():
    done = step()
    returned.extend(len(c.tokens) for c in done)
    return done

  scheduler.step = counted
  lab.run(
    engine,
    lab.mixture(),
    scheduler=scheduler,
    pages=16,
    before_step=before_step,
  )
  assert scheduler.preemptions > 0


# ---- new weights


def test_drain_waits_for_what_was_preempted(lab):
  """A preempted rollout holds no page, but has tokens of the old weights."""
  engine = lab.engine(on_new_weights='drain')
  scheduler = lab.scheduler(engine)
  requests = [lab.request(i, length=13, num_samples=3) for i in range(3)]
  offered = []

  def before_step(scheduler, _):
    preempted = any(w.samples[0].tokens for w in scheduler._queue)
    if preempted and not offered:
      scheduler.offer_params(lab.weights(engine, 1), 1)
      offered.append(scheduler.tokens_in_flight)
    if offered and scheduler.awaits_params:
      assert scheduler.policy_version == 0
      assert not scheduler.idle

  results = lab.run(
    engine, requests, scheduler=scheduler, pages=16, before_step=before_step
  )
  assert offered
  assert scheduler.policy_version == 1
  versions = [set(c.policy_versions) for c in results.values()]
  assert all(len(v) == 1 for v in versions)
  assert {0} in versions
  assert {1} in versions


def test_drain_admits_nothing_new_and_takes_the_latest_weights(lab):
  engine = lab.engine(on_new_weights='drain')
  scheduler = lab.scheduler(engine)
  first, late = lab.request(0), lab.request(1)

  def before_step(scheduler, n):
    if n == 3:
      for seed in (1, 2):
        scheduler.offer_params(lab.weights(engine, seed), seed)
        assert scheduler.awaits_params

  results = lab.run(
    engine,
    [first, late],
    scheduler=scheduler,
    arrivals=[0, 3],
    before_step=before_step,
  )
  assert set(results[0, 0, 0].policy_versions) == {0}
  assert set(results[0, 1, 0].policy_versions) == {2}


@pytest.mark.parametrize('policy', ['keep', 'recompute', 'drain'])
def test_an_idle_engine_takes_weights_at_once(lab, policy):
  engine = lab.engine(on_new_weights=policy)
  scheduler = Scheduler(engine)
  scheduler.offer_params(lab.weights(engine, 0), 7)
  assert scheduler.policy_version == 7
  assert not scheduler.awaits_params
  assert scheduler.idle


# ---- stop strings, penalties, biases


def _spell(tokens):
  """Two characters a token: every other boundary is inside a token."""
  return ''.join(f'{t:02d}' for t in tokens)


def _wanted(completion, stop):
  """How many tokens complete the first `stop` in a longer completion."""
  for n in range(len(completion.tokens) + 1):
    if stop in _spell(completion.tokens[:n]):
      return n
  return None


@pytest.mark.parametrize('pages', [0, 16])
def test_a_stop_string_cuts_what_would_have_come_without_it(lab, pages):
  engine = lab.engine()
  whole = lab.run(engine, [lab.request(i, 3 + i, 2) for i in range(6)])
  stop = '1'
  requests = [
    lab.request(i, 3 + i, 2, stop_strings=(stop, 'never')) for i in range(6)
  ]
  scheduler = lab.scheduler(engine, decode=_spell)
  results = lab.run(engine, requests, scheduler=scheduler, pages=pages)
  cut = 0
  for key, c in results.items():
    n = _wanted(whole[key], stop)
    np.testing.assert_array_equal(c.tokens, whole[key].tokens[:n])
    assert c.finish_reason == ('length' if n is None else 'stop')
    assert stop not in c.text(_spell)
    cut += n is not None and n < len(whole[key].tokens)
  assert cut > 3, cut
  assert (scheduler.preemptions > 0) == (pages > 0)


ADJUSTED = [
  {'repetition_penalty': 1.8, 'temperature': 0},
  {'presence_penalty': 1.5, 'frequency_penalty': 0.7},
  {'min_tokens': 9, 'stop_ids': (8, 14, 0), 'temperature': 1.3},
  {'logit_bias': ((5, 3.0), (60, 3.5))},
  {'repetition_penalty': 1.3, 'top_k': 9, 'logit_bias': ((7, -2.0),)},
  {'frequency_penalty': 2.0, 'min_tokens': 15, 'stop_ids': (1, 2, 3)},
  {'stop_ids': (8, 14, 0)},
]


def _log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_penalties_are_those_of_the_sequence_so_far(lab):
  """Every draw against the model's own logits, changed by hand."""
  engine = lab.engine(logit_biases=2)
  requests = [
    lab.request(i, 2 + 2 * i, 2, **keys) for i, keys in enumerate(ADJUSTED)
  ]
  results = lab.run(engine, requests)
  for c in results.values():
    prompt, tokens = c.request.prompt.tokens, c.tokens
    given = c.request.sampling
    logits = lab.logits(np.concatenate([prompt, tokens]))[len(prompt) - 1 :]
    for t, token in enumerate(tokens):
      x = np.array(logits[t], np.float64)
      for i, bias in given.logit_bias:
        x[i] += bias
      drawn = tokens[:t].tolist()
      for i in {*prompt.tolist(), *drawn}:
        r = given.repetition_penalty
        x[i] = x[i] / r if x[i] > 0 else x[i] * r
      for i in set(drawn):
        x[i] -= given.presence_penalty
        x[i] -= given.frequency_penalty * drawn.count(i)
      if t < given.min_tokens:
        assert token not in given.stop_ids
        x[list(given.stop_ids)] = -np.inf
      if given.temperature == 0:
        assert x[token] >= x.max() - 1e-4
      want = _log_softmax(x / (given.temperature or 1))[token]
      got = c.behavior_logprobs[t] + c.kept_logmass[t]
      assert abs(got - want) < 1e-4, (given, t)
  lengths = [len(c.tokens) for k, c in results.items() if k[1] == 2]
  assert min(lengths) >= 10  # the stop token may come after `min_tokens`
  # Preempted and recomputed, what was drawn still counts.
  tight = lab.run(engine, requests, pages=lab.minimum(engine))
  lab.assert_equal(tight, results)
  # Beside adjusted neighbours, and on an engine that counts nothing.
  plain = lab.run(lab.engine(), requests[-1:])
  np.testing.assert_array_equal(plain[0, 6, 1].tokens, results[0, 6, 1].tokens)


@pytest.mark.parametrize(
  'logit_biases, keys, message',
  [
    (None, {'min_tokens': 1}, 'built without'),
    (None, {'logit_bias': ((1, 1.0),)}, 'built without'),
    (2, {'logit_bias': ((1, 1.0), (2, 1.0), (3, 1.0))}, '3 logit b.* most 2'),
    (2, {'logit_bias': ((64, 1.0),)}, 'token ids go from 0 to 63'),
    (2, {'stop_strings': ('x',)}, 'stop_strings=.*without `decode`'),
  ],
)
def test_requests_that_the_engine_cannot_honour(
  lab, logit_biases, keys, message
):
  scheduler = lab.scheduler(lab.engine(logit_biases=logit_biases))
  with pytest.raises(ValueError, match=message):
    scheduler.submit(lab.request(**keys))
  assert scheduler.idle
