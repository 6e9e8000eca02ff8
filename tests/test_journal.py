"""The account of a run, against numbers worked by hand on a clock of ours."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax import evaluate, journal
from rl_jax.algorithms import base as algorithms
from rl_jax.journal import (
  Journal,
  check_config,
  digest,
  finished,
  rollout_metrics,
)
from rl_jax.metrics import Timeline
from rl_jax.sync.single_process import Sent
from rl_jax.types import Group, Prompt, Rollout, Verdict

CONFIG = {
  'num_steps': 10,
  'optimizer': {'learning_rate': 0.1},
  'evaluation': {'num_prompts': 2, 'ks': (1, 2)},
  'checkpoint': {'keep': 2},
  'service': {'num_workers': 1},
}


def make_rollout(index, status, score, finish, num_tokens, version):
  mask = np.float32([0, 0] + [1] * num_tokens)
  return Rollout(
    sample_index=index,
    tokens=np.zeros(num_tokens + 2, np.int32),
    loss_mask=mask,
    behavior_logprobs=mask * 0,
    kept_logmass=mask * 0,
    policy_versions=np.int32([-1, -1] + [version] * num_tokens),
    finish_reason=finish,
    text='a' * 50,  # characters are not tokens
    verdict=Verdict(status, score, 'why'),
  )


def make_group(prompt_id, *rollouts):
  prompt = Prompt(prompt_id, f'sums/{prompt_id}', '1+2=', np.int32([1, 2]), '3')
  made = [make_rollout(i, *rollout) for i, rollout in enumerate(rollouts)]
  return Group(prompt, made)


# Two groups that step 7 consumes: 20 tokens in 6 rollouts.
GROUPS = (
  make_group(
    0,
    ('pass', 1.0, 'stop', 3, 7),
    ('fail', 0.0, 'length', 8, 6),
    ('error', 0.0, 'stop', 2, 7),
  ),
  make_group(
    1,
    ('pass', 0.5, 'stop', 1, 5),
    ('timeout', 0.0, 'length', 4, 5),
    ('refused', 0.0, 'stop', 2, 5),
  ),
)


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  timeline = functools.partial(Timeline, clock=clock)
  monkeypatch.setattr(journal, 'Timeline', timeline)
  return clock


def select(groups):
  return algorithms.select(groups, lambda r: r - r.mean(), algorithms.Config())


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def strict(path):
  """JSON as the standard has it: no NaN."""

  def refuse(constant):
    raise AssertionError(f'{constant} is no JSON')

  return json.loads(path.read_text(), parse_constant=refuse)


# ---- what the rollouts of a step look like


def test_rollout_metrics_by_hand():
  assert rollout_metrics(GROUPS, step=7) == {
    'reward': (1.0 + 0.0 + 0.5 + 0.0) / 4,  # of those that were judged
    'pass_at_1': 2 / 6,
    'completion_tokens': 20 / 6,
    'completion_tokens_max': 8.0,
    'truncated_frac': 2 / 6,
    'empty_frac': 0.0,
    'same_frac': 1.0,
    'staleness': (1 + 2) / 2,  # versions 6 and 5 are the oldest
    'staleness_max': 2.0,
    'verdict/pass': 2 / 6,
    'verdict/fail': 1 / 6,
    'verdict/timeout': 1 / 6,
    'verdict/error': 1 / 6,
    'verdict/refused': 1 / 6,
  }


def test_rollout_metrics_where_nothing_was_judged():
  group = make_group(
    0, ('error', 0.0, 'stop', 1, 3), ('error', 0, 'stop', 1, 3)
  )
  metrics = rollout_metrics([group], step=3)
  assert np.isnan(metrics['reward'])  # not 0: nothing was judged
  assert metrics['pass_at_1'] == 0.0
  assert metrics['verdict/error'] == 1.0
  assert metrics['staleness'] == metrics['staleness_max'] == 0.0


def test_every_completion_cut_is_a_truncation_rate_of_one():
  group = make_group(0, *[('fail', 0.0, 'length', 2, 0)] * 3)
  assert rollout_metrics([group], step=0)['truncated_frac'] == 1.0


# ---- a step


def test_a_step_by_hand(tmp_path, clock, capsys):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    with j.timeline.state('generation', 'generate'):
      clock.now += 4
    with j.training('wait'):
      clock.now += 2
    with j.training('update'):
      clock.now += 2
    j.ledger.generated(24)
    j.trained(7, 10, GROUPS, select(GROUPS), {'loss': 0.5})
    j.ledger.balance(4)
    assert j.ledger.as_dict() == {
      'generated': 24,
      'consumed/update': 3 + 8 + 1 + 4,
      'consumed/evaluation': 0,
      'consumed/gate': 0,
      'dropped/unscored': 2 + 2,
    }
  (row,) = lines(tmp_path / 'metrics.jsonl')
  assert row.pop('time') > 0
  assert {name: row[name] for name in row if '/' not in name} == {
    'phase': 'rl',
    'step': 7,
    'reward': 0.375,
    'pass_at_1': 2 / 6,
    'completion_tokens': 20 / 6,
    'completion_tokens_max': 8.0,
    'truncated_frac': 2 / 6,
    'empty_frac': 0.0,
    'same_frac': 1.0,
    'staleness': 1.5,
    'staleness_max': 2.0,
    'groups_with_signal': 2,
    'skipped_update': 0.0,
    'tokens_per_second': 24 / 8,
    'compilations': 0,
  }
  assert row['update/loss'] == 0.5
  assert row['excluded/unscored'] == 2 and row['excluded/no_signal'] == 0
  assert row['seconds/step'] == 8
  assert row['seconds/generation/generate'] == 4
  assert row['seconds/generation/idle'] == 4
  assert row['seconds/training/wait'] == row['seconds/training/update'] == 2
  assert row['seconds/training/idle'] == 4
  assert row['utilisation/generation'] == 0.5
  assert row['utilisation/training'] == 0.25
  # A first step, which compiles, foretells nothing.
  assert capsys.readouterr().out == (
    'step    8/10  reward 0.375  pass@1 0.333  len 3.3  3 tok/s  gen 50%  '
    'learn 2.00s  eta ?\n'
    'WARNING: 17% of the completions could not be verified and leave the loss; '
    'the first: why\n'
  )
  assert len(lines(tmp_path / 'rollouts.jsonl')) == 6


def test_what_a_step_compiles_is_counted(tmp_path):
  double = jax.jit(lambda x: x * 2)
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    for step, size in enumerate((3, 3, 4)):
      double(np.zeros(size))
      j.trained(step, 10, GROUPS, select(GROUPS), {})
  double(np.zeros(5))
  rows = lines(tmp_path / 'metrics.jsonl')
  assert [row['compilations'] for row in rows] == [1, 0, 1]


def test_speed_is_that_of_the_last_step(tmp_path, clock, capsys):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    for step, (seconds, tokens) in enumerate(((10, 20), (3, 60), (1, 5))):
      clock.now += seconds
      j.ledger.generated(tokens)
      j.trained(step, 3602, GROUPS, select(GROUPS), {})
      clock.now += 50  # is of no step
      j.evaluated('x', step, evaluate.summarise(GROUPS, (1,)), GROUPS)
  rows = [row for row in lines(tmp_path / 'metrics.jsonl') if 'reward' in row]
  assert [row['seconds/step'] for row in rows] == [10, 3, 1]
  assert [row['tokens_per_second'] for row in rows] == [2, 20, 5]
  # 3600 steps left of 3 s; 3599 of 2 s, the mean of all but the first.
  etas = re.findall(r'eta (\S+)', capsys.readouterr().out)
  assert etas == ['?', '3:00:00', '1:59:58']


def test_an_update_without_signal_is_skipped_and_said(tmp_path, capsys):
  group = make_group(0, *[('pass', 1.0, 'stop', 5, 0)] * 2)
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    j.ledger.generated(10)
    j.trained(0, 10, [group], select([group]), {})
    j.ledger.balance(0)
    assert j.ledger.as_dict()['dropped/no_signal'] == 10
    assert j.ledger.as_dict()['consumed/update'] == 0
  (row,) = lines(tmp_path / 'metrics.jsonl')
  assert row['skipped_update'] == 1.0 and row['groups_with_signal'] == 0
  assert 'no signal: update skipped' in capsys.readouterr().out


@pytest.mark.parametrize('truncated', ['keep', 'zero', 'mask'])
def test_the_ledger_balances_whatever_is_left_out(tmp_path, truncated):
  group = make_group(
    2,
    ('pass', 1.0, 'stop', 0, 7),  # empty
    ('fail', 0.0, 'length', 6, 7),
    ('error', 0.0, 'stop', 3, 7),
    ('fail', 0.0, 'stop', 2, 7),
  )
  config = algorithms.Config(truncated=truncated)
  groups = [*GROUPS, group]
  selection = algorithms.select(groups, lambda r: r - r.mean(), config)
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    j.ledger.generated(31)
    j.trained(7, 10, groups, selection, {})
    j.ledger.balance(0)


def test_the_alarm_of_truncation_sounds_once(tmp_path, capsys):
  def group(*finishes):
    return make_group(0, *[('fail', 0.0, f, 2, 0) for f in finishes])

  below = group('stop', 'stop', 'length')
  half = group('stop', 'length')
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    sounded = []
    for g in (below, half, half, group('length', 'length')):
      j.trained(0, 10, [g], select([g]), {})
      sounded.append('WARNING' in (out := capsys.readouterr().out))
      if sounded[-1]:
        assert 'WARNING: 50% of the completions were cut at sampl' in out
  assert sounded == [False, True, False, False]


def test_the_alarm_of_errors_names_the_first_and_sounds_once(tmp_path, capsys):
  def group(num_errors):
    rollouts = [('error', 0.0, 'stop', 2, 0)] * num_errors
    return make_group(0, *rollouts, *[('fail', 0.0, 'stop', 2, 0)] * 95)

  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    sounded = []
    for g in (group(0), group(4), group(5), group(50)):
      j.trained(0, 10, [g], select([g]), {})
      sounded.append('WARNING' in (out := capsys.readouterr().out))
      if sounded[-1]:
        assert '5% of the completions could not be verified' in out
        assert 'the first: why' in out
  assert sounded == [False, False, True, False]


EMPTY = '50% of the completions are empty'
SAME = '90% of the completions of 4 prompts are one text'


@pytest.mark.parametrize(
  ('num_prompts', 'texts', 'told'),
  [
    (4, ['{}', '{}', '{}'], []),  # one text a prompt, each its own
    (4, ['{}', '{}a', ' \n'], []),
    (4, ['{}', ''], [EMPTY]),
    (4, ['9', ' 9'] + ['9'] * 7 + ['{}'], [SAME]),
    (4, ['9'] * 8 + ['{}', '{}a'], []),
    (3, ['9'] * 10, []),  # so few prompts may have one answer
  ],
)
def test_a_policy_that_collapses_is_told_once(
  num_prompts, texts, told, tmp_path, capsys
):
  def group(index):
    made = make_group(index, *[('fail', 0.0, 'stop', 1, 0)] * len(texts))
    return Group(
      made.prompt,
      [
        dataclasses.replace(r, text=text.format(index))
        for r, text in zip(made.rollouts, texts, strict=True)
      ],
    )

  groups = [group(i) for i in range(num_prompts)]
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    for step in range(2):
      j.trained(step, 10, groups, select(groups), {})
  out = capsys.readouterr().out
  assert re.findall(r'WARNING: (.*?);', out) == told


def test_before_and_after_sft_are_told_apart(tmp_path):
  result = evaluate.summarise(GROUPS, (1,))
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    j.evaluated('before_sft', 0, result, GROUPS)
    j.evaluated('after_sft', 0, result, GROUPS)
  rows = lines(tmp_path / 'metrics.jsonl')
  assert [row['phase'] for row in rows] == ['sft', 'rl']


def test_an_evaluation_is_done_again_with_another_config_only(tmp_path):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    assert not j.has_evaluated('x', 3)
    j.evaluated('x', 3, evaluate.summarise(GROUPS, (1,)), GROUPS)
    saved = json.loads(json.dumps(j.state()))
  with Journal(tmp_path, CONFIG, saved, 'heldout') as j:
    assert j.has_evaluated('x', 3)
    assert not j.has_evaluated('x', 4) and not j.has_evaluated('y', 3)
  other = CONFIG | {'evaluation': {'num_prompts': 3, 'ks': (1, 2)}}
  with Journal(tmp_path, other, saved, 'heldout') as j:
    assert not j.has_evaluated('x', 3)


def test_evaluations_of_other_prompts_are_not_gone_on_with(tmp_path):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    saved = j.state()
  with pytest.raises(ValueError, match=r'held-out prompts changed since'):
    Journal(tmp_path, CONFIG, saved, 'others')


def test_other_versions_are_told(tmp_path, capsys):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    saved = j.state()
  Journal(tmp_path, CONFIG, saved, 'heldout').__exit__()
  assert 'WARNING' not in capsys.readouterr().out
  saved['versions']['jax'] = '0.1'
  Journal(tmp_path, CONFIG, saved, 'heldout').__exit__()
  out = capsys.readouterr().out
  assert f"not bit by bit: {{'jax': '0.1 -> {jax.__version__}'}}" in out


def test_a_damaged_summary_is_made_again(tmp_path):
  Journal(tmp_path, CONFIG, None, 'heldout').__exit__()
  (tmp_path / 'summary.json').write_text('{"tokens": 1}')
  assert journal.finished(tmp_path, CONFIG) == {'tokens': 1}
  (tmp_path / 'summary.json').write_text('{"tokens')
  assert journal.finished(tmp_path, CONFIG) is None


def test_sft_steps_are_written_and_told_now_and_then(tmp_path, capsys):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    for step in range(25):
      j.imitated(step, 25, {'loss': 1.5})
  rows = lines(tmp_path / 'metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(25))
  assert {row['phase'] for row in rows} == {'sft'}
  assert {row['sft/loss'] for row in rows} == {1.5}
  told = capsys.readouterr().out.splitlines()
  assert [line.split()[1] for line in told] == ['20/25', '25/25']


# ---- the end


PARAMS = {'w': np.arange(4, dtype=np.float32)}


def test_the_summary_holds_what_a_reader_needs(tmp_path, clock, capsys):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    with j.training('sync'):
      clock.now += 1.5
    with j.timeline.state('generation', 'generate'):
      clock.now += 2.5
    j.synced(Sent([], 0, num_bytes=1000, seconds=0.25))
    j.synced(Sent([], 1, num_bytes=2000, seconds=0.5))
    j.ledger.generated(40)
    j.gated(np.float32([0.5, 0.25, 0.0]), np.zeros(0), GROUPS)
    j.evaluated('before_rl', 0, evaluate.summarise(GROUPS, (1,)), GROUPS)
    returned = j.summarise(PARAMS, 'two meshes')
  summary = strict(tmp_path / 'summary.json')
  assert summary['params_sha256'] == returned['params_sha256'] == digest(PARAMS)

  (entry,) = summary['evaluation'].values()
  want = evaluate.summarise(GROUPS, (1,)).as_dict()
  assert list(summary['evaluation']) == ['before_rl']
  asked = {'num_prompts': 2, 'ks': [1, 2]}
  assert entry == {'step': 0, **want, 'config': asked}
  assert (entry['n'], entry['pass_at_1']) == (2, 1 / 3)
  assert 0 < entry['low'] < entry['pass_at_1'] < entry['high'] < 1

  assert summary['wall_seconds'] == 4.0
  assert summary['seconds'] == {
    'generation': {'idle': 1.5, 'generate': 2.5},
    'training': {'idle': 2.5, 'sync': 1.5},
  }
  for states in summary['seconds'].values():
    assert sum(states.values()) == summary['wall_seconds']
  assert summary['tokens'] == {
    'generated': 40,
    'consumed/update': 0,
    'consumed/evaluation': 20,
    'consumed/gate': 20,
  }
  assert summary['parity'] == {'max': 0.5, 'mean': 0.25, 'num_tokens': 3}
  assert summary['sync'] == {'count': 2, 'bytes': 3000, 'seconds': 0.75}
  assert summary['mesh'] == 'two meshes'
  assert summary['command'] == sys.argv
  assert summary['versions']['jax'] == jax.__version__
  assert summary['versions'].keys() >= {'python', 'flax', 'optax', 'grain'}
  assert summary['hardware']['cpu_cores'] == os.cpu_count()
  assert summary['hardware']['devices'] == ['cpu'] * 8
  assert re.match(r'\d{4}-\d\d-\d\dT', summary['finished'])

  out = capsys.readouterr().out
  assert 'parity of generator and learner' in out and 'max 5.00e-01' in out
  assert 'evaluation before_rl: pass@1 0.333 [' in out
  assert 'wall time       4 s' in out
  assert 'generation      generate 62%, idle 38%' in out
  assert digest(PARAMS) in out


def test_where_nothing_passes_the_summary_is_still_json(tmp_path):
  group = make_group(0, ('fail', 0.0, 'stop', 2, 0))
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    j.evaluated('before_rl', 0, evaluate.summarise([group], (1,)), [group])
    j.summarise(PARAMS, '')
  (entry,) = strict(tmp_path / 'summary.json')['evaluation'].values()
  assert entry['pass_at_1'] == 0.0
  assert entry['accepted_stop_rate'] == 'nan'  # a share of none


def test_a_resumed_run_goes_on_with_its_account(tmp_path, clock):
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    with j.training('update'):
      clock.now += 3
    j.ledger.generated(20)
    j.synced(Sent([], 0, num_bytes=1000, seconds=0.25))
    j.evaluated('before_rl', 0, evaluate.summarise(GROUPS, (1,)), GROUPS)
    j.imitated(0, 9, {'loss': 1.0})
    saved = json.loads(json.dumps(j.state()))
    j.imitated(1, 9, {'loss': 2.0})  # after the checkpoint: never was
  clock.now += 1000  # nobody ran
  with Journal(tmp_path, CONFIG, saved, 'heldout') as j:
    with j.training('update'):
      clock.now += 2
    j.ledger.balance(0)
    j.synced(Sent([], 1, num_bytes=1000, seconds=0.25))
    j.imitated(1, 9, {'loss': 3.0})
    summary = j.summarise(PARAMS, '')
  assert summary['wall_seconds'] == 5
  assert summary['seconds']['training'] == {'idle': 0, 'update': 5}
  assert summary['seconds']['generation'] == {'idle': 5}
  assert summary['sync'] == {'count': 2, 'bytes': 2000, 'seconds': 0.5}
  assert list(summary['evaluation']) == ['before_rl']
  rows = lines(tmp_path / 'metrics.jsonl')
  losses = [row['sft/loss'] for row in rows if 'sft/loss' in row]
  assert losses == [1.0, 3.0]


# ---- the config of a workdir


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'num_steps': 20},
    {'evaluation': {'num_prompts': 9, 'ks': (1,)}},
    {'checkpoint': {'keep': 5, 'every_steps': 1}},
    {'service': {'num_workers': 4}},
  ],
)
def test_what_a_resumed_run_may_change(tmp_path, changes):
  Journal(tmp_path, CONFIG, None, 'heldout').__exit__()
  check_config(tmp_path, CONFIG | changes)
  Journal(tmp_path, CONFIG | changes, None, 'heldout').__exit__()
  written = strict(tmp_path / 'config.json')
  assert written == json.loads(json.dumps(CONFIG | changes))


@pytest.mark.parametrize(
  'changes, names',
  [
    (
      {'optimizer': {'learning_rate': 0.2}},
      [r'optimizer\.learning_rate: 0\.1 -> 0\.2'],
    ),
    ({'seed': 1}, ['seed: None -> 1']),
    ({'optimizer': {}}, [r'optimizer\.learning_rate: 0\.1 -> None']),
    ({'sft': {'num_steps': 3}}, [r'sft\.num_steps: None -> 3']),
    (
      {'a': 1, 'num_steps': 9, 'model': {'sizes': {'d': 2}}},
      ['a: None -> 1', r'model\.sizes\.d: None -> 2'],
    ),
  ],
)
def test_what_a_resumed_run_may_not_change(tmp_path, changes, names):
  Journal(tmp_path, CONFIG, None, 'heldout').__exit__()
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n')
  before = (tmp_path / 'config.json').read_text()
  with pytest.raises(ValueError, match='holds a run of another config') as e:
    Journal(tmp_path, CONFIG | changes, None, 'heldout')
  for name in names:
    assert re.search(name, str(e.value))
  assert str(e.value).count(' -> ') == len(names)
  assert 'num_steps, checkpoint, evaluation' in str(e.value)
  # Nothing of the other run was touched.
  assert (tmp_path / 'config.json').read_text() == before
  assert (tmp_path / 'metrics.jsonl').read_text() == '{"step": 0}\n'


def test_a_workdir_that_is_new_takes_any_config(tmp_path):
  check_config(tmp_path / 'new', CONFIG)
  Journal(tmp_path / 'new' / 'run', CONFIG, None, 'heldout').__exit__()
  assert strict(tmp_path / 'new' / 'run' / 'config.json')['num_steps'] == 10


def test_a_decaying_learning_rate_fixes_the_number_of_steps(tmp_path):
  config = CONFIG | {'optimizer': {'decay': 'linear'}}
  Journal(tmp_path, config, None, 'heldout').__exit__()
  check_config(tmp_path, config)
  with pytest.raises(
    ValueError, match=r"num_steps: 10 -> 20: .*decay='linear'"
  ):
    check_config(tmp_path, config | {'num_steps': 20})


def test_checkpoints_of_an_unknown_run_are_not_gone_on_with(tmp_path):
  (tmp_path / 'checkpoints' / 'sft').mkdir(parents=True)
  check_config(tmp_path, CONFIG)
  (tmp_path / 'checkpoints' / 'rl' / '3').mkdir(parents=True)
  with pytest.raises(ValueError, match=r'checkpoints but no config\.json'):
    check_config(tmp_path, CONFIG)


@pytest.mark.parametrize('text', ['', '{"num_steps": 1', '[1]', 'null'])
def test_a_damaged_config_is_named(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(ValueError, match=r'config\.json is damaged'):
    check_config(tmp_path, CONFIG)


def test_finished_is_the_end_of_this_very_run(tmp_path):
  assert finished(tmp_path, CONFIG) is None
  with Journal(tmp_path, CONFIG, None, 'heldout') as j:
    assert finished(tmp_path, CONFIG) is None
    j.summarise(PARAMS, '')
  found = finished(tmp_path, CONFIG)
  assert found and found['params_sha256'] == digest(PARAMS)
  assert finished(tmp_path, CONFIG | {'num_steps': 20}) is None
  # A run that goes on has not ended, until it ends again.
  Journal(tmp_path, CONFIG | {'num_steps': 20}, None, 'heldout').__exit__()
  assert finished(tmp_path, CONFIG | {'num_steps': 20}) is None


def test_an_infinite_bound_stays_the_same_config(tmp_path):
  config = {'parity': {'max_abs': float('inf')}}
  Journal(tmp_path, config, None, 'heldout').__exit__()
  check_config(tmp_path, config)
  assert strict(tmp_path / 'config.json') == {'parity': {'max_abs': 'inf'}}


# ---- files


def test_write_json_is_all_or_nothing(tmp_path, monkeypatch):
  path = tmp_path / 'x.json'
  journal.write_json(path, {'old': (1, 2)})
  with pytest.raises(TypeError):
    journal.write_json(path, {'new': object()})
  assert strict(path) == {'old': [1, 2]}

  seen = []
  replace = pathlib.Path.replace

  def killed(self, target):
    seen.append(strict(target))  # a reader, before the last moment
    raise KeyboardInterrupt

  monkeypatch.setattr(pathlib.Path, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    journal.write_json(path, {'new': 1})
  monkeypatch.setattr(pathlib.Path, 'replace', replace)
  assert seen == [strict(path)] == [{'old': [1, 2]}]
  journal.write_json(path, {'new': 1})
  assert strict(path) == {'new': 1}
  assert [p.name for p in tmp_path.iterdir()] == ['x.json']


def flipped(array, byte):
  copy = array.copy()
  copy.view(np.uint8).reshape(-1)[byte] ^= 1
  return copy


def test_the_digest_sees_every_bit_and_name():
  params = {
    'blocks': ({'w': np.ones((2, 3), np.float32)}, {'w': np.zeros(2)}),
    'stem': {'b': np.ones(3, ml_dtypes.bfloat16)},
  }
  digests = [digest(params)]
  leaves, treedef = jax.tree.flatten(params)
  for i, leaf in enumerate(leaves):
    for byte in range(leaf.nbytes):
      changed = [*leaves[:i], flipped(leaf, byte), *leaves[i + 1 :]]
      digests.append(digest(treedef.unflatten(changed)))
  digests.append(digest({**params, 'stem': {'c': params['stem']['b']}}))
  digests.append(digest({**params, 'blocks': params['blocks'][::-1]}))
  digests.append(digest({**params, 'more': np.zeros(1, np.int8)}))
  assert len(set(digests)) == len(digests) == 1 + 24 + 16 + 6 + 3


def test_the_digest_is_of_values_in_the_order_of_paths():
  a, b = np.float32([1, -0.0]), np.int32([[7]])
  sha = hashlib.sha256(b"['a']" + a.tobytes() + b"['b']" + b.tobytes())
  assert digest({'b': b, 'a': a}) == sha.hexdigest()
  assert digest({'b': b, 'a': np.float32([1, 0.0])}) != sha.hexdigest()


def test_the_digest_does_not_depend_on_the_mesh():
  mesh = Mesh(np.array(jax.devices()), ('data',))
  value = np.arange(16, dtype=np.float32).reshape(8, 2)
  for spec in (PartitionSpec(), PartitionSpec('data')):
    placed = jax.device_put(value, NamedSharding(mesh, spec))
    assert digest({'w': placed}) == digest({'w': value})
