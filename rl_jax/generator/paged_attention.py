"""Attention of new tokens against KV pages: the tested truth everywhere.

One function serves decode (T = 1), prefill and chunked prefill (T > 1): new
keys and values are first written to their pages, then a few rows at a time
attend to their pages, a block of pages at a time with an online softmax
(arXiv:1805.02867), as far as the longest of those rows goes. Few rows, since
what is gathered for them then stays in a core's cache. Within a block the terms
are added as the learner adds them (`models.attention.softmax_parts`), so for
rows of one block both agree to the last bit on CPU.

Letters: B rows, T new tokens, N query heads, K kv heads, G = N / K,
X = G * T, H head dim, P pages of the pool, W pages of a row, Z tokens of a
page, C pages of a block, S = C * Z.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.generator.pages import TRASH_PAGE
from rl_jax.models.attention import (
  HIDDEN,
  KEY_MULTIPLE,
  Attend,
  softmax_parts,
)

_BLOCK_TOKENS = 512  # keys of a row that are gathered at once
_ROWS = 4  # rows that are gathered at once; all of them: 4 times slower on CPU


def attend_pages(
  table_BW: jax.Array | np.ndarray,
  positions_BT: jax.Array,
  valid_BT: jax.Array,
) -> Attend:
  """An `attend` whose cache is one layer's (keys, values), [P, K, Z, H] each.

  Args:
    table_BW: int32, the pages of each row in order.
    positions_BT: int32, where in its sequence each new token stands.
    valid_BT: bool; what is not valid is written to the trash page, and its
      output means nothing.
  """

  table_BW = jnp.asarray(table_BW)

  def attend(q_BTNH, k_BTKH, v_BTKH, cache):
    keys, values = cache
    size = keys.shape[2]
    page_BT = jnp.take_along_axis(table_BW, positions_BT // size, axis=1)
    page_BT = jnp.where(valid_BT, page_BT, TRASH_PAGE)
    offset_BT = positions_BT % size
    keys = keys.at[page_BT, :, offset_BT].set(k_BTKH.astype(keys.dtype))
    values = values.at[page_BT, :, offset_BT].set(v_BTKH.astype(values.dtype))
    out = _attend(q_BTNH, keys, values, table_BW, positions_BT, valid_BT)
    return out, (keys, values)

  return attend


def _attend(
  q_BTNH: jax.Array,
  keys_PKZH: jax.Array,
  values_PKZH: jax.Array,
  table_BW: jax.Array,
  positions_BT: jax.Array,
  valid_BT: jax.Array,
) -> jax.Array:
  """All rows, `_ROWS` at a time."""
  B = q_BTNH.shape[0]
  rows = max(n for n in range(1, _ROWS + 1) if B % n == 0)

  def some(i, out_BTNH):
    take = lambda x: jax.lax.dynamic_slice_in_dim(x, i * rows, rows)  # noqa: E731
    out = _attend_rows(
      take(q_BTNH),
      keys_PKZH,
      values_PKZH,
      take(table_BW),
      take(positions_BT),
      take(valid_BT),
    )
    return jax.lax.dynamic_update_slice_in_dim(out_BTNH, out, i * rows, 0)

  return jax.lax.fori_loop(0, B // rows, some, jnp.zeros_like(q_BTNH))


def _attend_rows(
  q_BTNH: jax.Array,
  keys_PKZH: jax.Array,
  values_PKZH: jax.Array,
  table_BW: jax.Array,
  positions_BT: jax.Array,
  valid_BT: jax.Array,
) -> jax.Array:
  B, T, N, H = q_BTNH.shape
  K, size = keys_PKZH.shape[1:3]
  G, W = N // K, table_BW.shape[1]
  multiple = KEY_MULTIPLE // math.gcd(KEY_MULTIPLE, size)  # pages
  C = min(W + -W % multiple, max(multiple, _BLOCK_TOKENS // size))
  table_BW = jnp.pad(table_BW, ((0, 0), (0, -W % C)))
  q_BTKGH = q_BTNH.reshape(B, T, K, G, H) * (H**-0.5)
  q_BKXH = jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4)).reshape(B, K, G * T, H)
  q_BKXH = q_BKXH.astype(keys_PKZH.dtype)
  last = jnp.max(jnp.where(valid_BT, positions_BT, 0))

  def gather(pool_PKZH, pages_BC):
    blocks = jnp.swapaxes(pool_PKZH[pages_BC], 1, 2)  # [B, K, C, Z, H]
    return blocks.reshape(B, K, C * size, H)

  def block(c, carry):
    best, total, out = carry
    pages_BC = jax.lax.dynamic_slice_in_dim(table_BW, c * C, C, axis=1)
    scores = jnp.einsum(
      'BKXH,BKSH->BKXS',
      q_BKXH,
      gather(keys_PKZH, pages_BC),
      preferred_element_type=jnp.float32,
    )
    at_S = c * C * size + jnp.arange(C * size)
    seen_BTS = at_S[None, None] <= positions_BT[:, :, None]
    scores = scores.reshape(B, K, G, T, -1)
    scores = jnp.where(seen_BTS[:, None, None], scores, HIDDEN)
    # A weight of 0 does not hide what is not a number in a page's free part.
    values = gather(values_PKZH, pages_BC)
    values = jnp.where(seen_BTS.any(axis=1)[:, None, :, None], values, 0)
    block_best, block_total, block_out = softmax_parts(
      scores.reshape(B, K, G * T, -1), values
    )
    new = jnp.maximum(best, block_best)
    old_part, new_part = jnp.exp(best - new), jnp.exp(block_best - new)
    return (
      new,
      total * old_part + block_total * new_part,
      out * old_part + block_out * new_part,
    )

  zeros = lambda *shape: jnp.zeros((B, K, G * T, *shape), jnp.float32)  # noqa: E731
  # The first block always shows token 0, so its best is a real score.
  start = (zeros(1) + HIDDEN, zeros(1), zeros(H))
  blocks = jnp.where(jnp.any(valid_BT), last // (C * size) + 1, 0)
  _, total, out = jax.lax.fori_loop(0, blocks, block, start)
  total = jnp.where(total > 0, total, 1)  # nothing to attend: no valid row
  out_BKGTH = (out / total).astype(q_BTNH.dtype).reshape(B, K, G, T, H)
  return jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4)).reshape(B, T, N, H)
