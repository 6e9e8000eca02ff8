"""The learner's matrices as the generator wants them: packed, maybe in int8.

Packed, output channels come first, which halves the time of a decode step on
CPU (`layers.Packed`). In int8 every channel has a scale, and activations get
one for each token when they are used: w8a8. Norms and biases stay as they are;
a tied embedding is packed once, and read by both of its uses.

The policy that generates in int8 is not quite the one that learns: behavior
log-probs are those of the former, exact, and the algorithm's ratio corrects
for the difference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.models.attention import segment_attention
from rl_jax.models.base import Model
from rl_jax.models.layers import Packed, quantized

# Parameter -> (its axes, outputs first; how many its product sums over).
_PACKED = {
  ('embed',): ((0, 1), 1),  # a row a token, also where it is looked up
  ('head',): ((0, 1), 1),
  ('attention', 'q'): ((1, 2, 0), 1),
  ('attention', 'k'): ((1, 2, 0), 1),
  ('attention', 'v'): ((1, 2, 0), 1),
  ('attention', 'out'): ((2, 0, 1), 2),
  ('ffn', 'gate'): ((1, 0), 1),
  ('ffn', 'up'): ((1, 0), 1),
  ('ffn', 'down'): ((1, 0), 1),
}


@dataclasses.dataclass(frozen=True)
class Packing:
  """How matrices are packed; the sync is handed one.

  Trees are the stem's or a layer's nested dicts; `stacked` ones have a
  leading axis of layers in each leaf.
  """

  weight_format: str = 'dtype'  # that of the arrays, or int8

  def pack(self, tree: Any, stacked: bool = False) -> Any:
    """Arrays with `Packed` ones in place of matrices."""

    def leaf(path, x):
      order, num_summed = _packed(path, stacked)
      if not order:
        return x
      x = jnp.transpose(x, order)
      if self.weight_format == 'dtype':
        return Packed(x, None, num_summed)
      axes = tuple(range(x.ndim - num_summed, x.ndim))
      values, scale = quantized(x, axes)
      return Packed(values, scale.squeeze(axes), num_summed)

    return jax.tree.map_with_path(leaf, tree)

  def shardings(self, tree: Any, stacked: bool = False) -> Any:
    """Their shardings, from those of the arrays."""

    def leaf(path, sharding):
      order, num_summed = _packed(path, stacked)
      if not order:
        return sharding
      spec = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
      spec = [spec[axis] for axis in order]
      scale: Any = None
      if self.weight_format == 'int8':
        scale = _named(sharding.mesh, spec[:-num_summed])
      values: Any = _named(sharding.mesh, spec)
      return Packed(values, scale, num_summed)

    return jax.tree.map_with_path(leaf, tree)


def drift_by_layer(
  model: Model,
  params: Any,
  packing: Packing,
  dtype: str,
  batch: Any,
) -> jax.Array:
  """How far off the packed model is, where each layer attends.

  Args:
    model: the learner's.
    params: the learner's, stacked.
    packing: of the generator.
    dtype: of the generator.
    batch: a TrainBatch of jax arrays, [B, T].

  Returns:
    [L] float32: the values that each layer attends to, root mean square of
    their error relative to that of themselves.
  """
  attend = segment_attention(batch.segment_ids)

  def values(params: Any) -> jax.Array:
    def record(q, k, v, cache):
      out, _ = attend(q, k, v, cache)
      return out, v.astype(jnp.float32)

    _, values = model.hidden(params, batch.tokens, batch.positions, record)
    return values  # [L, B, T, K, H]

  exact = jax.tree.map(lambda x: x.astype(dtype), params)
  packed = {
    'stem': packing.pack(exact['stem']),
    'blocks': packing.pack(exact['blocks'], stacked=True),
  }
  wanted, found = values(exact), values(packed)
  real = (batch.segment_ids > 0)[None, :, :, None, None]
  square = lambda x: jnp.sum(jnp.where(real, x, 0) ** 2, axis=(1, 2, 3, 4))  # noqa: E731
  return jnp.sqrt(square(found - wanted) / square(wanted))


def _named(mesh: Any, spec: list[Any]) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(*spec))


def _packed(path: Any, stacked: bool) -> tuple[tuple[int, ...], int]:
  """(order of axes, number of summed ones); no axes: it is not packed."""
  order, num_summed = _PACKED.get(tuple(key.key for key in path), ((), 0))
  if stacked and order:
    order = (0, *(axis + 1 for axis in order))
  return order, num_summed
