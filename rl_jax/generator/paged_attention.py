"""Attention of new tokens against KV pages: the tested truth everywhere.

One function serves decode (T = 1), prefill and chunked prefill (T > 1): new
keys and values are first written to their pages, then a few rows at a time
attend to their pages, a block of pages at a time with an online softmax
(arXiv:1805.02867), as far as the longest of those rows goes. Few rows, since
what is gathered for them then stays in a core's cache. Within a block the terms
are added as the learner adds them (`models.attention.softmax_parts`), so for
rows of one block both agree to the last bit on CPU.

Letters: B rows, T new tokens, N query heads, K kv heads, G = N / K,
X = G * T, H head dim, W pages of a row, C pages of a block, S its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from rl_jax.generator.kv_layout import KVLayout, Pages
from rl_jax.generator.pages import TRASH_PAGE
from rl_jax.models.attention import (
  HIDDEN,
  KEY_MULTIPLE,
  Attend,
  softmax_parts,
)

_BLOCK_TOKENS = 512  # keys of a row that are gathered at once
_ROWS = 4  # rows that are gathered at once; all of them: 4 times slower on CPU


# (q [B, N, H], keys, values, lengths [B], table [B, W]) -> out [B, N, H]
Kernel = Callable[[jax.Array, Pages, Pages, jax.Array, jax.Array], jax.Array]


def tpu_kernel(mesh: Mesh) -> Kernel:
  """JAX's paged attention for TPU, each device with its own kv heads.

  For pages as `HeadsFirst` lays them.
  """
  from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

  def one_device(q_BNH, keys, values, lengths_B, table_BW):
    size = keys.shape[2]
    block = max(1, min(table_BW.shape[1], _BLOCK_TOKENS // size))
    padded = jnp.pad(table_BW, ((0, 0), (0, -table_BW.shape[1] % block)))
    return paged_attention(
      q_BNH, keys, values, lengths_B, padded, pages_per_compute_block=block
    )

  heads = PartitionSpec('tensor')
  sharded = jax.shard_map(
    one_device,
    mesh=mesh,
    in_specs=(
      PartitionSpec(None, 'tensor'),
      *(heads, heads),
      *(PartitionSpec(), PartitionSpec()),
    ),
    out_specs=PartitionSpec(None, 'tensor'),
    check_vma=False,  # the kernel does not say how its output varies
  )

  def kernel(q_BNH, keys, values, lengths_B, table_BW):
    H = q_BNH.shape[-1]
    padded = jnp.pad(
      q_BNH * (H**-0.5), ((0, 0), (0, 0), (0, keys.values.shape[-1] - H))
    )
    out = sharded(padded, keys.values, values.values, lengths_B, table_BW)
    return out[..., :H].astype(q_BNH.dtype)

  return kernel


def attend_pages(
  table_BW: jax.Array | np.ndarray,
  positions_BT: jax.Array,
  valid_BT: jax.Array,
  layout: KVLayout,
  kernel: Kernel | None = None,
) -> Attend:
  """An `attend` whose cache is one layer's (keys, values), as `Pages`.

  Args:
    table_BW: int32, the pages of each row in order.
    positions_BT: int32, where in its sequence each new token stands.
    valid_BT: bool; what is not valid is written to the trash page, and its
      output means nothing.
    layout: of the pages.
    kernel: attends where each row has one new token; else it is done here.
  """

  table_BW = jnp.asarray(table_BW)

  def attend(q_BTNH, k_BTKH, v_BTKH, cache):
    keys, values = cache
    size = layout.page_size(keys)
    page_BT = jnp.take_along_axis(table_BW, positions_BT // size, axis=1)
    page_BT = jnp.where(valid_BT, page_BT, TRASH_PAGE)
    offset_BT = positions_BT % size
    keys = layout.write(keys, k_BTKH, page_BT, offset_BT)
    values = layout.write(values, v_BTKH, page_BT, offset_BT)
    if kernel is not None and q_BTNH.shape[1] == 1:
      # A row that is not valid sees one token, so that it stays finite.
      lengths_B = jnp.where(valid_BT, positions_BT, 0)[:, 0] + 1
      out = kernel(q_BTNH[:, 0], keys, values, lengths_B, table_BW)
      return out[:, None], (keys, values)
    out = _attend(
      layout, q_BTNH, keys, values, table_BW, positions_BT, valid_BT
    )
    return out, (keys, values)

  return attend


def _attend(
  layout: KVLayout,
  q_BTNH: jax.Array,
  keys: Pages,
  values: Pages,
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
      layout,
      take(q_BTNH),
      keys,
      values,
      take(table_BW),
      take(positions_BT),
      take(valid_BT),
    )
    return jax.lax.dynamic_update_slice_in_dim(out_BTNH, out, i * rows, 0)

  return jax.lax.fori_loop(0, B // rows, some, jnp.zeros_like(q_BTNH))


def _attend_rows(
  layout: KVLayout,
  q_BTNH: jax.Array,
  key_pages: Pages,
  value_pages: Pages,
  table_BW: jax.Array,
  positions_BT: jax.Array,
  valid_BT: jax.Array,
) -> jax.Array:
  B, T, N, H = q_BTNH.shape
  K, size = layout.num_kv_heads(key_pages), layout.page_size(key_pages)
  G, W = N // K, table_BW.shape[1]
  multiple = KEY_MULTIPLE // math.gcd(KEY_MULTIPLE, size)  # pages
  C = min(W + -W % multiple, max(multiple, _BLOCK_TOKENS // size))
  table_BW = jnp.pad(table_BW, ((0, 0), (0, -W % C)))
  q_BTKGH = q_BTNH.reshape(B, T, K, G, H) * (H**-0.5)
  q_BKXH = jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4)).reshape(B, K, G * T, H)
  if key_pages.scale is None:
    q_BKXH = q_BKXH.astype(key_pages.values.dtype)
  last = jnp.max(jnp.where(valid_BT, positions_BT, 0))

  def block(c, carry):
    best, total, out = carry
    pages_BC = jax.lax.dynamic_slice_in_dim(table_BW, c * C, C, axis=1)
    scores = jnp.einsum(
      'BKXH,BKSH->BKXS',
      q_BKXH,
      layout.gather(key_pages, pages_BC),
      preferred_element_type=jnp.float32,
    )
    at_S = c * C * size + jnp.arange(C * size)
    seen_BTS = at_S[None, None] <= positions_BT[:, :, None]
    scores = scores.reshape(B, K, G, T, -1)
    scores = jnp.where(seen_BTS[:, None, None], scores, HIDDEN)
    # A weight of 0 does not hide what is not a number in a page's free part.
    values = layout.gather(value_pages, pages_BC)
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
