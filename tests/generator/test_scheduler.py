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
  return requests, aborts, pages, draw(st.sampled_from(['fifo', 'longest']))


@settings(max_examples=40, deadline=None)
@given(traffic=_traffic())
def test_random_traffic(lab, traffic):
  """Every sample comes back once, with the tokens that it has alone.

  Of a request that is aborted, as far as it had come. No page is leaked, freed
  twice or written by one owner and read by another.
  """
  drawn, aborts, pages, order = traffic
  engine = lab.engine(order=order)
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
