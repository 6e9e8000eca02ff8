"""Checkpoints of a run on disk: what was saved comes back bit by bit."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.config import Checkpoint
from rl_jax.learner.learner import TrainState
from rl_jax.saving import Saves, locked, rollouts_to_json
from rl_jax.types import Group, Prompt, Rollout, Verdict

# What model output may hold, and what splits lines elsewhere.
TEXT = 'a\u2028b\u0085c\rd\x00e\ud800f\U0001f600\n"\\'


def make_prompt(n, answer='3'):
  return Prompt(n, f'sums/{n}', TEXT, np.int32([n, 2, 3]), answer)


def make_rollout(i):
  return Rollout(
    sample_index=i,
    tokens=np.int32([4, 5, 6 + i]),
    loss_mask=np.float32([0, 1, 1]),
    behavior_logprobs=np.float32([0, -1 / 3, -1e-30]),
    kept_logmass=np.float32([0, -0.0, -np.pi]),
    policy_versions=np.int32([-1, 3, 4]),
    finish_reason='length' if i else 'stop',
    text=TEXT,
    verdict=Verdict('fail' if i else 'pass', 0.1, TEXT),
  )


SNAPSHOT = {
  'num_admitted': 14,
  'ready': {
    11: Group(make_prompt(11), [make_rollout(0), make_rollout(1)]),
    10: Group(make_prompt(10, answer={'x': [1, None]}), [make_rollout(0)]),
  },
  'in_flight': {13: make_prompt(13), 9: make_prompt(9, answer=[1.5, 'y'])},
  'unfinished_tokens': 17,
}


def make_state(scale):
  params = {'w': jnp.arange(6.0).reshape(2, 3) * scale}
  return TrainState(params, {'count': jnp.int32(scale), 'mu': params})


def abstract(state):
  return jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
  )


def assert_equal(got, want):
  """Records and arrays, to the last bit; lists and tuples are alike."""
  if isinstance(want, np.ndarray):
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes() and got.shape == want.shape
  elif hasattr(want, '__dataclass_fields__'):
    assert type(got) is type(want)
    for name in want.__dataclass_fields__:
      assert_equal(getattr(got, name), getattr(want, name))
  elif isinstance(want, list | tuple):
    assert len(got) == len(want)
    for a, b in zip(got, want):
      assert_equal(a, b)
  else:
    assert got == want and type(got) is type(want)


def test_rollouts_come_back_from_the_disk(tmp_path):
  host = {'rollouts': rollouts_to_json(SNAPSHOT), 'stream': {'num_drawn': 14}}
  with Saves(tmp_path, Checkpoint()) as saves:
    saves.save('rl', 5, make_state(2), host, wait=True)
  with Saves(tmp_path, Checkpoint()) as saves:
    saved = saves.restore('rl', abstract(make_state(0)))
  assert saved.step == 5
  assert isinstance(saved.state, TrainState)
  jax.tree.map(
    np.testing.assert_array_equal, tuple(saved.state), tuple(make_state(2))
  )
  assert saved.host['stream'] == {'num_drawn': 14}
  rollouts = saved.host['rollouts']
  assert (rollouts['num_admitted'], rollouts['unfinished_tokens']) == (14, 17)
  # In the order of the snapshot, in which they are submitted again.
  assert list(saved.ready) == [11, 10]
  assert list(saved.in_flight) == [13, 9]
  for index, group in SNAPSHOT['ready'].items():
    assert_equal(saved.ready[index], group)
  for index, prompt in SNAPSHOT['in_flight'].items():
    assert_equal(saved.in_flight[index], prompt)


def test_an_empty_snapshot(tmp_path):
  empty = {'ready': {}, 'in_flight': {}, 'num_admitted': 0}
  host = {'rollouts': rollouts_to_json({**empty, 'unfinished_tokens': 0})}
  with Saves(tmp_path, Checkpoint()) as saves:
    saves.save('rl', 0, make_state(1), host, wait=True)
    saved = saves.restore('rl', abstract(make_state(0)))
  assert saved.ready == saved.in_flight == {}


def test_phases_are_apart_and_the_newest_counts(tmp_path):
  with Saves(tmp_path, Checkpoint(keep=2)) as saves:
    target = abstract(make_state(0))
    assert saves.restore('sft', target) is saves.restore('rl', target) is None
    for step in (1, 2, 3):
      saves.save('sft', step, make_state(step), {'of': 'sft'})
    assert saves.restore('rl', target) is None
    saves.save('rl', 2, make_state(9), {'of': 'rl'})
  with Saves(tmp_path, Checkpoint(keep=2)) as saves:
    sft, rl = saves.restore('sft', target), saves.restore('rl', target)
  assert (sft.step, sft.host, int(sft.state.opt_state['count'])) == (
    *(3, {'of': 'sft'}, 3),
  )
  assert (rl.step, rl.host, int(rl.state.opt_state['count'])) == (
    *(2, {'of': 'rl'}, 9),
  )
  kept = (tmp_path / 'checkpoints' / 'sft').glob('[0-9]*')
  assert sorted(path.name for path in kept) == ['2', '3']


def test_the_state_may_be_donated_once_save_returns(tmp_path):
  double = jax.jit(lambda x: x * 2, donate_argnums=0)
  state = make_state(3)
  with Saves(tmp_path, Checkpoint()) as saves:
    saves.save('rl', 1, state, {})
    for leaf in jax.tree.leaves(state.params):
      double(leaf)
  with Saves(tmp_path, Checkpoint()) as saves:
    saved = saves.restore('rl', abstract(make_state(0)))
  np.testing.assert_array_equal(
    saved.state.params['w'], make_state(3).params['w']
  )


@pytest.mark.parametrize(
  'every, due', [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])]
)
def test_is_due(tmp_path, every, due):
  with Saves(tmp_path, Checkpoint(every_steps=every)) as saves:
    assert [step for step in range(1, 7) if saves.is_due(step)] == due


# ---- one run in a workdir


def test_a_second_run_is_kept_out_and_told_by_whom(tmp_path):
  workdir = tmp_path / 'runs' / 'new'
  with locked(workdir):
    with pytest.raises(ValueError, match=f'process {os.getpid()};') as error:
      with locked(workdir):
        pass
    assert str(workdir) in str(error.value)
  with locked(workdir):
    pass


def test_a_killed_run_leaves_no_lock(tmp_path):
  code = (
    'import pathlib, sys, time\n'
    'from rl_jax.saving import locked\n'
    'with locked(pathlib.Path(sys.argv[1])):\n'
    "  print('in', flush=True)\n"
    '  time.sleep(600)\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE
  ) as process:
    assert process.stdout and process.stdout.readline() == b'in\n'
    with pytest.raises(ValueError, match=f'process {process.pid};'):
      with locked(tmp_path):
        pass
    process.kill()
    process.wait()
  with locked(tmp_path):
    pass


def test_a_workdir_that_is_a_file_is_said_to_be_one(tmp_path):
  path = tmp_path / 'file'
  path.write_text('')
  with pytest.raises(ValueError, match='is a file; name a directory'):
    with locked(path):
      pass
