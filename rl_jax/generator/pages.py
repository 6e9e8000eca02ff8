"""Which KV pages are free and what full ones hold: a host allocator.

Pages are reference-counted. A page that nobody owns any more keeps what it
holds until it is handed out again, so a prompt that begins as an earlier one
did finds its first pages there (`match`): the same system prompt in another
row, the turns of a conversation so far, a sample that was preempted. What a
page holds is known by its tokens and by the page before it, which makes the
known pages a radix tree with a page an edge; least used leaves go first.

Page 0 is never handed out: it is where the writes of padding go. Pages that
hold nothing are handed out first, lowest first, so that a run is reproducible.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

TRASH_PAGE = 0
_Key = tuple[int, bytes]  # (node of the page before, tokens)
_ROOT = 0


class OutOfPages(Exception):
  """The pool cannot serve a request now; the scheduler makes room."""


class PagePool:
  """Reference-counted pages 1 .. num_pages - 1 of `page_size` tokens.

  Example:
    pool = PagePool(4, page_size=2)
    a, b = pool.allocate(2)   # pages 1, 2
    pool.share([a])           # a second owner of page 1
    pool.release([a, b])      # page 2 is free again, page 1 still owned
    pool.remember(np.array([7, 8]), [a])
    pool.release([a])         # free, but still known:
    pool.match(np.array([7, 8, 9]))  # [1], owned again
  """

  def __init__(self, num_pages: int, page_size: int):
    if num_pages < 2:
      raise ValueError(f'{num_pages=}: must be >= 2 (page 0 holds padding).')
    self._size = page_size
    self._counts = np.zeros(num_pages, np.int32)
    self._blank = list(range(1, num_pages))  # free ones that hold nothing
    self._kept: OrderedDict[int, None] = OrderedDict()  # free, least used first
    self._page_of: dict[_Key, int] = {}
    self._known: dict[int, tuple[_Key, int]] = {}  # page -> its key and node
    self._nodes = itertools.count(_ROOT + 1)

  @property
  def num_free(self) -> int:
    return len(self._blank) + len(self._kept)

  def allocate(self, count: int) -> list[int]:
    """`count` pages of one owner each, or OutOfPages and nothing taken."""
    if count > self.num_free:
      raise OutOfPages(f'{count} pages wanted, {self.num_free} free')
    pages = [self._take_free() for _ in range(count)]
    self._counts[pages] = 1
    return pages

  def _take_free(self) -> int:
    if self._blank:
      return heapq.heappop(self._blank)
    page, _ = self._kept.popitem(last=False)
    # The pages after it are not found any more, and go in their turn.
    key, _ = self._known.pop(page)
    del self._page_of[key]
    return page

  def share(self, pages: Sequence[int]) -> None:
    """Adds an owner to each page."""
    for page in pages:
      assert self._counts[page] > 0, f'page {page} is free'
      self._counts[page] += 1

  def release(self, pages: Sequence[int]) -> None:
    """Takes an owner off each page of a sequence, in order.

    A page without owners is free; of a sequence, the last one goes first.
    """
    for page in reversed(pages):
      assert self._counts[page] > 0, f'page {page} freed twice'
      self._counts[page] -= 1
      if self._counts[page] == 0:
        if page in self._known:
          self._kept[page] = None
        else:
          heapq.heappush(self._blank, page)

  # ---- what pages hold

  def match(self, tokens: np.ndarray) -> list[int]:
    """Pages with the longest known beginning of `tokens`, less one token.

    The caller becomes an owner. The last token is never among them: somebody
    wants to know what comes after it.
    """
    pages, node = [], _ROOT
    for key in self._keys(tokens[:-1]):
      page = self._page_of.get((node, key))
      if page is None:
        break
      node = self._known[page][1]
      self._kept.pop(page, None)
      self._counts[page] += 1
      pages.append(page)
    return pages

  def remember(self, tokens: np.ndarray, pages: Sequence[int]) -> None:
    """Says that `pages` hold the keys and values of `tokens`, from the first.

    Tokens that do not fill a page are not remembered, nor is a page whose
    tokens are known in another one. The caller owns the pages.
    """
    node = _ROOT
    for key, page in zip(self._keys(tokens), pages):
      assert self._counts[page] > 0, f'page {page} is free'
      known = self._page_of.get((node, key))
      if known is None:
        known, mine = page, next(self._nodes)
        if page in self._known:  # after a page that was handed out since
          before, mine = self._known[page]
          del self._page_of[before]
        self._page_of[node, key] = page
        self._known[page] = (node, key), mine
      node = self._known[known][1]

  def forget(self) -> None:
    """No page is known any more: the weights are new."""
    self._page_of.clear()
    self._known.clear()
    for page in self._kept:
      heapq.heappush(self._blank, page)
    self._kept.clear()

  def _keys(self, tokens: np.ndarray) -> list[bytes]:
    whole = len(tokens) // self._size * self._size
    if not whole:
      return []
    rows = np.ascontiguousarray(tokens[:whole], np.int32)
    return [row.tobytes() for row in rows.reshape(-1, self._size)]
