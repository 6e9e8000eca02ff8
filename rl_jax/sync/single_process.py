"""Parameters to the generation meshes of this process, chunk by chunk.

  learner params --cast, a layer at a time, on the training mesh-->
    --jax.device_put--> each generation mesh --check--> engine

A chunk is the stem or one layer (one stacked array where the generator scans
its layers), so at most one chunk exists twice on the training mesh. What is
sent is what the learner's forward pass uses: the same cast of the same
float32 parameters, its matrices then packed, and quantised if the generator
wants them so. After each sync every leaf must lie on its generation mesh with
the checksum it had on the training mesh.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax import meshes
from rl_jax.models.base import Model, Params


class SyncError(RuntimeError):
  """A leaf did not arrive, or not as it was sent."""


class Packing(Protocol):
  """What the generator wants in place of matrices."""

  def pack(self, tree: Any, stacked: bool = False) -> Any: ...
  def shardings(self, tree: Any, stacked: bool = False) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Sent:
  """Parameters as they arrived, one tree per engine."""

  params: list[Params]
  policy_version: int
  num_bytes: int  # sent to all engines together
  seconds: float  # until all of it had arrived and was checked


class Sync:
  """Sends the parameters of `model` from one mesh to others.

  Args:
    dtype: of the generators.
    unroll: whether the generators take a tuple of layers, or stacked ones.
    packing: of matrices, see `generator/quantize.py`.
  """

  def __init__(
    self,
    model: Model,
    training: Mesh,
    generation: Sequence[Mesh],
    *,
    dtype: str,
    unroll: bool,
    packing: Packing,
  ):
    self._generation, self._unroll = tuple(generation), unroll
    self._num_layers = model.config.num_layers
    self._packing = packing
    specs = model.specs()
    source = meshes.shardings(training, specs, meshes.TRAINING_RULES)
    self._targets = [
      self._arranged(meshes.shardings(m, specs, meshes.GENERATION_RULES))
      for m in self._generation
    ]
    layer_source = jax.tree.map(_without_layer_axis, source['blocks'])
    layer_source = packing.shardings(layer_source)

    def cast(tree, stacked=False):
      # `copy` keeps XLA from handing back the learner's own buffers, which
      # its next update donates.
      tree = jax.tree.map(lambda x: jnp.copy(x).astype(dtype), tree)
      return packing.pack(tree, stacked)

    def layer(blocks, i):
      take = lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)  # noqa: E731
      return cast(jax.tree.map(take, blocks))

    self._cast = jax.jit(cast, static_argnames='stacked')
    self._layer = jax.jit(layer, out_shardings=layer_source)

  def send(self, params: Params, policy_version: int) -> Sent:
    """Copies, casts, checks. `params` may be donated once this returns.

    Raises:
      SyncError: names every leaf that did not arrive as sent.
    """
    begin = time.monotonic()
    arrived: list[dict[str, Any]] = [{} for _ in self._generation]
    sums_sent: dict[str, Any] = {}
    num_bytes = 0
    for name, chunk in self._chunks(params):
      sums_sent[name] = _checksums(chunk)
      for engine, targets in enumerate(self._targets):
        arrived[engine][name] = jax.device_put(chunk, targets[name])
        num_bytes += sum(x.nbytes for x in jax.tree.leaves(chunk))
    for engine, mesh in enumerate(self._generation):
      check_arrival(
        arrived[engine], self._targets[engine], mesh, policy_version
      )
    # Only now: a chunk of leaves on two meshes has no checksum.
    sums_arrived = [
      {name: _checksums(chunk) for name, chunk in chunks.items()}
      for chunks in arrived
    ]
    for sums in sums_arrived:
      compare_checksums(sums_sent, sums, policy_version)
    trees = [self._assembled(chunks) for chunks in arrived]
    seconds = time.monotonic() - begin
    return Sent(trees, policy_version, num_bytes, seconds)

  def _chunks(self, params: Params):
    yield 'stem', self._cast(params['stem'])
    if self._unroll:
      for i in range(self._num_layers):
        yield f'layer {i}', self._layer(params['blocks'], i)
    else:
      for name, leaf in _leaves(params['blocks']):
        yield name, self._cast(leaf, stacked=True)

  def _arranged(self, shardings: Params) -> dict[str, Any]:
    """Target shardings by chunk name, in the order of `_chunks`."""
    arranged = self._packing.shardings
    blocks = shardings['blocks']
    self._blocks_def = jax.tree.structure(blocks)
    if self._unroll:
      one = arranged(jax.tree.map(_without_layer_axis, blocks))
      layers = {f'layer {i}': one for i in range(self._num_layers)}
    else:
      layers = {
        name: arranged(leaf, stacked=True) for name, leaf in _leaves(blocks)
      }
    return {'stem': arranged(shardings['stem']), **layers}

  def _assembled(self, chunks: dict[str, Any]) -> Params:
    layers = [chunk for name, chunk in chunks.items() if name != 'stem']
    if self._unroll:
      return {'stem': chunks['stem'], 'blocks': tuple(layers)}
    for i, leaf in enumerate(layers):  # a dict in a dict, see `_leaves`
      while isinstance(leaf, dict):
        (leaf,) = leaf.values()
      layers[i] = leaf
    blocks = jax.tree.unflatten(self._blocks_def, layers)
    return {'stem': chunks['stem'], 'blocks': blocks}


def _leaves(blocks: Params) -> list[tuple[str, Any]]:
  """Leaves of the blocks by name, each in the dicts that lead to it."""
  leaves = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(blocks):
    for key in reversed(path):
      leaf = {key.key: leaf}
    leaves.append((jax.tree_util.keystr(path), leaf))
  return leaves


def check_arrival(
  chunks: dict[str, Any], targets: dict[str, Any], mesh: Mesh, version: int
) -> None:
  """SyncError unless every leaf lies on `mesh`, laid out as its target."""
  wrong = []
  devices = set(mesh.devices.ravel())
  for name, target in targets.items():
    if name not in chunks:
      wrong.append(f'{name}: missing')
      continue
    leaves = dict(jax.tree_util.tree_leaves_with_path(chunks[name]))
    for path, sharding in jax.tree_util.tree_leaves_with_path(target):
      where = f'{name}{jax.tree_util.keystr(path)}'
      leaf = leaves.get(path)
      if leaf is None:
        wrong.append(f'{where}: missing')
      elif set(leaf.sharding.device_set) != devices:
        wrong.append(f'{where}: on {leaf.sharding.device_set}')
      elif not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        wrong.append(f'{where}: laid out as {leaf.sharding}, not {sharding}')
  if wrong:
    raise SyncError(
      f'version {version}: not on the generation mesh '
      f'{sorted(map(str, devices))}: {"; ".join(wrong)}'
    )


def compare_checksums(
  sent: dict[str, Any], arrived: dict[str, Any], version: int
) -> None:
  """SyncError naming each leaf whose checksum changed on the way."""
  sent, arrived = jax.device_get((sent, arrived))
  before = dict(jax.tree_util.tree_leaves_with_path(sent))
  after = dict(jax.tree_util.tree_leaves_with_path(arrived))
  wrong = [
    f'{jax.tree_util.keystr(path)}: {before.get(path)} -> {after.get(path)}'
    for path in before.keys() | after.keys()
    if path not in before
    or path not in after
    or int(before[path]) != int(after[path])
  ]
  if wrong:
    raise SyncError(
      f'version {version}: checksums changed on the way: '
      f'{"; ".join(sorted(wrong))}'
    )


@jax.jit
def _checksums(tree: Any) -> Any:
  """For each leaf, the sum of its bits mixed with their places, modulo 2^32.

  Integer sums do not depend on their order, so the sum is the same on every
  mesh. The mixing is one to one, so no single change is missed; it is not
  linear, or swaps of round numbers at round distances would cancel.
  """

  def checksum(x):
    bits = jax.lax.bitcast_convert_type(
      x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    ).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim, size in enumerate(x.shape):
      along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
      place = place * jnp.uint32(size) + along
    mixed = bits + place * jnp.uint32(2654435761)
    for factor in (0x7FEB352D, 0x846CA68B):
      mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(factor)
    return jnp.sum(mixed, dtype=jnp.uint32)

  return jax.tree.map(checksum, tree)


def _without_layer_axis(sharding: NamedSharding) -> NamedSharding:
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
