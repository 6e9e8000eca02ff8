"""What may be admitted when, by tables worked by hand; waiting, by threads."""

import sys
import threading
import time

import numpy as np
import pytest

from rl_jax.rollout.buffer import GroupBuffer
from rl_jax.types import Group, Prompt


def make_group(index):
  return Group(Prompt(index, f'a/{index}', 'x', np.int32([1]), '1'), [])


def put(buffer, *indices):
  for index in indices:
    buffer.put(index, make_group(index))


def ids(groups):
  return [group.prompt.prompt_id for group in groups]


def in_thread(function):
  """(thread, results): what `function` returned or raised, in a thread."""
  results = []

  def run():
    try:
      results.append(function())
    except RuntimeError as e:
      results.append(e)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  return thread, results


@pytest.mark.parametrize(
  'max_staleness, admitted',
  [
    # Two groups a step, five steps; by version 0, 1, ..., 5.
    (0, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 10)]),
    (1, [(0, 4), (4, 6), (6, 8), (8, 10), (10, 10), (10, 10)]),
    (3, [(0, 8), (8, 10), (10, 10), (10, 10), (10, 10), (10, 10)]),
    (9, [(0, 10), (10, 10), (10, 10), (10, 10), (10, 10), (10, 10)]),
  ],
)
def test_admission_by_version(max_staleness, admitted):
  buffer = GroupBuffer(2, max_staleness, num_steps=5)
  assert not buffer.has_room  # before the first version
  assert list(buffer.admit()) == []
  for version, (first, end) in enumerate(admitted):
    buffer.advance(version)
    assert buffer.has_room == (end > first)
    assert list(buffer.admit()) == list(range(first, end))
    assert not buffer.has_room
    assert list(buffer.admit()) == []  # once only
    assert buffer.num_admitted == end


def test_versions_that_were_skipped_are_made_up_for():
  buffer = GroupBuffer(2, 0, num_steps=5)
  buffer.advance(2)
  assert list(buffer.admit()) == [0, 1, 2, 3, 4, 5]


def test_a_run_of_no_steps_admits_nothing():
  buffer = GroupBuffer(2, 3, num_steps=0)
  buffer.advance(0)
  assert not buffer.has_room
  assert list(buffer.admit()) == []


def test_step_of_an_index():
  buffer = GroupBuffer(3, 1, num_steps=4)
  assert [buffer.step_of(i) for i in range(7)] == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize('max_staleness', [0, 1, 3])
def test_bounded_in_order_and_never_too_stale(max_staleness):
  n, num_steps = 3, 12
  buffer = GroupBuffer(n, max_staleness, num_steps)
  admitted_at = {}
  taken = []
  for version in range(num_steps):
    buffer.advance(version)
    for index in buffer.admit():
      admitted_at[index] = version
    waiting = set(admitted_at) - set(taken)
    assert len(waiting) <= (max_staleness + 1) * n
    for index in sorted(waiting - set(buffer.ready()), reverse=True):
      put(buffer, index)
    groups = ids(buffer.take(0))
    assert groups == list(range(version * n, (version + 1) * n))
    assert all(version - admitted_at[i] <= max_staleness for i in groups)
    taken += groups
  assert taken == list(range(n * num_steps)) == sorted(admitted_at)
  assert buffer.ready() == {}


def test_take_waits_for_the_oldest_whatever_else_is_there():
  buffer = GroupBuffer(2, 3, num_steps=4)
  buffer.advance(0)
  buffer.admit()
  put(buffer, 7, 3, 2, 1)
  assert buffer.take(0) is None
  assert sorted(buffer.ready()) == [1, 2, 3, 7]
  put(buffer, 0)
  assert ids(buffer.take(0)) == [0, 1]
  assert ids(buffer.take(0)) == [2, 3]
  assert buffer.take(0) is None
  assert sorted(buffer.ready()) == [7]


def test_ready_is_a_snapshot():
  buffer = GroupBuffer(1, 0, num_steps=1)
  buffer.advance(0)
  buffer.admit()
  put(buffer, 0)
  buffer.ready().clear()
  assert ids(buffer.take(0)) == [0]


def test_the_last_put_wakes_a_waiting_take():
  buffer = GroupBuffer(2, 0, num_steps=1)
  buffer.advance(0)
  buffer.admit()
  thread, results = in_thread(buffer.take)
  put(buffer, 1, 0)
  thread.join(10)
  assert ids(results[0]) == [0, 1]


def waits(thread):
  """Until the thread stands in `take`'s wait, as far as can be seen."""
  end = time.monotonic() + 5
  while thread.is_alive() and time.monotonic() < end:
    if _is_in(thread, 'wait_for'):
      return


def _is_in(thread, name):
  frame = sys._current_frames().get(thread.ident)
  while frame is not None:
    if frame.f_code.co_name == name:
      return True
    frame = frame.f_back
  return False


def test_fail_wakes_a_waiting_take_within_a_second():
  buffer = GroupBuffer(2, 0, num_steps=1)
  thread, results = in_thread(buffer.take)
  waits(thread)
  error = RuntimeError('the producer died')
  begin = time.monotonic()
  buffer.fail(error)
  thread.join(10)
  assert time.monotonic() - begin < 1
  assert results == [error]


def test_a_failure_stays_and_the_first_one_counts():
  buffer = GroupBuffer(1, 0, num_steps=2)
  buffer.advance(0)
  buffer.admit()
  put(buffer, 0)
  buffer.fail(RuntimeError('first'))
  buffer.fail(RuntimeError('second'))
  for _ in range(2):
    with pytest.raises(RuntimeError, match='first'):
      buffer.take(0)


def test_restore_goes_on_where_the_run_was_saved():
  # Saved after step 2 with one group of step 3 finished, one in flight.
  buffer = GroupBuffer(2, 1, num_steps=5, next_step=3)
  saved = {6: make_group(6)}
  buffer.restore(8, saved)
  saved.clear()  # the caller's own
  assert sorted(buffer.ready()) == [6]
  assert list(buffer.admit()) == []
  buffer.advance(3)
  assert list(buffer.admit()) == [8, 9]  # step 4, the last
  assert buffer.take(0) is None
  put(buffer, 7)
  assert ids(buffer.take(0)) == [6, 7]


@pytest.mark.parametrize(
  'num_steps, admitted', [(3, []), (4, []), (5, [8, 9]), (9, [8, 9])]
)
def test_a_resumed_run_may_be_longer_or_shorter(num_steps, admitted):
  buffer = GroupBuffer(2, 1, num_steps, next_step=3)
  buffer.restore(8, {})
  buffer.advance(3)
  assert list(buffer.admit()) == admitted
  assert buffer.num_admitted == 8 + len(admitted)


def test_groups_of_nowhere_are_our_bug():
  buffer = GroupBuffer(1, 0, num_steps=2)
  buffer.advance(0)
  buffer.admit()
  with pytest.raises(AssertionError):
    put(buffer, 1)  # not admitted
  put(buffer, 0)
  with pytest.raises(AssertionError):
    put(buffer, 0)  # there already
  buffer.take(0)
  with pytest.raises(AssertionError):
    put(buffer, 0)  # consumed: it would stay for ever


def test_a_take_that_could_only_wait_for_ever_is_our_bug():
  buffer = GroupBuffer(1, 0, num_steps=1)
  buffer.advance(0)
  buffer.admit()
  put(buffer, 0)
  buffer.take(0)
  with pytest.raises(AssertionError, match='nothing is admitted'):
    buffer.take()


@pytest.mark.parametrize('n, max_staleness', [(0, 0), (-1, 0), (1, -1)])
def test_bad_sizes_are_refused(n, max_staleness):
  message = f'prompts_per_step={n} .*max_staleness={max_staleness} '
  with pytest.raises(ValueError, match=message):
    GroupBuffer(n, max_staleness, num_steps=1)
