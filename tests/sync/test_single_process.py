"""Every leaf arrives on its mesh with its bits, or the sync says which not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax import meshes
from rl_jax.generator.quantize import Packing
from rl_jax.models import base
from rl_jax.sync import single_process
from rl_jax.sync.single_process import (
  Sync,
  SyncError,
  check_arrival,
  compare_checksums,
)

TIED = base.ModelConfig(
  vocab_size=64, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=48
)
MODELS = {
  'tied': base.Model(TIED),
  'untied': base.Model(dataclasses.replace(TIED, tie_embeddings=False)),
}
SPLITS = {
  'colocated one': (1, meshes.Config()),
  'colocated eight': (
    8,
    meshes.Config(training_fsdp=2, training_tensor=2, generation_data=2),
  ),
  'split one to one': (2, meshes.Config(mode='split')),
  'split fsdp tensor to tensor, two engines': (
    8,
    meshes.Config(
      mode='split',
      training_fsdp=2,
      training_tensor=2,
      generation_data=2,
      generation_tensor=2,
    ),
  ),
}


@functools.cache
def _numbers(name):
  rng = np.random.default_rng(0)

  def one(path, spec):
    values = 0.3 * rng.standard_normal(spec.shape)
    return (values + ('norm' in path[-1].key)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(one, MODELS[name].specs())


@functools.cache
def _built(split, name, dtype, unroll, weight_format='dtype'):
  num_devices, config = SPLITS[split]
  plan = meshes.MeshPlan.create(config, jax.devices()[:num_devices])
  model = MODELS[name]
  sync = Sync(
    model,
    plan.training,
    plan.generation,
    dtype=dtype,
    unroll=unroll,
    packing=Packing(weight_format),
  )
  return plan, sync


def _learner_params(plan, name):
  shardings = meshes.shardings(
    plan.training, MODELS[name].specs(), meshes.TRAINING_RULES
  )
  return jax.device_put(_numbers(name), shardings)


def _expected(name, dtype, unroll, weight_format='dtype'):
  cast = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), _numbers(name))
  cast['stem'] = Packing(weight_format).pack(cast['stem'])
  cast['blocks'] = Packing(weight_format).pack(cast['blocks'], stacked=True)
  return base.unroll(cast) if unroll else cast


def _bits(x):
  x = np.asarray(x)
  return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def _assert_same_bits(found, expected):
  def same(path, one, other):
    assert one.dtype == other.dtype, path
    np.testing.assert_array_equal(_bits(one), _bits(other), str(path))

  jax.tree_util.tree_map_with_path(same, found, expected)


SMALL = ('colocated one', 'tied', 'float32', True)
STACKED = ('split one to one', 'tied', 'float32', False)
TWO_ENGINES = (
  'split fsdp tensor to tensor, two engines',
  'untied',
  'float32',
  True,
)
CASES = [
  SMALL,
  STACKED,
  TWO_ENGINES,
  (*STACKED, 'int8'),
  (*TWO_ENGINES, 'int8'),
  *(
    pytest.param(case, marks=pytest.mark.slow)
    for case in [
      ('colocated one', 'untied', 'bfloat16', False),
      ('colocated eight', 'tied', 'bfloat16', True),
      (TWO_ENGINES[0], 'tied', 'bfloat16', False),
      # Quantised from what the generator would have, not from the masters.
      (STACKED[0], 'tied', 'bfloat16', False, 'int8'),
    ]
  ),
]


@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  """Compiling is what takes time here: half of it goes without passes."""
  name = 'jax_disable_most_optimizations'
  jax.config.update(name, True)
  yield
  jax.config.update(name, False)


def _named(case):
  return '-'.join(map(str, case))


@pytest.mark.parametrize('case', CASES, ids=_named)
def test_every_leaf_arrives_where_and_as_promised(case):
  _, name, _, unroll, *weight_format = case
  plan, sync = _built(*case)
  sent = sync.send(_learner_params(plan, name), policy_version=3)
  expected = _expected(*case[1:])
  assert sent.policy_version == 3
  assert len(sent.params) == len(plan.generation)
  for tree, mesh in zip(sent.params, plan.generation, strict=True):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    _assert_same_bits(tree, expected)
    devices = set(mesh.devices.ravel())
    assert all(x.sharding.device_set == devices for x in jax.tree.leaves(tree))
    _check_layout(tree, mesh, MODELS[name], unroll, *weight_format)
  one = sum(x.nbytes for x in jax.tree.leaves(expected))
  assert sent.num_bytes == one * len(plan.generation)
  assert sent.seconds > 0


def _check_layout(tree, mesh, model, unroll, weight_format='dtype'):
  promised = meshes.shardings(mesh, model.specs(), meshes.GENERATION_RULES)
  promised = {
    'stem': Packing(weight_format).shardings(promised['stem']),
    'blocks': Packing(weight_format).shardings(
      promised['blocks'], stacked=True
    ),
  }

  def check(path, leaf, sharding):
    if unroll and path[0].key == 'blocks':
      spec = PartitionSpec(*sharding.spec[1:])
      sharding = NamedSharding(mesh, spec)
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path

  if unroll:
    layers = (promised['blocks'],) * model.config.num_layers
    promised = promised | {'blocks': layers}
  jax.tree_util.tree_map_with_path(check, tree, promised)


@pytest.mark.parametrize('name', MODELS)
def test_only_an_untied_model_sends_a_head(name):
  assert ('head' in _numbers(name)['stem']) == (name == 'untied')


@pytest.mark.slow
def test_unrolled_and_stacked_syncs_send_the_same_bits():
  plan, unrolled = _built(*SMALL)
  _, stacked = _built('colocated one', 'tied', 'float32', False)
  params = _learner_params(plan, 'tied')
  one = unrolled.send(params, 0).params[0]
  two = base.unroll(stacked.send(params, 0).params[0])
  _assert_same_bits(one, two)


@functools.partial(jax.jit, donate_argnums=0)
def _next_params(params):
  """As an update: writes into the buffers that it was given."""
  return jax.tree.map(lambda x: x * 0 - 1, params)


@pytest.mark.parametrize(
  'case',
  [
    SMALL,  # same device, same dtype, same layout: a copy is easily lost
    pytest.param(
      ('colocated one', 'tied', 'float32', False), marks=pytest.mark.slow
    ),
    STACKED,
  ],
  ids=_named,
)
def test_the_generators_copy_outlives_the_learners(case):
  plan, sync = _built(*case)
  params = _learner_params(plan, 'tied')
  sent = sync.send(params, 0)
  old = jax.tree.leaves(params)
  overwritten = _next_params(params)
  jax.block_until_ready(overwritten)
  assert all(x.is_deleted() for x in old)  # donated for good
  _assert_same_bits(sent.params[0], _expected('tied', 'float32', case[3]))


def test_versions_of_weights_do_not_mix():
  plan, sync = _built(*SMALL)
  first = sync.send(_learner_params(plan, 'tied'), 0)
  twice = jax.tree.map(lambda x: 2 * x, _learner_params(plan, 'tied'))
  second = sync.send(twice, 1)
  expected = _expected('tied', 'float32', True)
  _assert_same_bits(first.params[0], expected)
  _assert_same_bits(second.params[0], jax.tree.map(lambda x: 2 * x, expected))


# ---- what goes wrong on the way is named


def _spoil_transfers(monkeypatch, spoil):
  """`spoil(number of the transfer, what arrived, target)`, in `send` only."""
  real, count = jax.device_put, iter(range(10**6))

  def device_put(x, target):
    return spoil(next(count), real(x, target), target)

  monkeypatch.setattr(single_process.jax, 'device_put', device_put)


def _with_leaf(tree, path, change):
  """`tree` with the leaf, or a matrix's values, at a path replaced."""

  def one(key_path, leaf):
    found = [k.key for k in key_path if isinstance(k, jax.tree_util.DictKey)]
    return change(leaf) if found == list(path) else leaf

  return jax.tree_util.tree_map_with_path(one, tree)


def test_a_corrupted_leaf_is_named(monkeypatch):
  plan, sync = _built(*SMALL)
  params = _learner_params(plan, 'tied')

  def spoil(number, arrived, target):
    if number != 2:  # stem, layer 0, layer 1
      return arrived
    flip = lambda x: x.at[1, 2].multiply(-1)  # noqa: E731  one bit
    return _with_leaf(arrived, ['ffn', 'down'], flip)

  _spoil_transfers(monkeypatch, spoil)
  with pytest.raises(SyncError) as error:
    sync.send(params, 7)
  message = str(error.value)
  assert 'version 7' in message
  assert "['layer 1']['ffn']['down'].values" in message
  assert message.count('->') == 1  # no other leaf is blamed


def test_a_leaf_on_the_wrong_mesh_is_named(monkeypatch):
  plan, sync = _built(*STACKED)
  params = _learner_params(plan, 'tied')
  source = NamedSharding(plan.training, PartitionSpec())
  real = jax.device_put

  def spoil(number, arrived, target):
    if number != 0:
      return arrived
    stay = lambda x: real(x, source)  # noqa: E731
    return _with_leaf(arrived, ['final_norm'], stay)

  _spoil_transfers(monkeypatch, spoil)
  with pytest.raises(SyncError) as error:
    sync.send(params, 7)
  message = str(error.value)
  assert 'version 7: not on the generation mesh' in message
  assert "stem['final_norm']: on " in message
  assert 'embed' not in message


@pytest.mark.parametrize('case', [SMALL, TWO_ENGINES], ids=_named)
def test_a_second_engine_is_checked_as_the_first(case, monkeypatch):
  plan, sync = _built(*case)
  params = _learner_params(plan, case[1])
  num_transfers = 3 * len(plan.generation)

  def spoil(number, arrived, target):
    if number != num_transfers - 1:  # the last one: layer 1 of that engine
      return arrived
    zero = lambda x: x * 0  # noqa: E731
    return _with_leaf(arrived, ['attention', 'q'], zero)

  _spoil_transfers(monkeypatch, spoil)
  with pytest.raises(SyncError, match=r"\['layer 1'\]\['attention'\]\['q'\]"):
    sync.send(params, 7)


def _arrived():
  """Chunks, targets and mesh as `check_arrival` gets them."""
  plan, sync = _built(*TWO_ENGINES)
  mesh = plan.generation[0]
  targets = sync._targets[0]
  numbers = _expected('untied', 'float32', unroll=True)
  chunks = {'stem': jax.device_put(numbers['stem'], targets['stem'])}
  blocks = numbers['blocks']
  for i, layer in enumerate(blocks):
    chunks[f'layer {i}'] = jax.device_put(layer, targets[f'layer {i}'])
  return plan, mesh, targets, chunks


def test_what_arrived_passes():
  _, mesh, targets, chunks = _arrived()
  check_arrival(chunks, targets, mesh, 4)


def test_a_missing_chunk_is_named():
  _, mesh, targets, chunks = _arrived()
  del chunks['layer 1']
  with pytest.raises(SyncError, match=r'version 4: .*: layer 1: missing$'):
    check_arrival(chunks, targets, mesh, 4)


def test_a_missing_leaf_of_a_chunk_is_named():
  _, mesh, targets, chunks = _arrived()
  # The last leaf, so that those before it still fit their targets.
  last = sorted(chunks['stem'])[-1]
  chunks['stem'] = {k: v for k, v in chunks['stem'].items() if k != last}
  with pytest.raises(SyncError, match=rf"stem\['{last}'\].values: missing$"):
    check_arrival(chunks, targets, mesh, 4)


def test_a_leaf_in_another_layout_is_named():
  _, mesh, targets, chunks = _arrived()
  whole = NamedSharding(mesh, PartitionSpec())
  spread = lambda x: jax.device_put(x, whole)  # noqa: E731
  chunks['layer 0'] = _with_leaf(chunks['layer 0'], ['ffn', 'up'], spread)
  with pytest.raises(SyncError) as error:
    check_arrival(chunks, targets, mesh, 4)
  assert "layer 0['ffn']['up'].values: laid out as" in str(error.value)
  assert str(error.value).count('laid out as') == 1


def test_leaves_of_another_engines_mesh_are_named():
  plan, _, targets, chunks = _arrived()
  with pytest.raises(SyncError, match=r"stem\['embed'\].values: on "):
    check_arrival(chunks, targets, plan.generation[1], 4)


# ---- checksums


def _sums(tree):
  return jax.device_get(single_process._checksums(tree))


def _differ(one, other):
  """Whether the comparison notices, naming the leaf."""
  try:
    compare_checksums({'a': _sums(one)}, {'a': _sums(other)}, 1)
  except SyncError as e:
    assert "['a']" in str(e)
    return True
  return False


VALUES = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


@pytest.mark.parametrize('dtype', [np.float32, jnp.bfloat16])
def test_every_single_bit_is_noticed(dtype):
  values = VALUES[:2].astype(dtype)
  width = values.dtype.itemsize * 8
  assert not _differ(values, values.copy())
  before = int(_sums(values))
  for index in np.ndindex(values.shape):
    for bit in range(width):
      flipped = _bits(values).copy()
      flipped[index] ^= np.array(1 << bit, flipped.dtype)
      assert int(_sums(flipped.view(values.dtype))) != before, (index, bit)


@pytest.mark.parametrize('dtype', [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  'permute',
  [
    lambda x: x[::-1],
    lambda x: x[:, ::-1],
    lambda x: np.roll(x, 1, axis=0),
    lambda x: np.roll(x, 3, axis=0),  # two shards swapped
    lambda x: np.roll(x, 2, axis=1),
    lambda x: x.T.reshape(x.shape),
  ],
)
def test_permuted_content_is_noticed(permute, dtype):
  values = VALUES.astype(dtype)
  assert _differ(values, permute(values))


@pytest.mark.parametrize('distance', [1, 2, 128, 256, 2048])
def test_swapped_round_numbers_are_noticed(distance):
  # Their bits differ by a power of two, and so does their distance.
  values = np.ones(4096, np.float32)
  values[0] = 2.0
  swapped = np.roll(values, distance)
  assert _differ(values, swapped)


def test_swapped_shards_of_round_numbers_are_noticed():
  # As float32 weights that were published in bfloat16: 16 bits are zero.
  rng = np.random.default_rng(0)
  values = rng.standard_normal((65536, 2)).astype(jnp.bfloat16)
  values = values.astype(np.float32)
  assert _differ(values, np.roll(values, 32768, axis=0))


def test_leaves_that_swapped_places_are_named():
  one = VALUES
  other = VALUES[::-1].copy()  # the same numbers, the same plain sum
  sent, arrived = {'x': one, 'y': other}, {'x': other, 'y': one}
  with pytest.raises(SyncError, match=r"\['x'\]: .*; .*\['y'\]: "):
    compare_checksums({'a': _sums(sent)}, {'a': _sums(arrived)}, 1)


def test_a_leaf_that_only_one_side_has_is_named():
  sums = {'x': _sums(VALUES)}
  with pytest.raises(SyncError, match=r"\['a'\]\['x'\]: None -> \d+"):
    compare_checksums({'a': {}}, {'a': sums}, 1)
  with pytest.raises(SyncError, match=r"\['a'\]\['x'\]: \d+ -> None"):
    compare_checksums({'a': sums}, {'a': {}}, 1)


def test_a_checksum_does_not_depend_on_the_mesh():
  devices = np.array(jax.devices())
  values = np.arange(64, dtype=np.float32).reshape(8, 8)
  expected = int(_sums(values))
  for shape, spec in (((8, 1), ('a', None)), ((2, 4), ('b', 'a'))):
    mesh = Mesh(devices.reshape(shape), ('a', 'b'))
    placed = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    assert int(_sums(placed)) == expected
