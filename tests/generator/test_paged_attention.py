"""Attention against pages equals a dense softmax in float64.

Letters as in the module: B rows, T new tokens, N query heads, K kv heads,
H head dim, W pages of a row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.generator.kv_layout import KVLayout, Pages
from rl_jax.generator.paged_attention import attend_pages
from rl_jax.generator.pages import TRASH_PAGE

H, MAX_LENGTH = 8, 19
LENGTHS = (13, 1, 19, 4)  # tokens of each row in the end


@functools.partial(jax.jit)
def _attend(table, positions, valid, q, k, v, keys, values):
  layout = KVLayout(str(keys.values.dtype))
  return attend_pages(table, positions, valid, layout)(q, k, v, (keys, values))


class Rows:
  """Sequences with their dense truth, and a pool that they share."""

  def __init__(self, page_size, heads=(4, 2), dtype=np.float32):
    rng = np.random.default_rng(page_size)
    N, K = heads
    B, T, W = len(LENGTHS), MAX_LENGTH, -(-MAX_LENGTH // page_size)
    self.size = page_size
    self.q = rng.standard_normal((B, T, N, H)).astype(np.float32)
    self.k = rng.standard_normal((B, T, K, H)).astype(np.float32)
    self.v = rng.standard_normal((B, T, K, H)).astype(np.float32)
    self.want = np.stack(
      [_dense(q, k, v) for q, k, v in zip(self.q, self.k, self.v)]
    )
    num_pages = 3 * B * W + 1
    order = 1 + rng.permutation(num_pages - 1)
    self.table = np.zeros((B, W), np.int32)
    for b, length in enumerate(LENGTHS):
      used = -(-length // page_size)
      self.table[b, :used], order = order[:used], order[used:]
    # What nobody wrote is not a number: it must never be looked at.
    shape = (num_pages, K, page_size, H)
    scale = None
    if dtype == np.int8:
      scale = np.full(shape[:-1], np.nan, np.float32)
    fill = 0 if dtype == np.int8 else np.nan
    self.cache = tuple(
      Pages(np.full(shape, fill, dtype), scale) for _ in range(2)
    )

  def append(self, start, count, width):
    """Attends `count[b]` tokens from `start[b]` on; results, rows of lists."""
    offsets = np.minimum(np.arange(width), np.maximum(count, 1)[:, None] - 1)
    valid = np.arange(width) < count[:, None]
    at = start[:, None] + offsets
    rows = np.arange(len(start))[:, None]
    q, k, v = (x[rows, at].copy() for x in (self.q, self.k, self.v))
    for x in (q, k, v):
      x[~valid] = np.nan  # what is not valid is not to be looked at either
    out, self.cache = _attend(
      self.table, at.astype(np.int32), valid, q, k, v, *self.cache
    )
    return [np.asarray(out[b, : count[b]]) for b in range(len(start))]

  def check(self, start, count, width, atol=2e-6):
    for b, got in enumerate(self.append(start, count, width)):
      want = self.want[b, start[b] : start[b] + count[b]]
      np.testing.assert_allclose(got, want, atol=atol)


def _dense(q_TNH, k_TKH, v_TKH):
  """Causal attention of the last T tokens of one row, in float64."""
  T, N, _ = q_TNH.shape
  before = len(k_TKH) - T
  q, k, v = (x.astype(np.float64) for x in (q_TNH, k_TKH, v_TKH))
  out = np.zeros_like(q)
  for n in range(N):
    group = n // (N // k.shape[1])
    for t in range(T):
      seen = slice(before + t + 1)
      scores = k[seen, group] @ q[t, n] / np.sqrt(H)
      weights = np.exp(scores - scores.max())
      out[t, n] = weights @ v[seen, group] / weights.sum()
  return out


ALL = np.array(LENGTHS)
NONE = np.zeros(len(LENGTHS), int)


@pytest.mark.parametrize('heads', [(4, 4), (4, 2), (4, 1)])
def test_prefill_in_one_piece(heads):
  Rows(3, heads).check(NONE, ALL, MAX_LENGTH)


@pytest.mark.parametrize('page_size', [1, 3, 16])
def test_prefill_in_chunks_then_decode(page_size):
  rows = Rows(page_size)
  prompt = np.array([8, 1, 10, 3])
  for begin in range(0, 10, 5):
    rows.check(
      np.minimum(begin, prompt - 1), np.clip(prompt - begin, 0, 5), width=5
    )
  length = prompt
  while (length < ALL).any():  # rows that are done idle beside the others
    active = (length < ALL).astype(int)
    rows.check(np.minimum(length, ALL - 1), active, width=1)
    length = length + active


def test_writes_reach_the_rows_own_places_only():
  rows = Rows(3)
  start, count = np.array([2, 0, 7, 0]), np.array([4, 1, 5, 0])
  zeros = np.zeros_like(rows.cache[0].values)
  rows.cache = (Pages(zeros, None), Pages(zeros.copy(), None))
  rows.append(start, count, width=5)
  for (cache, _), new in zip(rows.cache, (rows.k, rows.v)):
    want = np.zeros_like(cache)
    for b in range(len(start)):
      for t in range(start[b], start[b] + count[b]):
        want[rows.table[b, t // 3], :, t % 3] = new[b, t]
    np.testing.assert_array_equal(cache[1:], want[1:])
    assert np.isnan(cache[TRASH_PAGE]).any()  # where padding went


def test_a_row_does_not_depend_on_its_neighbours():
  """Bitwise: the long row makes more columns, which add exact zeros."""
  rows, alone = Rows(3), Rows(3)
  beside = rows.append(NONE, ALL, MAX_LENGTH)
  for b, length in enumerate(LENGTHS):
    only = np.zeros_like(ALL)
    only[b] = length
    got = alone.append(NONE, only, MAX_LENGTH)
    np.testing.assert_array_equal(got[b], beside[b])


def test_bfloat16_pages():
  rows = Rows(3, dtype=jnp.bfloat16)
  rows.check(NONE, ALL, MAX_LENGTH, atol=0.03)
  assert all(pages.values.dtype == jnp.bfloat16 for pages in rows.cache)


@pytest.mark.parametrize('page_size', [1, 3, 16])
def test_int8_pages(page_size):
  """In chunks and at once alike: a token's scale is its own."""
  rows, chunked = (Rows(page_size, dtype=np.int8) for _ in range(2))
  whole = rows.append(NONE, ALL, MAX_LENGTH)
  errors = [
    np.abs(got - want[: len(got)]).max() for got, want in zip(whole, rows.want)
  ]
  assert 1e-3 < max(errors) < 0.05
  for begin in range(0, MAX_LENGTH, 5):
    count = np.clip(ALL - begin, 0, 5)
    parts = chunked.append(np.minimum(begin, ALL - 1), count, width=5)
    for b, part in enumerate(parts):
      want = whole[b][begin : begin + len(part)]
      np.testing.assert_allclose(part, want, atol=2e-6)
  assert all(pages.values.dtype == np.int8 for pages in rows.cache)


def test_decode_far_into_long_rows():
  """However many pages are looked at together, rows end where they end."""
  lengths, size, (N, K) = np.array([1100, 513, 512, 1]), 16, (4, 2)
  rng = np.random.default_rng(0)
  B, W = len(lengths), -(-1100 // size)
  k, v = rng.standard_normal((2, B, 1100, K, H)).astype(np.float32)
  q = rng.standard_normal((B, 1, N, H)).astype(np.float32)
  table = 1 + rng.permutation(B * W).reshape(B, W).astype(np.int32)
  keys, values = np.full((2, B * W + 1, K, size, H), np.nan, np.float32)
  for b, length in enumerate(lengths):
    for t in range(length - 1):
      keys[table[b, t // size], :, t % size] = k[b, t]
      values[table[b, t // size], :, t % size] = v[b, t]
  at, last = lengths[:, None] - 1, np.arange(B)
  new = (x[last, lengths - 1][:, None] for x in (k, v))
  pages = (Pages(keys, None), Pages(values, None))
  out, _ = _attend(
    table, at.astype(np.int32), np.ones((B, 1), bool), q, *new, *pages
  )
  for b, length in enumerate(lengths):
    want = _dense(q[b], k[b, :length], v[b, :length])[0]
    np.testing.assert_allclose(out[b, 0], want, atol=2e-6)
