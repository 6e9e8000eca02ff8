"""Attention of new tokens against KV pages: the tested truth everywhere.

One function serves decode (T = 1), prefill and chunked prefill (T > 1): new
keys and values are first written to their pages, then every query attends to
the pages of its row, column by column with an online softmax
(arXiv:1805.02867), as far as the longest row goes.

Letters: B rows, T new tokens, N query heads, K kv heads, G = N / K,
H head dim, P pages of the pool, W pages of a row, Z tokens of a page.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rl_jax.generator.pages import TRASH_PAGE
from rl_jax.models.attention import Attend


def attend_pages(
  table_BW: jax.Array, positions_BT: jax.Array, valid_BT: jax.Array
) -> Attend:
  """An `attend` whose cache is one layer's (keys, values), [P, K, Z, H] each.

  Args:
    table_BW: int32, the pages of each row in order.
    positions_BT: int32, where in its sequence each new token stands.
    valid_BT: bool; what is not valid is written to the trash page, and its
      output means nothing.
  """

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
  B, T, N, H = q_BTNH.shape
  K, size = keys_PKZH.shape[1:3]
  q_BKGTH = jnp.moveaxis(
    q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5), 1, 3
  ).astype(keys_PKZH.dtype)
  last = jnp.max(jnp.where(valid_BT, positions_BT, 0))
  reach_B = jnp.max(positions_BT, axis=1)

  def column(c, carry):
    best, total, out = carry
    pages_B = table_BW[:, c]
    scores = jnp.einsum(
      'BKGTH,BKZH->BKGTZ',
      q_BKGTH,
      keys_PKZH[pages_B],
      preferred_element_type=jnp.float32,
    )
    at_Z = c * size + jnp.arange(size)
    seen_BTZ = at_Z[None, None] <= positions_BT[:, :, None]
    scores = jnp.where(seen_BTZ[:, None, None], scores, -jnp.inf)
    # The first column always shows token 0, so `new` is finite.
    new = jnp.maximum(best, jnp.max(scores, -1))
    weights = jnp.exp(scores - new[..., None])
    shrink = jnp.exp(best - new)
    # A page keeps what its last owner left there, and 0 * nan is nan.
    values_BKZH = jnp.where(
      (at_Z[None] <= reach_B[:, None])[:, None, :, None],
      values_PKZH[pages_B],
      0,
    )
    out = out * shrink[..., None] + jnp.einsum(
      'BKGTZ,BKZH->BKGTH',
      weights.astype(values_PKZH.dtype),
      values_BKZH,
      preferred_element_type=jnp.float32,
    )
    return new, total * shrink + weights.sum(-1), out

  shape = (B, K, N // K, T)
  _, total, out = jax.lax.fori_loop(
    0,
    last // size + 1,
    column,
    (
      jnp.full(shape, -jnp.inf, jnp.float32),
      jnp.zeros(shape, jnp.float32),
      jnp.zeros((*shape, H), jnp.float32),
    ),
  )
  out_BTKGH = jnp.moveaxis(out / total[..., None], 3, 1)
  return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)
