"""Which KV pages are free: a host allocator with reference counts.

Knows page numbers only, not what they hold. Page 0 is never handed out: it
is where the writes of padding go. Pages are handed out lowest first, so that
a run is reproducible.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

TRASH_PAGE = 0


class OutOfPages(Exception):
  """The pool cannot serve a request now; the scheduler makes room."""


class PagePool:
  """Reference-counted pages 1 .. num_pages - 1.

  Example:
    pool = PagePool(4)
    a, b = pool.allocate(2)   # pages 1, 2
    pool.share([a])           # a second owner of page 1
    pool.release([a, b])      # page 2 is free again, page 1 still owned
  """

  def __init__(self, num_pages: int):
    if num_pages < 2:
      raise ValueError(f'{num_pages=}: must be >= 2 (page 0 holds padding).')
    self._counts = np.zeros(num_pages, np.int32)
    self._free = list(range(1, num_pages))

  @property
  def num_free(self) -> int:
    return len(self._free)

  def allocate(self, count: int) -> list[int]:
    """`count` pages of one owner each, or OutOfPages and nothing taken."""
    if count > len(self._free):
      raise OutOfPages(f'{count} pages wanted, {len(self._free)} free')
    pages = [heapq.heappop(self._free) for _ in range(count)]
    self._counts[pages] = 1
    return pages

  def share(self, pages: Sequence[int]) -> None:
    """Adds an owner to each page."""
    for page in pages:
      assert self._counts[page] > 0, f'page {page} is free'
      self._counts[page] += 1

  def release(self, pages: Sequence[int]) -> None:
    """Takes an owner off each page; a page without owners is free."""
    for page in pages:
      assert self._counts[page] > 0, f'page {page} freed twice'
      self._counts[page] -= 1
      if self._counts[page] == 0:
        heapq.heappush(self._free, page)
