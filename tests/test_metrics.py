"""Files are cut and read back; clocks and accounts are checked by hand."""

import contextlib
import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from rl_jax import metrics
from rl_jax.types import Group, Prompt, Rollout, Verdict

NASTY = 'a\u2028b\u0085c\rd\ne\x00f\ud800g\U0001f600"\\'


def lines(path):
  text = path.read_bytes().decode('ascii')
  assert text == '' or text.endswith('\n')
  assert text.splitlines() == text.split('\n')[:-1]
  return [json.loads(line) for line in text.split('\n')[:-1]]


def open_writer(workdir, cursor=None):
  return contextlib.closing(metrics.MetricsWriter(workdir, cursor))


def read_events(workdir, phase='rl'):
  path = workdir / 'tensorboard' / phase
  events = event_accumulator.EventAccumulator(str(path))
  events.Reload()
  return events


def make_group(text='ok', versions=(-1, 4, 5), score=1.0):
  rollout = Rollout(
    sample_index=np.int64(2),
    tokens=np.int32([5, 6, 7]),
    loss_mask=np.float32([v >= 0 for v in versions]),
    behavior_logprobs=np.float32([0, -0.5, -0.25]),
    kept_logmass=np.zeros(3, np.float32),
    policy_versions=np.int32(versions),
    finish_reason='stop',
    text=text,
    verdict=Verdict('pass' if score == 1 else 'fail', score, NASTY),
  )
  prompt = Prompt(np.int64(7), 'a/1', NASTY, np.int32([5]), '3')
  return Group(prompt, [rollout])


def test_scalars_of_every_kind(tmp_path):
  with open_writer(tmp_path) as writer:
    writer.scalars(
      np.int64(3),
      {
        'python': 0.1,
        'count': 2**60,
        'flag': True,
        'numpy': np.float32(0.5),
        'jax': jnp.float32(0.25),
        'half': jnp.bfloat16(1.5),
        'jax_int': jnp.int32(-7),
        'nan': jnp.nan,
        'inf': np.inf,
        'minus': np.float32(-np.inf),
      },
    )
  (line,) = lines(tmp_path / 'metrics.jsonl')
  assert line.pop('time') > 1.6e9
  assert line == {
    'phase': 'rl',
    'step': 3,
    'python': 0.1,
    'count': 2**60,
    'flag': 1,
    'numpy': 0.5,
    'jax': 0.25,
    'half': 1.5,
    'jax_int': -7,
    'nan': 'nan',
    'inf': 'inf',
    'minus': '-inf',
  }
  assert float(line['minus']) == -np.inf
  events = read_events(tmp_path)
  assert [(e.step, e.value) for e in events.Scalars('half')] == [(3, 1.5)]
  assert np.isnan(events.Scalars('nan')[0].value)


@pytest.mark.parametrize('value', [np.ones(1), [1, 2], 'x', None, 1j])
def test_what_is_not_one_number_is_refused(tmp_path, value):
  with open_writer(tmp_path) as writer:
    with pytest.raises(ValueError, match='metric loss='):
      writer.scalars(0, {'loss': value})
    for name in ('step', 'phase'):
      with pytest.raises(ValueError, match=f"'{name}': the name is taken"):
        writer.scalars(0, {name: 1})
  assert lines(tmp_path / 'metrics.jsonl') == []


def test_text_is_read_back_by_tensorboard(tmp_path):
  with open_writer(tmp_path) as writer:
    writer.text(2, 'sample', '**bold** \u2028 \ud800 \U0001f600')
  events = read_events(tmp_path)
  assert events.PluginTagToContent('text').keys() == {'sample'}
  (event,) = events.Tensors('sample')
  assert event.step == 2
  assert [s.decode() for s in event.tensor_proto.string_val] == [
    '**bold** \u2028 \\ud800 \U0001f600'
  ]


def test_rollouts_round_trip(tmp_path):
  group = make_group(NASTY, score=np.float32(0.1))
  with open_writer(tmp_path) as writer:
    groups = [group, make_group(versions=(-1, -1, -1))]
    writer.rollouts(np.int64(9), groups, {id(group.rollouts[0]): -0.5})
  first, empty = lines(tmp_path / 'rollouts.jsonl')
  assert first == {
    'step': 9,
    'prompt_id': 7,
    'row': 'a/1',
    'sample_index': 2,
    'policy_version_oldest': 4,
    'policy_version_newest': 5,
    'prompt': NASTY,
    'answer': '3',
    'completion': NASTY,
    'status': 'fail',
    'score': float(np.float32(0.1)),
    'reason': NASTY,
    'lenient_pass': False,
    'num_completion_tokens': 2,
    'finish_reason': 'stop',
    'advantage': -0.5,
  }
  assert empty['advantage'] is None
  assert empty['policy_version_oldest'] is None
  assert empty['num_completion_tokens'] == 0


def test_resume_lists_no_step_twice(tmp_path):
  with open_writer(tmp_path) as writer:
    for step in (0, 1):
      writer.scalars(step, {'loss': step})
      writer.rollouts(step, [make_group()], {})
    cursor = json.loads(json.dumps(writer.cursor()))
    writer.scalars(2, {'loss': -1})
    writer.rollouts(2, [make_group('lost')], {})
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(b'{"step": 3, "ti')  # killed in the middle of a line
  with open_writer(tmp_path, cursor) as writer:
    writer.scalars(2, {'loss': 2})
    writer.rollouts(2, [make_group('kept')], {})
    assert writer.cursor()['next_steps'] == {'rl': 3}
  assert [x['loss'] for x in lines(tmp_path / 'metrics.jsonl')] == [0, 1, 2]
  rollouts = lines(tmp_path / 'rollouts.jsonl')
  assert [x['completion'] for x in rollouts] == ['ok', 'ok', 'kept']
  scalars = read_events(tmp_path).Scalars('loss')
  assert [(e.step, e.value) for e in scalars] == [(0, 0), (1, 1), (2, 2)]


def test_each_phase_counts_its_own_steps(tmp_path):
  """Resumed in RL step 1, which is before the last step of SFT."""
  with open_writer(tmp_path) as writer:
    for step in range(5):
      writer.scalars(step, {'loss': 10 + step}, 'sft')
    writer.text(0, 'sample', 'of sft', 'sft')
    writer.scalars(0, {'loss': 0})
    cursor = json.loads(json.dumps(writer.cursor()))
    writer.scalars(1, {'loss': -1})
  with open_writer(tmp_path, cursor) as writer:
    writer.scalars(1, {'loss': 1})
  rows = lines(tmp_path / 'metrics.jsonl')
  assert [(x['phase'], x['step']) for x in rows] == [
    *(('sft', step) for step in range(5)),
    *(('rl', step) for step in range(2)),
  ]
  scalars = read_events(tmp_path).Scalars('loss')
  assert [(e.step, e.value) for e in scalars] == [(0, 0), (1, 1)]
  scalars = read_events(tmp_path, 'sft').Scalars('loss')
  assert [(e.step, e.value) for e in scalars] == [(i, 10 + i) for i in range(5)]
  assert read_events(tmp_path, 'sft').Tensors('sample')


def test_events_of_runs_within_a_second_keep_their_order(tmp_path):
  cursor = None
  for value in range(12):
    with open_writer(tmp_path, cursor) as writer:
      cursor = cursor or writer.cursor() | {'next_steps': {'rl': 0}}
      writer.scalars(0, {'loss': value})
  scalars = read_events(tmp_path).Scalars('loss')
  assert [(e.step, e.value) for e in scalars] == [(0, 11)]


def test_cursor_counts_bytes_on_disk(tmp_path):
  with open_writer(tmp_path) as writer:
    assert writer.cursor() == {'metrics': 0, 'rollouts': 0, 'next_steps': {}}
    writer.scalars(4, {'loss': 1})
    cursor = writer.cursor()
    size = (tmp_path / 'metrics.jsonl').stat().st_size
    assert cursor == {'metrics': size, 'rollouts': 0, 'next_steps': {'rl': 5}}
    scalars = read_events(tmp_path).Scalars('loss')
    assert [e.step for e in scalars] == [4]


def test_run_without_checkpoint_starts_anew(tmp_path, caplog):
  for loss in (1, 2):
    with open_writer(tmp_path) as writer:
      writer.scalars(0, {'loss': loss})
  assert [x['loss'] for x in lines(tmp_path / 'metrics.jsonl')] == [2]
  assert [e.value for e in read_events(tmp_path).Scalars('loss')] == [2]
  assert 'an earlier run' in caplog.text


def test_file_shorter_than_its_cursor_is_not_padded(tmp_path, caplog):
  with open_writer(tmp_path) as writer:
    for step in range(3):
      writer.scalars(step, {'loss': step})
    cursor = writer.cursor()
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(path.read_bytes()[:-5])
  with open_writer(tmp_path, cursor) as writer:
    writer.scalars(3, {'loss': 3})
  assert [x['loss'] for x in lines(path)] == [0, 1, 3]
  assert 'the checkpoint says' in caplog.text


class Clock:
  """Seconds that pass when told to."""

  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def test_timeline_books_every_second_once():
  clock = Clock()
  timeline = metrics.Timeline(('generation', 'training'), clock=clock)
  clock.now += 1
  with timeline.state('training', 'update'):
    clock.now += 2
    with timeline.state('training', 'sync'):
      clock.now += 4
      with timeline.state('generation', 'decode'):
        clock.now += 8
        running = timeline.seconds()
    clock.now += 16
  clock.now += 32
  assert running == {
    'generation': {'idle': 7, 'decode': 8},
    'training': {'idle': 1, 'update': 2, 'sync': 12},
  }
  seconds = timeline.seconds()
  assert seconds == {
    'generation': {'idle': 55, 'decode': 8},
    'training': {'idle': 33, 'update': 18, 'sync': 12},
  }
  assert {sum(s.values()) for s in seconds.values()} == {clock.now - 100}


def test_timeline_resumes_the_outer_state_after_an_error():
  clock = Clock()
  timeline = metrics.Timeline(('training',), clock=clock)
  with timeline.state('training', 'update'):
    with pytest.raises(KeyError), timeline.state('training', 'sync'):
      clock.now += 1
      raise KeyError
    clock.now += 2
  assert timeline.seconds()['training'] == {'idle': 0, 'sync': 1, 'update': 2}


def test_utilisation_of_run_and_step():
  clock = Clock()
  timeline = metrics.Timeline(('training',), clock=clock)
  assert timeline.utilisation('training', ('update',)) == 0.0
  clock.now += 6
  before = timeline.seconds()
  with timeline.state('training', 'update'):
    clock.now += 3
  clock.now += 1
  assert timeline.utilisation('training', ('update',)) == 0.3
  assert timeline.utilisation('training', ('update', 'idle')) == 1.0
  assert timeline.utilisation('training', ('update',), before) == 0.75
  assert metrics.seconds_between(before, timeline.seconds()) == {
    'training': {'idle': 1, 'update': 3}
  }


def test_timeline_goes_on_from_a_checkpoint():
  clock = Clock()
  previous = {'training': {'idle': 5.0, 'update': 10.0}}
  timeline = metrics.Timeline(('training',), previous, clock)
  with timeline.state('training', 'update'):
    clock.now += 1
  assert timeline.seconds() == {'training': {'idle': 5, 'update': 11}}
  assert previous == {'training': {'idle': 5.0, 'update': 10.0}}
  with pytest.raises(ValueError, match='generation'):
    metrics.Timeline(('generation', 'training'), previous, clock)
  with pytest.raises(ValueError, match="lane='learner': there is training"):
    with timeline.state('learner', 'update'):
      pass


def test_timeline_read_while_driven_adds_up():
  timeline = metrics.Timeline(('a', 'b'))
  done = threading.Event()

  def drive(lane):
    while not done.is_set():
      with timeline.state(lane, 'outer'), timeline.state(lane, 'inner'):
        pass

  threads = [threading.Thread(target=drive, args=(x,)) for x in ('a', 'b')]
  for thread in threads:
    thread.start()
  totals = [
    [sum(s.values()) for s in timeline.seconds().values()] for _ in range(200)
  ]
  done.set()
  for thread in threads:
    thread.join()
  for a, b in totals:
    assert a == pytest.approx(b, abs=1e-9)


def make_ledger():
  ledger = metrics.TokenLedger()
  ledger.generated(100)
  ledger.generated(np.int64(11))
  ledger.consumed(60)
  ledger.consumed(20, 'evaluation')
  ledger.consumed(5, by='gate')
  ledger.dropped(7, 'verifier error')
  ledger.dropped(3, 'verifier error')
  return ledger


def test_ledger_balances():
  ledger = make_ledger()
  ledger.balance(pending=16)  # 111 = 60 + 20 + 5 + 10 + 16
  for pending, off in ((15, r'\+1'), (17, '-1')):
    with pytest.raises(metrics.LedgerError, match=f'{off} unaccounted') as e:
      ledger.balance(pending)
    for number in ('generated=111', "'update': 60", "'verifier error': 10"):
      assert number in str(e.value)
  assert ledger.as_dict() == {
    'generated': 111,
    'consumed/update': 60,
    'consumed/evaluation': 20,
    'consumed/gate': 5,
    'dropped/verifier error': 10,
  }


def test_ledger_state_round_trip():
  ledger = make_ledger()
  state = json.loads(json.dumps(ledger.state()))
  copy = metrics.TokenLedger.from_state(state)
  assert copy.state() == ledger.state()
  copy.generated(1)
  copy.balance(17)
  ledger.balance(16)


def test_ledger_refuses_nonsense():
  ledger = metrics.TokenLedger()
  with pytest.raises(ValueError, match='n=-1'):
    ledger.generated(-1)
  with pytest.raises(ValueError, match=r'n=0\.5'):
    ledger.consumed(0.5)
  with pytest.raises(ValueError, match="by='learner': must be one of"):
    ledger.consumed(1, 'learner')
  with pytest.raises(ValueError, match='say why'):
    ledger.dropped(1, '')
  assert ledger.as_dict()['generated'] == 0


def test_ledger_of_many_threads():
  ledger = metrics.TokenLedger()

  def work():
    for _ in range(2000):
      ledger.generated(3)
      ledger.consumed(1)
      ledger.dropped(1, 'stale')

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  ledger.balance(4 * 2000)
