"""The page allocator, against a model that remembers every owner."""

import collections

import numpy as np
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
    self.pool = PagePool(num_pages, page_size=2)
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


class Contents(RuleBasedStateMachine):
  """Sequences of few tokens come and go; what each page holds is known here.

  `self.held` has, for each page, the tokens up to its end. Whatever is matched
  must hold just that.
  """

  SIZE = 2
  sequences = st.lists(st.integers(0, 1), min_size=1, max_size=9)

  @initialize(num_pages=st.integers(6, 14))
  def create(self, num_pages):
    self.num_pages = num_pages
    self.pool = PagePool(num_pages, self.SIZE)
    self.held: dict[int, tuple[int, ...]] = {}
    self.owners: list[tuple[list[int], list[int]]] = []  # tokens, pages

  @rule(tokens=sequences)
  def begin(self, tokens):
    """As an engine does: match, allocate the rest, write it, remember it."""
    pages = self.pool.match(np.array(tokens, np.int32))
    assert len(pages) * self.SIZE < len(tokens)
    for i, page in enumerate(pages):
      assert self.held[page] == tuple(tokens[: (i + 1) * self.SIZE])
    missing = -(-len(tokens) // self.SIZE) - len(pages)
    try:
      pages += self.pool.allocate(missing)
    except OutOfPages:
      self.pool.release(pages)
      return
    in_use = {p for _, owned in self.owners for p in owned}
    assert not in_use & set(pages[len(pages) - missing :])
    for i in range(len(pages) - missing, len(pages)):
      self.held[pages[i]] = tuple(tokens[: (i + 1) * self.SIZE])
    self.owners.append((tokens, pages))

  @rule(data=st.data(), known=st.booleans())
  def end(self, data, known):
    if self.owners:
      which = data.draw(st.integers(0, len(self.owners) - 1))
      tokens, pages = self.owners.pop(which)
      if known:
        self.pool.remember(np.array(tokens, np.int32), pages)
        again = self.pool.match(np.array([*tokens, 0], np.int32))
        assert len(again) == len(tokens) // self.SIZE
        self.pool.release(again)
      self.pool.release(pages)

  @rule(data=st.data())
  def tell(self, data):
    """Of a prompt, when it is prefilled; its pages are still owned."""
    if self.owners:
      tokens, pages = data.draw(st.sampled_from(self.owners))
      self.pool.remember(np.array(tokens, np.int32), pages)

  @rule()
  def forget(self):
    self.pool.forget()
    for tokens, _ in self.owners:
      assert self.pool.match(np.array(tokens, np.int32)) == []

  @invariant()
  def nothing_is_lost(self):
    owned = {p for _, pages in self.owners for p in pages}
    assert self.pool.num_free + len(owned) == self.num_pages - 1


Contents.TestCase.settings = settings(
  max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)
TestContents = Contents.TestCase


def _known(pool, *tokens):
  """How many pages of the tokens are known; takes none."""
  pages = pool.match(np.array([*tokens, 0], np.int32))
  pool.release(pages)
  return len(pages)


@pytest.mark.parametrize(
  'taken, left',
  [
    (1, (2, 1, 2)),
    (2, (1, 1, 2)),
    (3, (1, 0, 2)),
    (4, (1, 0, 1)),
    (5, (0,) * 3),
  ],
)
def test_what_was_used_least_goes_first_and_of_a_sequence_its_end(taken, left):
  sequences = ([1, 2, 3, 4], [5, 6], [1, 2, 7, 8])
  pool = PagePool(6, page_size=2)
  for tokens in sequences:
    pages = pool.match(np.array([*tokens, 0]))
    pages += pool.allocate(len(tokens) // 2 - len(pages))
    pool.remember(np.array(tokens), pages)
    pool.release(pages)
  assert pool.num_free == 5  # four of them are known
  pool.allocate(taken)
  assert tuple(_known(pool, *tokens) for tokens in sequences) == left


def test_a_page_is_known_after_what_came_before_it_only():
  pool = PagePool(8, page_size=2)
  pages = pool.allocate(2)
  pool.remember(np.array([1, 2, 3, 4, 5]), pages)  # the 5 fills no page
  assert _known(pool, 1, 2, 3, 4, 5) == 2
  assert _known(pool, 3, 4) == _known(pool, 3, 4, 1, 2) == 0
  # The same tokens once more: the first ones stay the known ones.
  twins = pool.allocate(3)
  pool.remember(np.array([1, 2, 3, 4, 5, 6]), twins)
  assert pool.match(np.array([1, 2, 3, 4, 5, 6, 7])) == [*pages, twins[2]]


def test_shared_pages_are_free_after_their_last_owner_only():
  pool = PagePool(4, page_size=2)
  a, b = pool.allocate(2)
  assert (a, b) == (1, 2)
  pool.share([a])
  pool.release([a, b])
  assert pool.num_free == 2
  assert pool.allocate(2) == [2, 3]  # page 1 still has an owner
  pool.release([a])
  assert pool.allocate(1) == [1]


def test_out_of_pages_takes_nothing():
  pool = PagePool(4, page_size=2)
  pool.allocate(1)
  with pytest.raises(OutOfPages, match='3 pages wanted, 2 free'):
    pool.allocate(3)
  assert pool.allocate(2) == [2, 3]


def test_one_release_cannot_free_a_page_twice():
  pool = PagePool(4, page_size=2)
  (page,) = pool.allocate(1)
  with pytest.raises(AssertionError, match='freed twice'):
    pool.release([page, page])


def test_a_pool_needs_a_page_beside_the_trash_page():
  with pytest.raises(ValueError, match='num_pages=1: must be >= 2'):
    PagePool(1, page_size=2)


def test_a_page_that_is_told_twice_is_known_once():
  """Between the two, the page before it was handed out; it was a twin's."""
  pool = PagePool(6, page_size=2)
  tokens = np.array([1, 2, 3, 4])
  twin = pool.allocate(1)
  pool.remember(tokens[:2], twin)
  mine = pool.allocate(2)
  pool.remember(tokens, mine)  # the first page is known as the twin's
  pool.release(twin)
  hoard = pool.allocate(3)
  assert _known(pool, *tokens) == 0  # nothing leads to the second one
  pool.remember(tokens, mine)
  assert _known(pool, *tokens) == 2
  pool.release(mine)
  pool.allocate(1)
  assert _known(pool, *tokens) == 1
  pool.release(hoard)
