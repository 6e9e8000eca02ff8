"""The service keeps its word while workers, supervisor and trainer die."""

import os
import pathlib
import random
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import jax
import pytest

from rl_jax import resolve
from rl_jax.types import Verdict
from rl_jax.verifiers import service as service_module
from rl_jax.verifiers import supervisor
from rl_jax.verifiers.service import VerifierService

PLUGINS = pathlib.Path(__file__).parent
PROBE = 'my_paper.probe'
NEVER = 60.0  # seconds; a deadline that no test reaches


@pytest.fixture(autouse=True)
def plugins_on_path(monkeypatch):
  monkeypatch.syspath_prepend(str(PLUGINS))


@pytest.fixture
def fifo(tmp_path):
  path = str(tmp_path / 'fifo')
  os.mkfifo(path)
  return path


def read(path):
  return pathlib.Path(path).read_text()


def children(parent):
  """Pids of the child processes, zombies included."""
  found = []
  for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = stat.read_text().rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue  # it ended meanwhile
    if int(fields[1]) == parent:
      found.append(int(stat.parent.name))
  return found


def supervisor_of_this_process():
  (pid,) = children(os.getpid())
  return pid


def comes_true(condition, seconds=5.0):
  """Whether it does in time; the bound is reached by failures only."""
  end = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > end:
      return False
  return True


def ends_within(pid, seconds):
  try:
    fd = os.pidfd_open(pid)
  except ProcessLookupError:
    return True
  ready, _, _ = select.select([fd], [], [], seconds)
  os.close(fd)
  return bool(ready)


def test_verdicts_settings_and_names():
  with VerifierService(PROBE, {'right': 'yes', 'lengths': [3]}) as service:
    assert service.verify('yes', None) == Verdict('pass', 1.0, 'yes')
    assert service.verify('right', None) == Verdict('fail', 0.0, 'right')
    assert service.verify('lenient', None) == (
      Verdict('fail', 0.0, 'lenient', lenient_pass=True)
    )
    assert service.verify('settings', None).reason == (
      "Config(right='yes', lengths=(3,))"
    )
    names = [thread.name for thread in threading.enumerate()]
    assert f'verifier-{PROBE}-reader' in names
    service.check()


@pytest.mark.parametrize(
  'name, settings, run, message',
  [
    ('no_such', {}, {}, "there is no 'no_such'.*math_answer"),
    (PROBE, {'rihgt': 'x'}, {}, 'rihgt is not a key.*right'),
    ('math_answer', {'max_chars': 0}, {}, 'max_chars=0'),
    (PROBE, {}, {'num_workers': 0}, 'num_workers=0'),
    (PROBE, {}, {'num_workers': 10**5}, 'num_workers=100000'),
    (PROBE, {}, {'deadline_seconds': 0.0}, 'deadline_seconds=0'),
    (PROBE, {}, {'deadline_seconds': 1e308}, 'deadline_seconds=1e'),
    (PROBE, {}, {'deadline_seconds': float('inf')}, 'deadline_seconds=inf'),
    (PROBE, {}, {'max_pending': 0}, 'max_pending=0'),
  ],
)
def test_mistakes_are_found_before_a_process_starts(
  name, settings, run, message
):
  with pytest.raises(ValueError, match=message):
    VerifierService(name, settings, **run)
  assert children(os.getpid()) == []


TEXTS = [
  '\ud800',
  '\ud83d\ude00',
  '\x00',
  'a\u2028b\n',
  '\U0001f600',
  'é' * 999,
]


@pytest.mark.parametrize('text', [*TEXTS, 'é' * 300_000])
def test_any_string_crosses_a_channel(text):
  ours, theirs = socket.socketpair()
  with ours, theirs:
    sender = threading.Thread(
      target=supervisor.Channel(ours).send, args=({'text': text},)
    )
    sender.start()
    channel, messages = supervisor.Channel(theirs), []
    while not messages:
      messages = channel.receive()
    sender.join()
  assert messages == [{'text': text}]


def test_any_string_arrives_as_it_was():
  with VerifierService(PROBE, {}) as service:
    for text in TEXTS:
      assert service.verify(text, None).reason == text
    long = 'é' * 300_000
    reason = service.verify(long, None).reason
    assert reason == long[: supervisor.MAX_REASON_CHARS]


def test_messages_have_a_greatest_size(monkeypatch):
  with VerifierService(PROBE, {}, max_pending=1) as service:
    monkeypatch.setattr(supervisor, 'MAX_MESSAGE_BYTES', 1000)
    with pytest.raises(ValueError, match='must be <= 1000'):
      service.submit('x' * 1001, None)
    assert service.verify('right', None).status == 'pass'  # its slot is free


def test_workers_see_neither_jax_nor_credentials(monkeypatch):
  assert jax.numpy.ones(3).sum() == 3  # JAX runs before the processes start
  monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'secret')
  with VerifierService(PROBE, {}) as service:
    monkeypatch.setattr(supervisor, 'MAX_REASON_CHARS', 0)  # of this side only
    modules = service.verify('modules', None).reason.split()
    assert 'sys' in modules
    assert 'jax' not in modules
    assert 'jaxlib' not in modules
    environment = service.verify('environment', None).reason.split()
    assert 'JAX_PLATFORMS' in environment
    assert 'AWS_SECRET_ACCESS_KEY' not in environment
    assert 'HOME' not in environment


def test_a_verifier_that_imports_jax_is_refused(tmp_path, monkeypatch):
  (tmp_path / 'their_paper').mkdir()
  (tmp_path / 'their_paper' / 'heavy.py').write_text(
    'import dataclasses\nimport jax\n'
    '@dataclasses.dataclass(frozen=True)\nclass Config:\n  pass\n'
    'check_answer = verify = examples = None\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(RuntimeError, match=r"'their_paper.heavy' imports JAX"):
    VerifierService('their_paper.heavy', {})
  assert children(os.getpid()) == []


def test_a_failing_verifier_is_an_error_of_its_item_only():
  with VerifierService(PROBE, {}, deadline_seconds=NEVER) as service:
    for completion, reason in (
      ('raise', "KeyError: 'no such thing'"),
      ('sys.exit', 'SystemExit: 0'),
      ('no verdict', 'not a Verdict'),
      ('os._exit', 'died 2 times'),
      ('segfault', 'died 2 times'),
    ):
      jobs = ['right', completion, 'wrong', completion, 'right']
      futures = [service.submit(job, None) for job in jobs]
      verdicts = [future.result() for future in futures]
      statuses = [verdict.status for verdict in verdicts]
      assert statuses == ['pass', 'error', 'fail', 'error', 'pass']
      assert reason in verdicts[1].reason
      assert not verdicts[1].scored


def test_a_hang_is_killed_from_outside():
  with VerifierService(
    PROBE, {}, num_workers=2, deadline_seconds=1.0
  ) as service:
    jobs = ['right', 'power', 'wrong', 'stop', 'right', 'wrong']
    futures = [service.submit(job, 1) for job in jobs]
    statuses = [future.result().status for future in futures]
    assert statuses == ['pass', 'timeout', 'fail', 'timeout', 'pass', 'fail']
    assert [service.verify('right', 1).status for _ in range(4)] == ['pass'] * 4
    pid = supervisor_of_this_process()
    assert comes_true(lambda: len(children(pid)) == 2)  # no zombies


def test_a_worker_that_never_begins_costs_its_item_nothing():
  with VerifierService(PROBE, {}, deadline_seconds=0.5) as service:
    (worker,) = children(supervisor_of_this_process())
    os.kill(worker, signal.SIGSTOP)
    assert service.verify('right', None).status == 'pass'


def test_the_service_is_no_plugin():
  plugins = resolve.available('verifiers')
  assert 'math_answer' in plugins
  assert not {'service', 'supervisor'} & set(plugins)


def test_what_a_bad_item_did_to_its_worker_is_gone():
  with VerifierService(PROBE, {}) as service:
    assert service.verify('spoil', None).status == 'error'
    assert service.verify('settings', None).reason.startswith(
      "Config(right='right'"
    )


def test_a_killed_worker_costs_nothing(fifo, tmp_path):
  with VerifierService(PROBE, {}, deadline_seconds=NEVER) as service:
    future = service.submit('hang once', [fifo, str(tmp_path / 'mark')])
    behind = service.submit('wrong', None)
    os.kill(int(read(fifo)), signal.SIGKILL)
    assert future.result() == Verdict('pass', 1.0, 'second attempt')
    assert behind.result().status == 'fail'


def test_idle_workers_may_die():
  with VerifierService(PROBE, {}, num_workers=2) as service:
    for _ in range(20):
      for pid in children(supervisor_of_this_process()):
        os.kill(pid, signal.SIGKILL)
      assert service.verify('right', None).status == 'pass'


def test_what_a_verifier_started_dies_with_its_worker(fifo):
  with VerifierService(PROBE, {}, deadline_seconds=0.5) as service:
    future = service.submit('grandchild', [fifo, ''])
    grandchild = int(read(fifo))
    assert future.result().status == 'timeout'
    assert ends_within(grandchild, 2.0)


def test_a_killed_supervisor_fails_every_future(fifo, tmp_path):
  with VerifierService(
    PROBE, {}, deadline_seconds=NEVER, max_pending=3
  ) as service:
    hanging = service.submit('hang once', [fifo, str(tmp_path / 'mark')])
    futures = [hanging, service.submit('right', 1), service.submit('right', 1)]
    raised = []

    def submit_more():  # no slot is free: waits for one, in vain
      try:
        service.submit('right', 1)
      except RuntimeError as e:
        raised.append(e)

    waiting = threading.Thread(target=submit_more)
    waiting.start()
    worker = int(read(fifo))
    os.kill(supervisor_of_this_process(), signal.SIGKILL)
    for future in futures:
      with pytest.raises(RuntimeError, match='exit code -9'):
        future.result(timeout=2.0)
    waiting.join(2.0)
    assert len(raised) == 1
    assert ends_within(worker, 2.0)
    with pytest.raises(RuntimeError, match='exit code -9'):
      service.check()
    with pytest.raises(RuntimeError, match='exit code -9'):
      service.submit('right', 1)
  assert children(os.getpid()) == []


def test_a_stopped_supervisor_is_given_up(monkeypatch):
  monkeypatch.setattr(service_module, 'SILENCE_SECONDS', 0.2)
  with VerifierService(PROBE, {}, deadline_seconds=0.2) as service:
    os.kill(supervisor_of_this_process(), signal.SIGSTOP)
    future = service.submit('right', None)
    with pytest.raises(RuntimeError, match='no sign of life'):
      future.result(timeout=10.0)


def test_an_idle_service_is_not_given_up(monkeypatch):
  monkeypatch.setattr(service_module, 'SILENCE_SECONDS', 0.0)
  monkeypatch.setattr(service_module, 'LISTEN_SECONDS', 0.01)
  with VerifierService(PROBE, {}, deadline_seconds=0.1) as service:
    threading.Event().wait(0.5)  # longer than the patience of 0.2 s
    service.check()


def test_polite_signals_are_left_to_the_trainer():
  with VerifierService(PROBE, {}) as service:
    pid = supervisor_of_this_process()
    for target in [pid, *children(pid)]:
      os.kill(target, signal.SIGINT)
      os.kill(target, signal.SIGTERM)
    assert service.verify('right', None).status == 'pass'
    assert supervisor_of_this_process() == pid


def test_a_killed_trainer_leaves_nobody(tmp_path):
  script = textwrap.dedent("""
    import os, sys
    from rl_jax.verifiers.service import VerifierService
    service = VerifierService(
      'my_paper.probe', {}, num_workers=2, deadline_seconds=600.0)
    service.submit('power', 1)
    future = service.submit('hang once', sys.argv[1:])
    future.result()
  """)
  fifo = str(tmp_path / 'fifo')
  os.mkfifo(fifo)
  path = os.pathsep.join(sys.path)
  trainer = subprocess.Popen(
    [sys.executable, '-c', script, fifo, str(tmp_path / 'mark')],
    env=os.environ | {'PYTHONPATH': path},
  )
  read(fifo)
  (pid,) = children(trainer.pid)
  pids = [pid, *children(pid)]
  assert len(pids) == 3
  trainer.kill()
  trainer.wait()
  assert all(ends_within(p, 2.0) for p in pids)


def test_the_service_outlives_the_thread_that_made_it():
  made = []
  thread = threading.Thread(
    target=lambda: made.append(VerifierService(PROBE, {}))
  )
  thread.start()
  thread.join()
  with made[0] as service:
    assert service.verify('right', None).status == 'pass'


def test_verdicts_from_many_threads():
  with VerifierService('math_answer', {}, num_workers=2) as service:
    wrong = []

    def ask(n):
      for i in range(25):
        verdict = service.verify(rf'\boxed{{{n}}}', str(i))
        if (verdict.status == 'pass') != (i == n):
          wrong.append((n, i, verdict))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert wrong == []


def test_two_hundred_mixed_jobs_keep_their_verdicts():
  expected = {
    'right': 'pass',
    'wrong': 'fail',
    'raise': 'error',
    'os._exit': 'error',
    'power': 'timeout',
  }
  jobs = ['right'] * 90 + ['wrong'] * 90 + ['raise', 'os._exit'] * 9
  jobs += ['power'] * 2
  random.Random(0).shuffle(jobs)
  with VerifierService(
    PROBE, {}, num_workers=4, deadline_seconds=2.0, max_pending=16
  ) as service:
    futures = [service.submit(job, 1) for job in jobs]
    statuses = [future.result().status for future in futures]
    assert statuses == [expected[job] for job in jobs]
    pid = supervisor_of_this_process()
    assert comes_true(lambda: len(children(pid)) == 4)  # no zombies


def test_quick_items_are_handed_out_together_and_lose_nothing():
  """A worker that dies, raises or hangs takes none of its batch with it."""
  bad = {'os._exit': 'error', 'raise': 'error', 'power': 'timeout'}
  with VerifierService(PROBE, {}, deadline_seconds=0.5) as service:
    seconds = []
    for _ in range(4):
      start = time.perf_counter()
      futures = [service.submit('right', 1) for _ in range(256)]
      assert all(f.result(timeout=20).status == 'pass' for f in futures)
      seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(256):
      service.verify('right', 1)  # the worker never has a second one
    assert min(seconds) < 0.33 * (time.perf_counter() - start)
    jobs = ['right', 'wrong'] * 40
    for where, job in zip((7, 23, 48), bad):
      jobs.insert(where, job)
    futures = [service.submit(job, 1) for job in jobs]
    expected = {'right': 'pass', 'wrong': 'fail'} | bad
    found = [future.result(timeout=20).status for future in futures]
    assert found == [expected[job] for job in jobs]


def test_a_long_item_shares_a_batch_with_none():
  """So that sending it never waits for a worker that hangs."""
  ours, theirs = socket.socketpair()
  with ours, theirs:
    boss = supervisor.Supervisor(
      supervisor.Channel(ours), lambda completion, answer: None, 0, NEVER
    )
    worker = supervisor._Worker(0, supervisor.Channel(ours))
    boss._workers, boss._batch = [worker], 8
    messages = [
      {'id': i, 'completion': 'x' * size, 'answer': ''}
      for i, size in enumerate((9, 9, supervisor.BATCH_BYTES, 9))
    ]
    boss._queue += [supervisor._Job(m['id'], m) for m in messages]
    boss._dispatch()
    assert [job.job_id for job in worker.jobs] == [0, 1]


def test_submit_waits_for_a_slot(fifo):
  with VerifierService(
    PROBE, {}, deadline_seconds=NEVER, max_pending=2
  ) as service:
    first = service.submit('wait', fifo)
    second = service.submit('right', None)
    third = []
    thread = threading.Thread(
      target=lambda: third.append(service.submit('wrong', None))
    )
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    pathlib.Path(fifo).write_text('go')
    assert first.result().reason == 'go'
    assert second.result().status == 'pass'
    thread.join()
    assert third[0].result().status == 'fail'


def test_what_verifiers_print_blocks_nobody():
  with VerifierService(PROBE, {}, deadline_seconds=NEVER) as service:
    assert service.verify('print', None).status == 'fail'


def test_self_test_passes_on_good_rows():
  with VerifierService('math_answer', {}) as service:
    service.self_test(['5', r'2\frac{2}{3}', 'work\n#### 1,000', r'50\%'])


def test_every_gold_answer_is_checked():
  with VerifierService('math_answer', {}) as service:
    service.check_answers([('sums/0', '5'), ('sums/1', '1/2')])
    with pytest.raises(ValueError, match=r"cannot verify row 'sums/7', .*'x'"):
      service.check_answers(iter([('sums/0', '5'), ('sums/7', 'x')]))


def test_self_test_names_row_kind_and_verdict():
  with VerifierService(PROBE, {}, deadline_seconds=1.0) as service:
    for answer, message in (
      ('bad', "row '1', answer='bad': this answer is bad"),
      ('no wrong example', r"lacks \['wrong'\]"),
      ({'gold': 'wrong'}, "'gold' example 'wrong' must get pass"),
      ({'empty': 'right'}, "'empty' example 'right' must get fail"),
      ({'attack: 2': 'right'}, "'attack: 2' example"),
      ({'attack: 2': 'raise'}, "status='error'"),
      ({'gold': 'power'}, "status='timeout'"),
    ):
      with pytest.raises(ValueError, match=message) as caught:
        service.self_test(['good', answer])
      assert re.search("row '?1", str(caught.value))
      service.check()


def test_close_leaves_no_process_and_fails_what_is_open():
  service = VerifierService(PROBE, {}, num_workers=3, deadline_seconds=NEVER)
  pid = supervisor_of_this_process()
  pids = [pid, *children(pid)]
  assert len(pids) == 4
  future = service.submit('power', 1)
  service.close()
  assert all(ends_within(p, 1.0) for p in pids)
  assert children(os.getpid()) == []
  with pytest.raises(RuntimeError, match='is closed'):
    future.result(timeout=0)
  with pytest.raises(RuntimeError, match='is closed'):
    service.submit('right', None)
  service.close()
