"""Drafts decide how much is drawn at once, and never what."""

import numpy as np
import pytest

from rl_jax.generator.speculation import Drafter

# ---- where drafts come from


def test_a_draft_is_what_came_last_time():
  drafter = Drafter(3)
  drafter.begin('r', [1, 2, 3, 4, 5, 9, 1], num_samples=2)
  drafter.append('r', 0, 2)  # ... 1 2: in the prompt, 3 4 5 came after it
  assert drafter.draft('r', 0) == [3, 4, 5]
  for token in (3, 7, 8, 6):
    drafter.append('r', 0, token)
  drafter.append('r', 1, 2)  # the sibling's 1 2 is newer than the prompt's
  assert drafter.draft('r', 1) == [3, 7, 8]
  drafter.append('r', 1, 4)  # nobody had 2 4
  assert drafter.draft('r', 1) == []


def test_more_of_the_same_tokens_count_more():
  drafter = Drafter(1)
  drafter.begin('r', [1, 2, 3, 4, 0, 2, 3, 5, 0, 1, 2], num_samples=1)
  drafter.append('r', 0, 3)
  assert drafter.draft('r', 0) == [4]  # after 1 2 3, not the newer 2 3


def test_groups_do_not_see_each_other_and_end_with_their_last_sample():
  drafter = Drafter(2)
  drafter.begin('a', [1, 2, 3], num_samples=2)
  drafter.begin('b', [1], num_samples=1)
  drafter.append('b', 0, 2)
  assert drafter.draft('b', 0) == []
  for _ in range(2):
    drafter.append('a', 0, 1)
    drafter.end('a')
  with pytest.raises(KeyError):
    drafter.draft('a', 0)


def test_gain_is_the_mean_of_the_last_drafts():
  drafter = Drafter(4)
  drafter.begin('r', [1, 2], num_samples=1)
  assert drafter.expected('r') == 0
  drafter.judge('r', [5, 6, 7], [5, 6, 9, 9])
  assert drafter.expected('r') == pytest.approx(0.2 * 2)
  drafter.judge('r', [5], [6])
  assert drafter.expected('r') == pytest.approx(0.8 * 0.4)


# ---- what is drawn


def repetitive(lab, **sampling):
  """Few tokens are likely, so that drafts are often right."""
  return [
    lab.request(i, 3 + i, num_samples=3, **{'top_k': 2, **sampling})
    for i in range(5)
  ]


@pytest.mark.parametrize('speculate', [1, 4])
@pytest.mark.parametrize(
  'sampling',
  [
    {'temperature': 0},
    {'temperature': 0.3},
    {'temperature': 1.0, 'stop_ids': (8, 14, 25)},
    {'temperature': 0, 'max_tokens': 2},
  ],
)
def test_tokens_are_those_without_speculation(
  lab, monkeypatch, speculate, sampling
):
  from rl_jax.generator import scheduler as module

  requests = repetitive(lab, **sampling)
  plain = lab.run(lab.engine(), requests)
  monkeypatch.setattr(module, '_WORTH', 0.0)  # verify whenever one can
  engine = lab.engine(speculate=speculate)
  scheduler = lab.scheduler(engine)
  guessed = lab.run(engine, requests, scheduler=scheduler)
  lab.assert_equal(guessed, plain)
  lab.assert_parity(guessed) if sampling['temperature'] else None
  if sampling.get('max_tokens') != 2:
    assert scheduler.tokens_guessed > 0
  # In the smallest pool, where samples are preempted, too.
  scheduler = lab.scheduler(engine)
  tight = lab.run(
    engine, requests, scheduler=scheduler, pages=lab.minimum(engine)
  )
  lab.assert_equal(tight, plain)
  if sampling.get('max_tokens') != 2:
    assert scheduler.preemptions > 0


def test_a_wrong_draft_costs_nothing_but_time(lab):
  request = lab.request(1, 6, temperature=0)
  (wanted,) = lab.run(lab.engine(), [request]).values()
  tokens = wanted.tokens.tolist()
  engine = lab.engine(speculate=4)
  engine.load_params(lab.weights(engine, 0), 0)

  def drawn_with(guess):
    prefix = engine.start(request, request.prompt.tokens, [0])
    while not prefix.complete:
      engine.prefill([prefix])
    engine.insert(prefix, {0: 2})
    engine.drop(prefix)
    found = [prefix.first[0].token]
    while engine.is_active(2):
      engine.reserve(2)
      new = engine.generate({2: guess(found)})[2]
      found += [x.token for x in new]
      lengths.append(len(new))
    engine.free(2)
    return found

  lengths: list[int] = []
  assert drawn_with(lambda found: []) == tokens
  assert set(lengths) == {1}
  lengths.clear()
  assert drawn_with(lambda found: tokens[len(found) :][:4]) == tokens
  assert lengths == [5, 5, 4]
  lengths.clear()
  wrong = lambda found: [*tokens[len(found) :][:2], 63, 1]  # noqa: E731
  assert drawn_with(wrong) == tokens
  assert set(lengths[:-1]) == {3}


def test_nothing_is_verified_where_it_does_not_pay(lab):
  """A high temperature repeats nothing: only the first dispatch verifies."""
  engine = lab.engine(speculate=4)
  calls, generate = [], engine.generate
  engine.generate = lambda drafts=None: (
    calls.append(drafts is not None) or generate(drafts)
  )
  try:
    requests = [lab.request(i, 5, 2, temperature=5.0) for i in range(6)]
    lab.run(engine, requests)
  finally:
    del engine.generate
  assert calls[0] and sum(calls) <= len(calls) // 4


def test_penalties_are_not_speculated_with(lab):
  requests = [lab.request(i, 4, 2, repetition_penalty=1.5) for i in range(2)]
  wanted = lab.run(lab.engine(logit_biases=2), requests)
  engine = lab.engine(speculate=4, logit_biases=2)
  scheduler = lab.scheduler(engine)
  lab.assert_equal(lab.run(engine, requests, scheduler=scheduler), wanted)
  assert scheduler.tokens_guessed == 0
  assert np.isfinite(wanted[0, 0, 0].behavior_logprobs).all()
