"""Int8 weights for generation, made from what the learner's forward uses.

Every matrix gets one scale for each output channel, and its activations one
for each token when it is used (`layers.product`): w8a8. Norms and biases stay
as they are; a tied embedding is quantised once, and read by both of its uses.

The policy that generates is then not the one that learns: behavior log-probs
are those of the former, exact, and the algorithm's ratio corrects for the
difference. README.md has what it costs on a real model.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.models.layers import Quantized, quantized

# Parameter -> the axes that its product sums over, without that of layers.
_SUMMED = {
  ('embed',): (1,),  # a row a token, also where it is looked up
  ('head',): (1,),
  ('attention', 'q'): (0,),
  ('attention', 'k'): (0,),
  ('attention', 'v'): (0,),
  ('attention', 'out'): (0, 1),
  ('ffn', 'gate'): (0,),
  ('ffn', 'up'): (0,),
  ('ffn', 'down'): (0,),
}


def weights(tree: Any, weight_format: str, stacked: bool = False) -> Any:
  """The stem's or a layer's parameters as `weight_format` has them.

  Args:
    tree: nested dicts of arrays, all of one layer.
    weight_format: 'dtype', which changes nothing, or 'int8'.
    stacked: whether the arrays have a leading axis of layers.
  """

  def leaf(path, x):
    axes = _summed(path, weight_format, stacked)
    return x if axes is None else Quantized(*quantized(x, axes))

  return jax.tree.map_with_path(leaf, tree)


def shardings(tree: Any, weight_format: str, stacked: bool = False) -> Any:
  """As `weights`, of a tree of their shardings."""

  def leaf(path, sharding):
    axes = _summed(path, weight_format, stacked)
    if axes is None:
      return sharding
    scale = (None if i in axes else n for i, n in enumerate(sharding.spec))
    return Quantized(
      sharding, NamedSharding(sharding.mesh, PartitionSpec(*scale))
    )

  return jax.tree.map_with_path(leaf, tree)


def _summed(
  path: Any, weight_format: str, stacked: bool
) -> tuple[int, ...] | None:
  """Axes that a scale stands for; None: the leaf stays as it is."""
  axes = _SUMMED.get(tuple(key.key for key in path))
  if weight_format == 'dtype' or axes is None:
    return None
  return tuple(axis + stacked for axis in axes)
