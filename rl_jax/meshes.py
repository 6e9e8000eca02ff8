"""Devices -> one training mesh and one generation mesh per engine.

Knows logical axis names of parameters and which mesh axis each maps to;
knows no model code. Training meshes have axes (data, fsdp, tensor),
generation meshes (data, tensor); `generation_data` counts engines, each of
which owns one generation mesh whose data axis is 1.

`colocated`: training and generation take turns on the same devices.
`split`: the last `generation_data * generation_tensor` devices generate, the
others train, both at the same time. Several processes are not supported yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.models.base import ParamSpec

MODES = ('colocated', 'split')

# Logical axis of a parameter -> mesh axis (None: replicated).
TRAINING_RULES: Mapping[str, str | None] = {
  'vocab': 'tensor',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'ffn': 'tensor',
  'embed': 'fsdp',
  'layers': None,
  'head_dim': None,
}
GENERATION_RULES: Mapping[str, str | None] = {
  **TRAINING_RULES,
  'embed': None,  # a decode step is too short to gather weights in
}


@dataclasses.dataclass(frozen=True)
class Config:
  """Keys of `config.mesh`; -1 takes the devices that remain."""

  mode: str = 'colocated'
  num_cpu_devices: int = 0  # force this many devices on CPU; 0: leave it
  training_data: int = -1
  training_fsdp: int = 1
  training_tensor: int = 1
  generation_data: int = 1
  generation_tensor: int = 1

  def __post_init__(self):
    if not 0 <= self.num_cpu_devices <= 1024:  # more hang while they start
      raise ValueError(
        f'mesh.num_cpu_devices={self.num_cpu_devices}: must be >= 0 (0: as '
        'JAX has them) and <= 1024.'
      )


@dataclasses.dataclass(frozen=True)
class MeshPlan:
  """A checked assignment of devices to the two kinds of sub-mesh."""

  mode: str
  training: Mesh
  generation: tuple[Mesh, ...]  # one per engine

  @classmethod
  def create(cls, config: Config, devices: Sequence[Any]) -> MeshPlan:
    """Splits `devices`.

    Raises:
      ValueError: the split is impossible; the message has the numbers and
        the nearest legal choice.
    """
    if config.mode not in MODES:
      raise ValueError(f'mesh.mode={config.mode!r}: must be one of {MODES}.')
    if len({d.process_index for d in devices}) > 1:
      raise ValueError(
        f'mesh: devices of {len({d.process_index for d in devices})} '
        'processes; only one process is supported. Start one process that '
        'sees all devices.'
      )
    num_generation = _positive(config, 'generation_data') * _positive(
      config, 'generation_tensor'
    )
    if config.mode == 'colocated':
      train = list(devices)
      if num_generation > len(train):
        raise ValueError(
          f'mesh: generation_data * generation_tensor = {num_generation}, but '
          f'there are {len(train)} devices; at most {len(train)} is legal.'
        )
      generate = train[:num_generation]
    else:
      if num_generation >= len(devices):
        raise ValueError(
          f'mesh: generation_data * generation_tensor = {num_generation} of '
          f'{len(devices)} devices leaves none to train on. Legal in split '
          f'mode: at most {max(len(devices) - 1, 0)}'
          + (
            '; use mesh.mode="colocated", or mesh.num_cpu_devices=2 on CPU.'
            if len(devices) < 2
            else '.'
          )
        )
      cut = len(devices) - num_generation
      train, generate = list(devices[:cut]), list(devices[cut:])
    sizes = _training_sizes(config, len(train))
    tensor = config.generation_tensor
    return cls(
      config.mode,
      Mesh(np.array(train).reshape(sizes), ('data', 'fsdp', 'tensor')),
      tuple(
        Mesh(
          np.array(generate[i : i + tensor]).reshape(1, tensor),
          ('data', 'tensor'),
        )
        for i in range(0, len(generate), tensor)
      ),
    )

  def check_params(self, specs: Any) -> None:
    """ValueError if a parameter does not divide over its mesh axes."""
    shardings(self.training, specs, TRAINING_RULES)
    shardings(self.generation[0], specs, GENERATION_RULES)

  def check_rows(self, rows: int) -> None:
    """ValueError if `rows` of a micro-batch do not divide over training."""
    parts = self.training.shape['data'] * self.training.shape['fsdp']
    if rows % parts:
      raise ValueError(
        f'learner.rows_per_microbatch={rows} must be a multiple of '
        f'data * fsdp = {parts}; nearest legal: '
        f'{max(parts, round(rows / parts) * parts)}.'
      )

  def describe(self) -> str:
    sizes = 'x'.join(
      f'{name}{size}' for name, size in self.training.shape.items()
    )
    engines = len(self.generation)
    return (
      f'{self.mode}: training {sizes} on '
      f'{_names(list(self.training.devices.ravel()))}; {engines} engine'
      f'{"s" if engines > 1 else ""} of tensor'
      f'{self.generation[0].shape["tensor"]} on '
      f'{_names([d for m in self.generation for d in m.devices.ravel()])}'
    )


def shardings(mesh: Mesh, specs: Any, rules: Mapping[str, str | None]) -> Any:
  """A NamedSharding for each ParamSpec of the tree.

  Raises:
    ValueError: a dim is not divisible by its mesh axis, or two dims of a
      parameter map to one mesh axis; the spec is in the message.
  """

  def one(spec: ParamSpec) -> NamedSharding:
    axes = tuple(rules[a] for a in spec.axes)
    used = [a for a in axes if a is not None]
    if len(set(used)) < len(used):
      raise ValueError(f'{spec}: two dims map to one mesh axis: {axes}.')
    for name, dim, axis in zip(spec.axes, spec.shape, axes):
      size = mesh.shape[axis] if axis else 1
      if dim % size:
        legal = [n for n in range(1, size + 1) if dim % n == 0]
        raise ValueError(
          f'mesh: {name}={dim} of {spec} does not divide over '
          f'{axis}={size}; legal sizes of that axis: {legal}.'
        )
    return NamedSharding(mesh, PartitionSpec(*axes))

  return jax.tree.map(one, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def stacked(tree: Any, axis: str) -> Any:
  """Shardings of the same arrays with one part for each device of `axis`."""
  return jax.tree.map(
    lambda s: NamedSharding(s.mesh, PartitionSpec(axis, *s.spec)), tree
  )


def rows(mesh: Mesh) -> NamedSharding:
  """Rows of a micro-batch, [B, ...], over every axis that splits data."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def _positive(config: Config, name: str) -> int:
  if getattr(config, name) < 1:
    raise ValueError(f'mesh.{name}={getattr(config, name)}: must be >= 1.')
  return getattr(config, name)


def _training_sizes(config: Config, num_devices: int) -> tuple[int, int, int]:
  sizes = [config.training_data, config.training_fsdp, config.training_tensor]
  if any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
    raise ValueError(
      f'mesh.training_(data, fsdp, tensor) = {sizes}: each must be >= 1, and '
      'at most one of them -1.'
    )
  known = int(np.prod([s for s in sizes if s != -1]))
  if -1 in sizes and num_devices % known == 0:
    sizes[sizes.index(-1)] = num_devices // known
  if int(np.prod(sizes)) != num_devices:
    legal = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    raise ValueError(
      f'mesh.training_(data, fsdp, tensor) = {sizes} does not make up the '
      f'{num_devices} training devices; each must divide it (one of {legal}) '
      'and their product must equal it.'
    )
  return sizes[0], sizes[1], sizes[2]


def _names(devices: Sequence[Any]) -> str:
  kinds = {d.platform for d in devices}
  return f'{"/".join(sorted(kinds))}:{[d.id for d in devices]}'
