"""The trainer's side of verification: completions in, futures of verdicts out.

Knows a supervisor process and its socket; runs no verifier itself. Verdicts
come back under the number of their job, in any order.

  submit() --semaphore--> socket ==> supervisor.py ==> workers
  Future   <---reader thread---- socket <==

Who waits for what: `submit` waits while `max_pending` verdicts are open; the
reader thread waits for the socket; whoever holds a future waits for that.
Nobody waits for a dead process: when the supervisor ends, or is silent for
longer than two attempts may take, the reader fails every open future, and
`submit` and `check` raise from then on.

The reader thread also starts the process. The kernel ties the life of a child
to the thread that made it, so that thread must last as long as the service.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any

from rl_jax import resolve
from rl_jax.types import Verdict
from rl_jax.verifiers.supervisor import MAX_ATTEMPTS, Channel

# All that the host process sees of the trainer's environment: no credentials.
KEPT_ENVIRONMENT = (
  'PATH',
  'LANG',
  'LC_ALL',
  'LC_CTYPE',
  'TZ',
  'TMPDIR',
  'LD_LIBRARY_PATH',
)
# One thread per process: more would make fork unsafe, and workers compete.
SET_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  'OMP_NUM_THREADS': '1',
  'OPENBLAS_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
}
# `-I` shuts out the environment and the working directory; the verifier must
# be importable all the same, wherever the trainer found it.
BOOTSTRAP = (
  'import json, sys; sys.path[:] = json.loads(sys.argv[1]); '
  'from rl_jax.verifiers import supervisor; '
  'supervisor.main(int(sys.argv[2]), int(sys.argv[3]))'
)
START_SECONDS = 60.0  # imports on a cold network disk
EXIT_SECONDS = 5.0
LISTEN_SECONDS = 0.5
SILENCE_SECONDS = 5.0  # granted beyond the deadlines themselves
PRINTED_BYTES = 8192


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
  """How a verifier is run, whichever it is."""

  num_workers: int = 1  # worker processes on this host
  deadline_seconds: float = 5.0  # wall time per item, then SIGKILL
  max_pending: int = 1024  # open verdicts before `submit` blocks

  def __post_init__(self):
    for name, legal in (
      ('num_workers', 1 <= self.num_workers <= 1024),
      ('deadline_seconds', 0 < self.deadline_seconds <= 86400),
      ('max_pending', self.max_pending >= 1),
    ):
      if not legal:
        raise ValueError(
          f'service.{name}={getattr(self, name)!r}: must be positive; at most '
          '1024 workers, a deadline of at most 86400 seconds.'
        )


class VerifierService:
  """A verifier, isolated in a process of its own; close it after use.

  Example:
    with VerifierService('math_answer', {}, num_workers=2) as service:
      service.self_test([row.answer for row in rows])
      future = service.submit(r'\\boxed{5}', '5')
      assert future.result().status == 'pass'
  """

  def __init__(
    self,
    name: str,
    settings: Mapping[str, Any],
    *,
    num_workers: int = ServiceConfig.num_workers,
    deadline_seconds: float = ServiceConfig.deadline_seconds,
    max_pending: int = ServiceConfig.max_pending,
  ):
    """Checks the settings here, starts the processes, waits until they serve.

    Raises:
      ValueError: no such verifier, or a setting that it does not have.
      RuntimeError: the supervisor did not start; says what it printed.
    """
    run = ServiceConfig(num_workers, deadline_seconds, max_pending)
    self._name = name
    self._verifier = resolve.plugin('verifiers', name)
    self._config = resolve.settings(self._verifier.Config, settings, 'verifier')
    self._start_message = Channel.encode(
      {
        'name': name,
        'settings': dataclasses.asdict(self._config),
        'num_workers': run.num_workers,
        'deadline_seconds': run.deadline_seconds,
      }
    )
    self._patience_seconds = (
      MAX_ATTEMPTS * run.deadline_seconds + SILENCE_SECONDS
    )
    self._ids = itertools.count()
    self._slots = threading.Semaphore(run.max_pending)
    self._send_lock = threading.Lock()  # one message at a time
    self._lock = threading.Lock()  # guards the three below
    self._open: dict[int, Future[Verdict]] = {}
    self._closing = False
    self._failure = ''  # why no verdict will come any more; '' while serving
    self._started: Future[None] = Future()
    self._printed = b''
    sock, self._remote = socket.socketpair()
    self._channel = Channel(sock)
    self._reader = threading.Thread(
      target=self._read, name=f'verifier-{name}-reader', daemon=True
    )
    self._reader.start()
    with contextlib.ExitStack() as undo:
      undo.callback(self.close)
      try:
        self._started.result(START_SECONDS)
      except TimeoutError:
        raise RuntimeError(
          f'verifier {name!r} did not start within {START_SECONDS:g} s.'
        ) from None
      undo.pop_all()

  def submit(self, completion: str, answer: Any) -> Future[Verdict]:
    """The verdict's future; blocks while `max_pending` are open.

    The future cannot be cancelled. Its callbacks run on the reader thread and
    must not submit.

    Raises:
      RuntimeError: the supervisor has died or the service is closed.
    """
    job_id = next(self._ids)
    message = Channel.encode(
      {'id': job_id, 'completion': completion, 'answer': answer}
    )
    future: Future[Verdict] = Future()
    future.set_running_or_notify_cancel()
    self._slots.acquire()
    with self._lock:
      failure = self._failure
      if not failure:
        self._open[job_id] = future
    if failure:
      self._slots.release()  # wakes the next who waits in vain
      raise RuntimeError(failure)
    with self._send_lock, contextlib.suppress(OSError):
      self._channel.sock.sendall(message)  # else the reader fails the future
    return future

  def verify(self, completion: str, answer: Any) -> Verdict:
    """The verdict, waited for."""
    return self.submit(completion, answer).result()

  def check_answers(self, rows: Iterable[tuple[str, Any]]) -> None:
    """Proves that every (row, gold answer) can be verified against.

    Raises:
      ValueError: names the row, and what is wrong with its answer.
    """
    for row, answer in rows:
      try:
        self._verifier.check_answer(answer, self._config)
      except ValueError as e:
        raise ValueError(
          f'verifier {self._name!r} cannot verify row {row!r}, {answer=!r}: '
          f'{e} Correct the answer, take the row out, or use another verifier.'
        ) from e

  def self_test(self, answers: Sequence[Any]) -> None:
    """Proves the verifier on gold answers, through the whole service.

    Raises:
      ValueError: names the row, and what the verifier says that it must not.
    """
    self.check_answers((str(row), answer) for row, answer in enumerate(answers))
    open_verdicts = []
    for row, answer in enumerate(answers):
      where = f'verifier {self._name!r}, row {row}, {answer=!r}'
      kinds = self._verifier.examples(answer, self._config)
      if missing := {'gold', 'empty', 'wrong'} - kinds.keys():
        raise ValueError(f'{where}: examples() lacks {sorted(missing)}.')
      for kind, completion in kinds.items():
        future = self.submit(completion, answer)
        open_verdicts.append((where, kind, completion, future))
    for where, kind, completion, future in open_verdicts:
      verdict = future.result()
      expected = ('pass',) if kind == 'gold' else ('fail', 'timeout', 'refused')
      if verdict.status not in expected:
        raise ValueError(
          f'{where}: the {kind!r} example {completion!r} must get '
          f'{" or ".join(expected)}, but got {verdict}. Leave the row out if '
          'its answer is bad, else mend the verifier.'
        )

  def check(self) -> None:
    """RuntimeError, with what it printed last, if the supervisor has died."""
    with self._lock:
      failure = self._failure
    if failure:
      raise RuntimeError(failure)

  def close(self) -> None:
    """Ends all processes; open futures fail. May be called again."""
    with self._lock:
      self._closing = True
    with contextlib.suppress(OSError):  # not connected any more
      self._channel.sock.shutdown(socket.SHUT_RDWR)
    self._reader.join()
    self._channel.sock.close()

  def __enter__(self) -> VerifierService:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self.close()

  def _read(self) -> None:
    """The reader thread: owns the process from its start to its end."""
    failure = f'the supervisor of verifier {self._name!r} did not start.'
    try:
      with self._remote:
        process = self._start_process()
      try:
        self._listen(process)
      finally:
        failure = self._end_process(process)
    finally:
      self._fail(failure)

  def _start_process(self) -> subprocess.Popen[bytes]:
    env = {k: os.environ[k] for k in KEPT_ENVIRONMENT if k in os.environ}
    path = [os.path.abspath(entry) for entry in sys.path]
    fd = self._remote.fileno()
    return subprocess.Popen(
      [sys.executable, '-I', '-c', BOOTSTRAP]
      + [json.dumps(path), str(fd), str(os.getpid())],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=env | SET_ENVIRONMENT,
      pass_fds=[fd],
      start_new_session=True,  # Ctrl-C is the trainer's to handle
    )

  def _listen(self, process: subprocess.Popen[bytes]) -> None:
    """Resolves futures until the socket ends or is silent for too long."""
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # then the socket ends too
      self._channel.sock.sendall(self._start_message)
    silent, last = 0.0, time.monotonic()
    with selectors.DefaultSelector() as selector:
      selector.register(process.stdout, selectors.EVENT_READ)
      selector.register(self._channel, selectors.EVENT_READ)
      while silent <= self._patience_seconds:
        ready = [k.fileobj for k, _ in selector.select(LISTEN_SECONDS)]
        if process.stdout in ready and not self._keep_printed(process.stdout):
          selector.unregister(process.stdout)
        messages = []
        if self._channel in ready:
          messages = self._channel.receive()
          if messages is None:
            return
        for message in messages:
          self._resolve(message)
        # Counted by waits: a machine that was suspended has not been silent.
        now = time.monotonic()
        silent += min(now - last, LISTEN_SECONDS)
        last = now
        if messages or not self._open:
          silent = 0.0
    self._printed += f'(no sign of life for {silent:.1f} s)'.encode()
    process.kill()

  def _keep_printed(self, stdout: IO[bytes]) -> bool:
    """Reads what the processes have printed; False at the end of it."""
    data = os.read(stdout.fileno(), 1 << 16)
    self._printed = (self._printed + data)[-PRINTED_BYTES:]
    return bool(data)

  def _resolve(self, message: Any) -> None:
    if message == 'ready':
      self._started.set_result(None)
      return
    job_id = message.pop('id')
    verdict = Verdict(**message)
    with self._lock:
      future = self._open.pop(job_id)
    self._slots.release()
    future.set_result(verdict)

  def _end_process(self, process: subprocess.Popen[bytes]) -> str:
    """Waits for its end, or makes it; returns what to tell the callers."""
    with contextlib.suppress(OSError):  # not connected any more
      self._channel.sock.shutdown(socket.SHUT_RDWR)
    try:
      process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(BlockingIOError):
      os.set_blocking(process.stdout.fileno(), False)
      while self._keep_printed(process.stdout):
        pass
    if self._closing:
      return f'the service of verifier {self._name!r} is closed.'
    printed = self._printed.decode('utf-8', 'replace').strip()
    return (
      f'the supervisor of verifier {self._name!r} ended with exit code '
      f'{process.returncode}; start a new service. It printed last:\n{printed}'
    )

  def _fail(self, failure: str) -> None:
    with self._lock:
      self._failure = failure
      futures = list(self._open.values())
      self._open.clear()
    for future in [self._started, *futures]:
      if not future.done():
        future.set_exception(RuntimeError(failure))
    for _ in futures:
      self._slots.release()
