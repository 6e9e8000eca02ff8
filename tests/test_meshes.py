"""Which splits of eight devices are legal, and what the others say."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from rl_jax import meshes
from rl_jax.models import base
from rl_jax.models.base import ParamSpec

DEVICES = jax.devices()


def _create(num_devices=8, **keys):
  return meshes.MeshPlan.create(meshes.Config(**keys), DEVICES[:num_devices])


def _ids(mesh):
  return [d.id for d in mesh.devices.ravel()]


@pytest.mark.parametrize('num_devices', range(1, 9))
def test_colocated_trains_on_all_and_generates_on_the_first(num_devices):
  plan = _create(num_devices)
  assert plan.training.shape == {'data': num_devices, 'fsdp': 1, 'tensor': 1}
  assert _ids(plan.training) == list(range(num_devices))
  assert [_ids(m) for m in plan.generation] == [[0]]
  assert plan.generation[0].shape == {'data': 1, 'tensor': 1}


@pytest.mark.parametrize('num_devices', range(2, 9))
def test_split_generates_on_the_last_and_trains_on_the_others(num_devices):
  plan = _create(num_devices, mode='split')
  assert _ids(plan.training) == list(range(num_devices - 1))
  assert [_ids(m) for m in plan.generation] == [[num_devices - 1]]


def test_each_engine_owns_a_mesh_of_its_own():
  plan = _create(mode='split', generation_data=2, generation_tensor=2)
  assert _ids(plan.training) == [0, 1, 2, 3]
  assert [_ids(m) for m in plan.generation] == [[4, 5], [6, 7]]
  assert all(m.shape == {'data': 1, 'tensor': 2} for m in plan.generation)
  plan = _create(generation_data=4, generation_tensor=2)
  assert [_ids(m) for m in plan.generation] == [[0, 1], [2, 3], [4, 5], [6, 7]]
  assert _ids(plan.training) == list(range(8))


@pytest.mark.parametrize(
  ('sizes', 'expected'),
  [
    ((-1, 1, 1), (8, 1, 1)),
    ((1, -1, 2), (1, 4, 2)),
    ((2, 2, -1), (2, 2, 2)),
    ((2, 4, 1), (2, 4, 1)),
    ((8, -1, 1), (8, 1, 1)),
  ],
)
def test_minus_one_takes_the_devices_that_remain(sizes, expected):
  names = ('training_data', 'training_fsdp', 'training_tensor')
  plan = _create(**dict(zip(names, sizes)))
  assert tuple(plan.training.shape.values()) == expected
  assert plan.training.axis_names == ('data', 'fsdp', 'tensor')


@pytest.mark.parametrize(
  ('num_devices', 'keys', 'message'),
  [
    (8, {'mode': 'multihost'}, r"mode='multihost'.*'colocated', 'split'"),
    (8, {'generation_data': 0}, 'generation_data=0: must be >= 1'),
    (8, {'generation_tensor': -1}, 'generation_tensor=-1: must be >= 1'),
    (2, {'generation_data': 3}, '= 3, but there are 2 devices; at most 2'),
    (8, {'generation_data': 3, 'generation_tensor': 3}, '= 9.*at most 8'),
    (
      4,
      {'mode': 'split', 'generation_data': 2, 'generation_tensor': 2},
      '= 4 of 4 devices leaves none.*at most 3',
    ),
    (1, {'mode': 'split'}, r'colocated.*num_cpu_devices=2'),
    (8, {'training_data': 3}, r'\[3, 1, 1\].*8 training.*\[1, 2, 4, 8\]'),
    (8, {'training_fsdp': 3}, r'8 training devices.*\[1, 2, 4, 8\]'),
    (8, {'training_fsdp': 16}, r'8 training devices.*\[1, 2, 4, 8\]'),
    (8, {'training_data': 2, 'training_fsdp': 2}, r'\[2, 2, 1\].*equal it'),
    (8, {'training_fsdp': -1}, r'\[-1, -1, 1\].*at most one of them -1'),
    (8, {'training_fsdp': 0}, r'\[-1, 0, 1\].*each must be >= 1'),
    (8, {'training_tensor': -2}, 'each must be >= 1'),
    # Seven are left to train: what was legal for eight is not.
    (8, {'mode': 'split', 'training_fsdp': 2}, r'7 training.*\[1, 7\]'),
  ],
)
def test_an_impossible_split_says_what_is_legal(num_devices, keys, message):
  with pytest.raises(ValueError, match=message):
    _create(num_devices, **keys)


class _DeviceOf:
  """Of another process: this one cannot have a real one."""

  def __init__(self, process_index):
    self.process_index = process_index


def test_devices_of_several_processes_are_refused_at_once():
  with pytest.raises(ValueError, match=r'2 processes; only one'):
    meshes.MeshPlan.create(meshes.Config(), [_DeviceOf(0), _DeviceOf(1)])


# ---- shardings

MESH = Mesh(np.array(DEVICES).reshape(2, 2, 2), ('data', 'fsdp', 'tensor'))


def test_logical_axes_become_mesh_axes():
  specs = {
    'embed': ParamSpec((64, 32), ('vocab', 'embed')),
    'q': ParamSpec((2, 32, 4, 8), ('layers', 'embed', 'heads', 'head_dim')),
    'norm': ParamSpec((32,), ('embed',)),
  }
  found = meshes.shardings(MESH, specs, meshes.TRAINING_RULES)
  assert {k: s.spec for k, s in found.items()} == {
    'embed': PartitionSpec('tensor', 'fsdp'),
    'q': PartitionSpec(None, 'fsdp', 'tensor', None),
    'norm': PartitionSpec('fsdp'),
  }
  generation = _create(generation_tensor=2).generation[0]
  found = meshes.shardings(generation, specs, meshes.GENERATION_RULES)
  assert {k: s.spec for k, s in found.items()} == {
    'embed': PartitionSpec('tensor', None),
    'q': PartitionSpec(None, None, 'tensor', None),
    'norm': PartitionSpec(None),
  }


def test_two_dims_on_one_mesh_axis_are_an_error_that_shows_the_spec():
  spec = ParamSpec((8, 16), ('heads', 'ffn'))
  message = re.escape(f"{spec}: two dims map to one mesh axis: ('tensor'")
  with pytest.raises(ValueError, match=message):
    meshes.shardings(MESH, spec, meshes.TRAINING_RULES)
  # Replicated twice is no collision.
  meshes.shardings(
    MESH, ParamSpec((2, 3), ('layers', 'head_dim')), meshes.TRAINING_RULES
  )


def test_a_dim_that_does_not_divide_names_legal_sizes():
  plan = _create(training_tensor=8)
  model = base.Model(
    base.ModelConfig(vocab_size=64, d_model=32, num_heads=12, num_kv_heads=6)
  )
  with pytest.raises(
    ValueError, match=r'heads=\d+ of .* tensor=8; legal .*: \[1, 2'
  ):
    plan.check_params(model.specs())
  _create(training_tensor=2, training_fsdp=4).check_params(model.specs())


def test_the_generation_mesh_is_checked_too():
  plan = _create(generation_tensor=4)
  model = base.Model(base.ModelConfig(vocab_size=64, num_kv_heads=2))
  with pytest.raises(
    ValueError, match=r'kv_heads=2 .* tensor=4; legal .*: \[1, 2\]'
  ):
    plan.check_params(model.specs())


@pytest.mark.parametrize(
  ('rows', 'nearest'), [(1, 4), (3, 4), (5, 4), (7, 8), (10, 8), (11, 12)]
)
def test_rows_must_divide_over_data_and_fsdp(rows, nearest):
  plan = _create(training_fsdp=2, training_tensor=2)  # data 2
  message = rf'={rows} must .*fsdp = 4; nearest legal: {nearest}\.'
  with pytest.raises(ValueError, match=message):
    plan.check_rows(rows)


def test_rows_that_divide_are_accepted():
  plan = _create(training_fsdp=2, training_tensor=2)
  for rows in (4, 8, 12):
    plan.check_rows(rows)
  _create(1).check_rows(1)


def test_rows_lie_over_data_and_fsdp_and_scalars_everywhere():
  batch = jax.device_put(np.zeros((8, 3)), meshes.rows(MESH))
  assert {s.data.shape for s in batch.addressable_shards} == {(2, 3)}
  scalar = jax.device_put(np.zeros(()), meshes.replicated(MESH))
  assert scalar.sharding.device_set == set(DEVICES)
  assert scalar.is_fully_replicated


def test_stacked_puts_one_part_on_each_device_of_the_axis():
  embed = jax.sharding.NamedSharding(MESH, PartitionSpec('fsdp', None))
  (found,) = meshes.stacked((embed,), 'data')
  parts = jax.device_put(np.zeros((2, 4, 3)), found)
  assert found.spec == PartitionSpec('data', 'fsdp', None)
  assert {s.data.shape for s in parts.addressable_shards} == {(1, 2, 3)}


def test_describe_says_who_has_which_devices():
  assert _create(1).describe() == (
    'colocated: training data1xfsdp1xtensor1 on cpu:[0]; '
    '1 engine of tensor1 on cpu:[0]'
  )
  plan = _create(
    mode='split', training_fsdp=2, generation_data=2, generation_tensor=2
  )
  assert plan.describe() == (
    'split: training data2xfsdp2xtensor1 on cpu:[0, 1, 2, 3]; '
    '2 engines of tensor2 on cpu:[4, 5, 6, 7]'
  )
