"""How keys and values lie in their pages, and how they are put and fetched.

The rest of the generator knows pages by number; only here is known what a page
looks like. In int8 each token and kv head has a scale, chosen when it is
written and never changed: what is in a page does not depend on what comes
after it.

Letters: B rows, T new tokens, K kv heads, H head dim, P pages of the pool,
Z tokens of a page, C pages fetched of a row, S = C * Z.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.models.layers import quantized

_LANES = 128  # of a TPU register


class Pages(NamedTuple):
  """The keys, or the values, of a layer; or stacked, of all layers."""

  values: jax.Array  # [P, K, Z, H], of the dtype or int8
  scale: jax.Array | None  # [P, K, Z] float32, where values are int8


@dataclasses.dataclass(frozen=True)
class KVLayout:
  """Page first, then kv heads: a page of a head is one piece of memory."""

  dtype: str  # float32 | bfloat16 | int8

  def pages(
    self,
    mesh: Mesh,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_layers: int = 0,
  ) -> Pages:
    """Shapes and shardings; stacked where there are layers."""
    shape = self._shape(num_pages, page_size, num_kv_heads, head_dim)
    axes: list[Any] = [None] * (len(shape) - 1)  # a scale has no head dim
    axes[self._head_axis] = 'tensor'
    if num_layers:
      shape, axes = (num_layers, *shape), [None, *axes]
    sharding = NamedSharding(mesh, PartitionSpec(*axes))

    def struct(shape: Any, dtype: str) -> Any:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    if self.dtype == 'int8':
      return Pages(struct(shape, 'int8'), struct(shape[:-1], 'float32'))
    return Pages(struct(shape, self.dtype), None)

  _head_axis = 1
  _page_axis = 0

  def _shape(self, num_pages: int, page_size: int, heads: int, dim: int):
    return num_pages, heads, page_size, dim

  def write(
    self,
    pages: Pages,
    new_BTKH: jax.Array,
    page_BT: jax.Array,
    offset_BT: jax.Array,
  ) -> Pages:
    """Puts each token at its offset in its page."""
    if pages.scale is None:
      new_BTKH = new_BTKH.astype(pages.values.dtype)
      values = pages.values.at[page_BT, :, offset_BT].set(new_BTKH)
      return Pages(values, None)
    int8_BTKH, scale_BTK1 = quantized(new_BTKH, (3,))
    return Pages(
      pages.values.at[page_BT, :, offset_BT].set(int8_BTKH),
      pages.scale.at[page_BT, :, offset_BT].set(scale_BTK1[..., 0]),
    )

  def gather(self, pages: Pages, pages_BC: jax.Array) -> jax.Array:
    """[B, K, S, H]: the tokens of each row's pages, in float."""
    values = jnp.swapaxes(pages.values[pages_BC], 1, 2)  # [B, K, C, Z, H]
    if pages.scale is not None:
      scale = jnp.swapaxes(pages.scale[pages_BC], 1, 2)
      values = values.astype(jnp.float32) * scale[..., None]
    B, K, C, Z, H = values.shape
    return values.reshape(B, K, C * Z, H)

  def copy(
    self, pages: Pages, source: jax.Array, target: jax.Array, stacked: bool
  ) -> Pages:
    """Copies whole pages; (0, 0) pairs copy trash onto itself."""

    before = (slice(None),) * (self._page_axis + stacked)

    def copy(x: jax.Array) -> jax.Array:
      return x.at[*before, target].set(x[*before, source])

    return jax.tree.map(copy, pages)

  def page_size(self, pages: Pages) -> int:
    return pages.values.shape[-2]

  def num_kv_heads(self, pages: Pages) -> int:
    return pages.values.shape[self._head_axis]


@dataclasses.dataclass(frozen=True)
class HeadsFirst(KVLayout):
  """[K, P, Z, H]: as JAX's TPU kernel wants them, H a multiple of 128."""

  head_dim: int = 128  # of the model; pages are padded to `_LANES`

  _head_axis = 0
  _page_axis = 1

  def _shape(self, num_pages: int, page_size: int, heads: int, dim: int):
    return heads, num_pages, page_size, dim + -dim % _LANES

  def write(
    self,
    pages: Pages,
    new_BTKH: jax.Array,
    page_BT: jax.Array,
    offset_BT: jax.Array,
  ) -> Pages:
    assert pages.scale is None
    new_KBTH = jnp.transpose(_padded(new_BTKH), (2, 0, 1, 3))
    new_KBTH = new_KBTH.astype(pages.values.dtype)
    return Pages(pages.values.at[:, page_BT, offset_BT].set(new_KBTH), None)

  def gather(self, pages: Pages, pages_BC: jax.Array) -> jax.Array:
    K, _, Z, H = pages.values.shape
    B, C = pages_BC.shape
    values = jnp.swapaxes(pages.values[:, pages_BC], 0, 1)  # [B, K, C, Z, H]
    return values.reshape(B, K, C * Z, H)[..., : self.head_dim]


def _padded(x: jax.Array) -> jax.Array:
  """Zeros after the head dim, up to a multiple of `_LANES`."""
  extra = -x.shape[-1] % _LANES
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)])
