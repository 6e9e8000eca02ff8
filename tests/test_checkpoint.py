"""Checkpoints survive donation, kills, damage and a change of mesh."""

import errno
import gc
import json
import logging
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax import checkpoint
from rl_jax.types import Group, Prompt, Rollout, Verdict

# When a read fails, orbax closes its event loop under the other reads.
pytestmark = pytest.mark.filterwarnings(
  'ignore:Exception ignored in. (None|<coroutine object ):'
  'pytest.PytestUnraisableExceptionWarning'
)

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Moments(NamedTuple):
  count: jax.Array
  mu: dict[str, jax.Array]


def sharding(num_devices, *spec):
  mesh = Mesh(np.array(jax.devices()[:num_devices]), ('x',))
  return NamedSharding(mesh, PartitionSpec(*spec))


def make_arrays(seed=0):
  """A train state over 4 devices; every float32 bit pattern class occurs."""
  rows, whole = sharding(4, 'x'), sharding(4)
  w = jax.random.normal(jax.random.key(seed), (8, 6))
  noise = jax.random.normal(jax.random.key(seed), (64, 64))
  w = w.at[0, :4].set(jnp.array([-0.0, jnp.nan, jnp.inf, 1e-40]))
  return {
    'params': {'w': jax.device_put(w, rows), 'layers': [make_half(seed, rows)]},
    'noise': jax.device_put(noise, rows),  # too large to lie inside an index
    'optimizer': Moments(
      count=jax.device_put(jnp.int32(seed), whole),
      mu={'w': jax.device_put(w * 2, rows)},
    ),
    'key': jax.device_put(jax.random.key_data(jax.random.key(seed)), whole),
  }


def make_half(seed, rows):
  return jax.device_put(
    jnp.arange(16, dtype=jnp.bfloat16).reshape(8, 2) + seed, rows
  )


def abstract(arrays, change=lambda leaf: leaf.sharding):
  return jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=change(a)), arrays
  )


def assert_same_bits(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert g.dtype == w.dtype
    assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


@pytest.fixture(scope='module', autouse=True)
def orbax_is_swept_up():
  """What failed reads left is collected here, not in another file's tests."""
  yield
  gc.collect()


@pytest.fixture
def open_checkpointer(tmp_path):
  """Opens checkpointers of one directory; closes them after the test."""
  opened = []

  def open_one(directory=tmp_path / 'checkpoints', keep=2):
    opened.append(checkpoint.Checkpointer(directory, keep))
    return opened[-1]

  yield open_one
  for one in opened:
    one.close()


def steps_on_disk(tmp_path):
  folder = tmp_path / 'checkpoints'
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def test_a_renamed_checkpoint_is_not_taken_for_another_step(
  open_checkpointer, tmp_path, caplog
):
  arrays = make_arrays()
  one = open_checkpointer()
  for step in (1, 2):
    one.save(step, arrays, {}, wait=True)
  one.close()
  folder = tmp_path / 'checkpoints'
  (folder / '2').rename(folder / '9')
  found = open_checkpointer().restore(abstract(arrays))
  assert found is not None and found[0] == 1
  assert 'it is of step 2, and was renamed' in caplog.text


def test_nothing_saved_restores_none(open_checkpointer):
  assert open_checkpointer().restore(abstract(make_arrays())) is None


def test_round_trip_is_bitwise(open_checkpointer):
  arrays = make_arrays()
  host = {
    'float32': [float(x) for x in np.float32([0.1, 1 / 3, -0.0, 1e-45])],
    'text': 'a\u2028b\x00\ud800\U0001f600\x85\r',
    'version': 7,
  }
  open_checkpointer().save(3, arrays, host, wait=True)
  step, got, got_host = open_checkpointer().restore(abstract(arrays))
  assert step == 3
  assert_same_bits(got, arrays)
  assert got_host == host
  bits = np.float32(got_host['float32']).tobytes()
  assert bits == np.float32([0.1, 1 / 3, -0.0, 1e-45]).tobytes()


def test_restores_onto_another_sharding(open_checkpointer):
  arrays = make_arrays()
  open_checkpointer().save(1, arrays, {}, wait=True)

  def other(leaf):
    return sharding(2, None, 'x') if leaf.ndim == 2 else sharding(2)

  target = abstract(arrays, other)
  _, got, _ = open_checkpointer().restore(target)
  assert_same_bits(got, arrays)
  for leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(target)):
    assert leaf.sharding == want.sharding


def test_arrays_may_be_donated_and_host_changed_after_save(open_checkpointer):
  arrays = {'w': jax.device_put(jnp.ones((64, 2**14)), sharding(4, 'x'))}
  want = np.asarray(arrays['w']).copy()
  host = {'versions': list(range(1000))}
  update = jax.jit(
    lambda tree: jax.tree.map(lambda w: w * 0 - 1, tree), donate_argnums=0
  )
  target = abstract(arrays)
  checkpointer = open_checkpointer()
  checkpointer.save(1, arrays, host)
  new = update(arrays)
  host['versions'].clear()
  arrays['w'].delete()  # jax may have copied a buffer that is being read
  for _ in range(20):
    new = update(new)
  new['w'].delete()
  checkpointer.wait()
  _, got, got_host = checkpointer.restore(target)
  np.testing.assert_array_equal(np.asarray(got['w']), want)
  assert got_host == {'versions': list(range(1000))}


def test_keeps_the_newest_and_needs_room_for_one_more(
  open_checkpointer, tmp_path
):
  checkpointer = open_checkpointer(keep=2)
  for step in range(1, 7):
    checkpointer.save(step, make_arrays(step), {'step': step})
    assert len(steps_on_disk(tmp_path)) <= 3
  checkpointer.wait()
  assert steps_on_disk(tmp_path) == [5, 6]
  step, got, host = checkpointer.restore(abstract(make_arrays()))
  assert (step, host) == (6, {'step': 6})
  assert_same_bits(got, make_arrays(6))


def test_a_step_is_saved_once(open_checkpointer):
  checkpointer = open_checkpointer()
  checkpointer.save(5, make_arrays(5), {'first': True})
  checkpointer.save(5, make_arrays(6), {'first': False}, wait=True)
  _, got, host = checkpointer.restore(abstract(make_arrays()))
  assert host == {'first': True}
  assert_same_bits(got, make_arrays(5))


def test_host_of_many_megabytes(open_checkpointer):
  host = {'tokens': list(range(10**6)), 'text': '"\\' * 10**6}
  checkpointer = open_checkpointer()
  checkpointer.save(1, make_arrays(), host, wait=True)
  assert checkpointer.restore(abstract(make_arrays()))[2] == host


def damage(path, how):
  if how == 'removed':
    path.unlink()
  else:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
  'how', [pytest.param('removed', marks=pytest.mark.slow), 'truncated']
)
def test_any_damaged_file_is_noticed_or_harmless(tmp_path, how, caplog):
  """Each file of the newest checkpoint in turn; never a wrong value."""
  whole = tmp_path / 'whole'
  writer = checkpoint.Checkpointer(whole)
  writer.save(1, make_arrays(1), {'step': 1})
  writer.save(2, make_arrays(2), {'step': 2}, wait=True)
  writer.close()
  files = [p.relative_to(whole) for p in (whole / '2').rglob('*')]
  files = [f for f in files if (whole / f).is_file()]
  passed_over, warnings = [], ''
  for number, file in enumerate(files):
    copy = tmp_path / f'{how}_{number}'
    shutil.copytree(whole, copy)
    damage(copy / file, how)
    reader = checkpoint.Checkpointer(copy)
    caplog.clear()
    step, arrays, host = reader.restore(abstract(make_arrays()))
    reader.close()
    assert_same_bits(arrays, make_arrays(step))
    assert host == {'step': step}
    if step == 1:
      passed_over.append(file.parts[1])
      assert 'Checkpoint 2 is incomplete or damaged' in caplog.text
      warnings += caplog.text
  assert {'arrays', 'host'} <= set(passed_over)
  assert 'error while reading array' in warnings  # not only while opening


def reopen_with_2_damaged(open_checkpointer, tmp_path):
  """A second checkpointer, of a run whose newest step has lost its arrays."""
  first = open_checkpointer()
  first.save(1, make_arrays(1), {})
  first.save(2, make_arrays(2), {}, wait=True)
  shutil.rmtree(tmp_path / 'checkpoints' / '2' / 'arrays')
  second = open_checkpointer()
  assert second.restore(abstract(make_arrays()))[0] == 1
  return second


def test_a_damaged_step_can_be_saved_again(open_checkpointer, tmp_path):
  second = reopen_with_2_damaged(open_checkpointer, tmp_path)
  assert steps_on_disk(tmp_path) == [1, 2]  # reading changes nothing
  second.save(2, make_arrays(7), {}, wait=True)
  assert (tmp_path / 'checkpoints' / 'damaged_2').is_dir()
  step, got, _ = open_checkpointer().restore(abstract(make_arrays()))
  assert step == 2
  assert_same_bits(got, make_arrays(7))


def test_a_damaged_step_that_stays_does_not_end_the_run(
  open_checkpointer, tmp_path, caplog, monkeypatch
):
  second = reopen_with_2_damaged(open_checkpointer, tmp_path)
  rename = pathlib.Path.rename

  def refuse(self, target):
    if 'damaged' in str(target):
      raise PermissionError('not allowed')
    return rename(self, target)

  monkeypatch.setattr(pathlib.Path, 'rename', refuse)
  second.save(3, make_arrays(3), {}, wait=True)
  assert 'Cannot set the damaged checkpoint' in caplog.text
  step, got, _ = open_checkpointer().restore(abstract(make_arrays()))
  assert step == 3
  assert_same_bits(got, make_arrays(3))


def test_all_damaged_is_an_error(open_checkpointer, tmp_path):
  writer = open_checkpointer()
  for step in (1, 2):
    writer.save(step, make_arrays(), {}, wait=True)
    shutil.rmtree(tmp_path / 'checkpoints' / str(step) / 'host')
  with pytest.raises(checkpoint.CheckpointError, match='no checkpoint can be'):
    open_checkpointer().restore(abstract(make_arrays()))


def test_other_config_names_the_leaf(open_checkpointer):
  arrays = {
    'a': {'w': jax.device_put(jnp.ones((4, 2)), sharding(2))},
    'b': jax.device_put(jnp.ones(2), sharding(2)),
  }
  checkpointer = open_checkpointer()
  checkpointer.save(1, arrays, {}, wait=True)

  def target(shape=(4, 2), dtype=jnp.float32, **more):
    make = jax.ShapeDtypeStruct
    return {
      'a': {'w': make(shape, dtype, sharding=sharding(2))},
      **{n: make((2,), jnp.float32, sharding=sharding(2)) for n in more},
    }

  cases = {
    r'leaf a\.w is float32\[4, 2\], and float32\[4, 3\]': target((4, 3), b=1),
    r'a\.w is float32.*and bfloat16': target(dtype=jnp.bfloat16, b=1),
    'not wanted: b': target(),
    'no leaf c': target(b=1, c=1),
  }
  for message, tree in cases.items():
    with pytest.raises(ValueError, match=message):
      checkpointer.restore(tree)
  assert checkpointer.restore(target(b=1))[0] == 1


def test_targets_that_cannot_be_made_are_refused(open_checkpointer):
  checkpointer = open_checkpointer()
  checkpointer.save(1, {'w': jnp.ones(3)}, {}, wait=True)
  make = jax.ShapeDtypeStruct
  with pytest.raises(ValueError, match='w: give its ShapeDtypeStruct'):
    checkpointer.restore({'w': make((3,), jnp.float32)})
  uneven = make((3,), jnp.float32, sharding=sharding(2, 'x'))
  with pytest.raises(ValueError, match='w: cannot be sharded so'):
    checkpointer.restore({'w': uneven})


def test_what_cannot_be_saved_is_refused_at_once(open_checkpointer):
  checkpointer = open_checkpointer()
  with pytest.raises(ValueError, match='w: is a ndarray'):
    checkpointer.save(1, {'w': np.ones(2)}, {})
  with pytest.raises(ValueError, match='key: is a typed key'):
    checkpointer.save(1, {'key': jax.random.key(0)}, {})
  with pytest.raises(TypeError, match='int64'):
    checkpointer.save(1, {'w': jnp.ones(2)}, {'n': np.int64(1)})
  with pytest.raises(ValueError, match='keep=0'):
    checkpoint.Checkpointer(pathlib.Path('unused'), keep=0)


def test_failed_background_write_is_raised_by_the_next_call(
  open_checkpointer, tmp_path
):
  """The disk refuses files above a size, as a full disk would."""
  checkpointer = open_checkpointer()
  checkpointer.save(1, make_arrays(1), {}, wait=True)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  large = {'noise': np.random.default_rng(0).random(2**17).tolist()}
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    checkpointer.save(2, make_arrays(2), large)
    with pytest.raises(OSError) as caught:
      checkpointer.save(3, make_arrays(3), {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert caught.value.errno == errno.EFBIG
  assert open_checkpointer().restore(abstract(make_arrays()))[0] == 1
  checkpointer.save(2, make_arrays(2), large, wait=True)
  assert steps_on_disk(tmp_path) == [1, 2]


def test_failing_cleanup_is_a_warning(
  open_checkpointer, tmp_path, caplog, monkeypatch
):
  """Root may delete anything, so the refusal is a patch."""

  def refuse(path):
    raise PermissionError(errno.EACCES, 'Permission denied', str(path))

  checkpointer = open_checkpointer(keep=1)
  checkpointer.save(1, make_arrays(1), {}, wait=True)
  monkeypatch.setattr(shutil, 'rmtree', refuse)
  checkpointer.save(2, make_arrays(2), {}, wait=True)
  assert 'Cannot delete the old checkpoint' in caplog.text
  monkeypatch.undo()
  checkpointer.save(3, make_arrays(3), {}, wait=True)
  assert steps_on_disk(tmp_path) == [3]


def test_orbax_is_quiet_and_others_are_not(open_checkpointer, caplog):
  caplog.set_level(logging.INFO, logger='absl')
  open_checkpointer().save(1, make_arrays(), {}, wait=True)
  open_checkpointer().restore(abstract(make_arrays()))
  logging.getLogger('absl').info('from somebody else')
  assert [r.message for r in caplog.records if r.name == 'absl'] == [
    'from somebody else'
  ]


DIE_WHILE_SAVING = """
  import os, pathlib, signal, sys
  import jax.numpy as jnp
  from rl_jax import checkpoint

  folder, moment, ending = sys.argv[1:]

  def die(event, args):
    if event == 'os.rename' and str(args[1]) == folder + moment:
      os._exit(1) if ending == 'exit' else os.kill(os.getpid(), signal.SIGKILL)

  checkpointer = checkpoint.Checkpointer(pathlib.Path(folder), keep=1)
  checkpointer.save(1, {'w': jnp.full(100, 1.0)}, {'step': 1}, wait=True)
  sys.addaudithook(die)
  checkpointer.save(2, {'w': jnp.full(100, 2.0)}, {'step': 2}, wait=True)
"""


@pytest.mark.parametrize(
  'moment, ending, status, next_step',
  [
    pytest.param(
      '/2.orbax-checkpoint-tmp/arrays', 'exit', 1, 2, marks=pytest.mark.slow
    ),
    ('/2', 'kill', -signal.SIGKILL, 3),
  ],
)
def test_death_while_saving_leaves_the_older_one(
  open_checkpointer, tmp_path, moment, ending, status, next_step
):
  """Dies in the background thread, as it is about to rename something."""
  folder = tmp_path / 'checkpoints'
  script = textwrap.dedent(DIE_WHILE_SAVING)
  died = subprocess.run(
    [sys.executable, '-c', script, str(folder), moment, ending],
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert died.returncode == status, died.stderr
  left = sorted(p.name for p in folder.iterdir())
  assert left == ['1', '2.orbax-checkpoint-tmp']

  target = {
    'w': jax.ShapeDtypeStruct((100,), jnp.float32, sharding=sharding(1))
  }
  checkpointer = open_checkpointer(keep=2)
  step, arrays, host = checkpointer.restore(target)
  assert (step, host) == (1, {'step': 1})
  np.testing.assert_array_equal(np.asarray(arrays['w']), np.full(100, 1.0))
  checkpointer.save(next_step, arrays, {'again': True}, wait=True)
  left = sorted(p.name for p in folder.iterdir())
  assert left == ['1', str(next_step)]
  assert open_checkpointer().restore(target)[2] == {'again': True}


def test_group_round_trip_is_exact():
  mask = np.float32([0, 1, 1])
  rollout = Rollout(
    sample_index=np.int64(1),
    tokens=np.int32([5, 6, 2]),
    loss_mask=mask,
    behavior_logprobs=np.float32([0, -0.1, -np.inf]),
    kept_logmass=np.float32([-0.0, -1e-45, np.nan]),
    policy_versions=np.int32([-1, 3, 2**31 - 1]),
    finish_reason='length',
    text='\ud800\u2028\x00',
    verdict=Verdict('fail', np.float32(0.1), 'wrong', lenient_pass=True),
  )
  prompt = Prompt(
    prompt_id=np.int64(7),
    row='a/1',
    text='1+2=',
    tokens=np.int32([5]),
    answer={'tests': [[1, 2], None]},
  )
  text = json.dumps(checkpoint.group_to_json(Group(prompt, [rollout])))
  back = checkpoint.group_from_json(json.loads(text))
  assert (back.prompt.prompt_id, back.prompt.row) == (7, 'a/1')
  assert (back.prompt.text, back.prompt.answer) == (prompt.text, prompt.answer)
  (got,) = back.rollouts
  assert got.sample_index == 1
  assert got.text == rollout.text
  assert got.finish_reason == 'length'
  assert got.verdict == Verdict('fail', float(np.float32(0.1)), 'wrong', True)
  arrays = [(back.prompt.tokens, prompt.tokens)]
  for name in (
    'tokens',
    'loss_mask',
    'behavior_logprobs',
    'kept_logmass',
    'policy_versions',
  ):
    arrays.append((getattr(got, name), getattr(rollout, name)))
  for back_array, array in arrays:
    assert back_array.dtype == array.dtype
    assert back_array.tobytes() == array.tobytes()


def test_group_of_another_dtype_is_refused():
  prompt = Prompt(1, 'a/1', 'x', np.int64([5]), '3')
  with pytest.raises(ValueError, match=r'tokens: is int64\[1\], must be int32'):
    checkpoint.group_to_json(Group(prompt, []))
