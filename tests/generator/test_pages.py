"""The page allocator, against a model that remembers every owner."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  initialize,
  invariant,
  rule,
)

from rl_jax.generator.pages import TRASH_PAGE, OutOfPages, PagePool


class Traffic(RuleBasedStateMachine):
  """Owners come and go; each remembers the pages that it holds."""

  @initialize(num_pages=st.integers(2, 12))
  def create(self, num_pages):
    self.num_pages = num_pages
    self.pool = PagePool(num_pages)
    self.owners: list[list[int]] = []

  def counts(self):
    return collections.Counter(p for pages in self.owners for p in pages)

  @rule(count=st.integers(0, 12))
  def allocate(self, count):
    owned, free = self.counts(), self.pool.num_free
    if count > free:
      with pytest.raises(OutOfPages, match=f'{count} pages .* {free} free'):
        self.pool.allocate(count)
      return
    pages = self.pool.allocate(count)
    everything = set(range(self.num_pages)) - {TRASH_PAGE}
    assert pages == sorted(everything - set(owned))[:count]
    self.owners.append(pages)

  @rule(data=st.data())
  def share(self, data):
    owned = sorted(self.counts())
    if owned:
      pages = data.draw(st.lists(st.sampled_from(owned), unique=True))
      self.pool.share(pages)
      self.owners.append(pages)

  @rule(data=st.data())
  def release(self, data):
    if self.owners:
      which = data.draw(st.integers(0, len(self.owners) - 1))
      self.pool.release(self.owners.pop(which))

  @rule(data=st.data())
  def misuse_of_a_free_page_changes_nothing(self, data):
    free = sorted(set(range(self.num_pages)) - set(self.counts()))
    page = data.draw(st.sampled_from(free))  # the trash page is among them
    with pytest.raises(AssertionError, match=f'page {page} freed twice'):
      self.pool.release([page])
    with pytest.raises(AssertionError, match=f'page {page} is free'):
      self.pool.share([page])

  @invariant()
  def nothing_is_lost(self):
    assert self.pool.num_free + len(self.counts()) == self.num_pages - 1


Traffic.TestCase.settings = settings(
  max_examples=50, stateful_step_count=30, deadline=None, derandomize=True
)
TestTraffic = Traffic.TestCase


def test_shared_pages_are_free_after_their_last_owner_only():
  pool = PagePool(4)
  a, b = pool.allocate(2)
  assert (a, b) == (1, 2)
  pool.share([a])
  pool.release([a, b])
  assert pool.num_free == 2
  assert pool.allocate(2) == [2, 3]  # page 1 still has an owner
  pool.release([a])
  assert pool.allocate(1) == [1]


def test_out_of_pages_takes_nothing():
  pool = PagePool(4)
  pool.allocate(1)
  with pytest.raises(OutOfPages, match='3 pages wanted, 2 free'):
    pool.allocate(3)
  assert pool.allocate(2) == [2, 3]


def test_one_release_cannot_free_a_page_twice():
  pool = PagePool(4)
  (page,) = pool.allocate(1)
  with pytest.raises(AssertionError, match='freed twice'):
    pool.release([page, page])


def test_a_pool_needs_a_page_beside_the_trash_page():
  with pytest.raises(ValueError, match='num_pages=1: must be >= 2'):
    PagePool(1)
