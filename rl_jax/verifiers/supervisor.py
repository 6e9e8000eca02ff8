"""The process that owns the verifier's workers; one per host.

Knows processes, deadlines and a socket; knows neither JAX nor what a verifier
checks. It is started by `service.py`, imports the verifier once and forks its
workers from itself, which is safe because it has one thread.

  trainer ==jobs==> queue --jobs--> worker    killed from outside if late
          <=verdicts==    <-verdicts-

A worker holds as many jobs as it does in QUICK_SECONDS, at least one: between
quick verdicts, waking one another would cost many times the verdicts.

Who waits for what: a worker waits for its next job; the supervisor waits in
one `select` for jobs, verdicts, the end of a worker, or the next deadline; it
never waits for a worker alone. Who ends whom: the end of the trainer's socket
ends the supervisor, and that ends the workers. On Linux the kernel sees to
both as well, should either die by SIGKILL.

  what happens to a job                           its verdict
  verify returns                                  what it returned
  verify raises anything                          `error`, the last line
  no verdict within the deadline, SIGKILL         `timeout`
  the worker dies (segfault, out of memory)       once more, then `error`

An exception ends the worker, as a kill does, and another takes its place: what
it had in memory is not trusted with the next item. A job that a worker had not
begun when it ended goes to the next one and counts as no attempt.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from rl_jax import resolve
from rl_jax.types import Verdict

MAX_MESSAGE_BYTES = 1 << 26
MAX_REASON_CHARS = 1000
MAX_ATTEMPTS = 2
REAP_SECONDS = 0.05  # how often the end of killed workers is looked for
QUICK_SECONDS = 0.01  # what may wait for a worker while others have no job
# What a worker gets at once fits its socket's buffer: were the supervisor to
# wait until a hanging worker reads on, nobody would see to the deadlines.
BATCH_BYTES = 1 << 16


class Channel:
  """JSON messages over a stream socket, each behind its length in bytes.

  Any Python string survives: lone surrogates, NUL and line separators too.
  Tuples arrive as lists.
  """

  def __init__(self, sock: socket.socket):
    self.sock = sock
    self._received = bytearray()

  def fileno(self) -> int:
    return self.sock.fileno()

  def send(self, *messages: Any) -> None:
    self.sock.sendall(b''.join(map(self.encode, messages)))

  @staticmethod
  def encode(message: Any) -> bytes:
    text = json.dumps(message, ensure_ascii=False)
    body = text.encode('utf-8', 'surrogatepass')
    if len(body) > MAX_MESSAGE_BYTES:
      raise ValueError(
        f'a message of {len(body)} bytes: must be <= {MAX_MESSAGE_BYTES}; '
        'shorten the completion or the answer.'
      )
    return len(body).to_bytes(4, 'big') + body

  def receive(self) -> list[Any] | None:
    """Reads once; the messages now complete, or None at the end."""
    try:
      data = self.sock.recv(1 << 18)
    except ConnectionResetError:
      return None
    if not data:
      return None
    self._received += data
    messages = []
    while len(self._received) >= 4:
      size = int.from_bytes(self._received[:4], 'big')
      if size > MAX_MESSAGE_BYTES:
        raise ValueError(f'a message of {size} bytes: the stream is corrupt.')
      if len(self._received) < 4 + size:
        break
      body = self._received[4 : 4 + size].decode('utf-8', 'surrogatepass')
      messages.append(json.loads(body))
      del self._received[: 4 + size]
    return messages


@dataclasses.dataclass
class _Job:
  job_id: int
  message: Any
  attempts: int = 0  # that began; a worker that died before took no part


@dataclasses.dataclass
class _Worker:
  pid: int
  channel: Channel
  jobs: collections.deque[_Job] = dataclasses.field(
    default_factory=collections.deque
  )  # the first is the one that it is at
  deadline: float = 0.0  # of the first, on the monotonic clock
  handed_out: float = 0.0  # when, on that clock; `handed_jobs`, how many
  handed_jobs: int = 0


class Supervisor:
  """Hands jobs to forked workers and verdicts back, until the client ends."""

  def __init__(
    self,
    client: Channel,
    judge: Callable[[str, Any], Verdict],
    num_workers: int,
    deadline_seconds: float,
  ):
    self._client = client
    self._judge = judge
    self._deadline_seconds = deadline_seconds
    self._batch = 1  # jobs that a worker does in QUICK_SECONDS
    self._queue: collections.deque[_Job] = collections.deque()
    self._workers: list[_Worker] = []
    self._dying: set[int] = set()  # pids killed and not yet reaped
    self._selector = selectors.DefaultSelector()
    self._selector.register(client, selectors.EVENT_READ)
    for _ in range(num_workers):
      self._spawn()

  def run(self) -> None:
    """Returns when the client has gone; no worker is left then."""
    try:
      with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while self._turn():
          self._expire()
          self._dispatch()
          self._reap()
    finally:
      for worker in list(self._workers):
        self._kill(worker)
      for pid in self._dying:
        os.waitpid(pid, 0)

  def _turn(self) -> bool:
    """Waits for the next event and handles it; False at the client's end."""
    for key, _ in self._selector.select(self._seconds_to_wait()):
      if key.data is not None:
        self._hear(key.data)
        continue
      messages = self._client.receive()
      if messages is None:
        return False
      self._queue += [_Job(message['id'], message) for message in messages]
    return True

  def _seconds_to_wait(self) -> float | None:
    if self._queue and not all(w.jobs for w in self._workers):
      return 0.0  # a worker was replaced while jobs were handed out
    waits = [REAP_SECONDS] if self._dying else []
    now = time.monotonic()
    waits += [max(0.0, w.deadline - now) for w in self._workers if w.jobs]
    return min(waits, default=None)

  def _hear(self, worker: _Worker) -> None:
    """A verdict of a worker, or its end."""
    try:
      messages = worker.channel.receive()
    except ValueError:  # what it sent is no message: something wrote over it
      messages = None
    if messages is None:
      self._lost(worker)
      return
    verdicts = []
    for message in messages:
      if not worker.jobs or message['id'] != worker.jobs[0].job_id:
        self._lost(worker)
        break
      if 'status' not in message:
        worker.jobs[0].attempts += 1
        continue
      worker.jobs.popleft()
      worker.deadline = time.monotonic() + self._deadline_seconds
      verdicts.append(message)
    self._client.send(*verdicts)
    if verdicts and not worker.jobs:
      each = (time.monotonic() - worker.handed_out) / worker.handed_jobs
      # At most doubled: one quick verdict says little of the next.
      self._batch = max(1, min(2 * self._batch, int(QUICK_SECONDS / each)))

  def _lost(self, worker: _Worker) -> None:
    """A worker ended by itself: its job gets one more attempt."""
    if worker.jobs and worker.jobs[0].attempts >= MAX_ATTEMPTS:
      job = worker.jobs.popleft()
      reason = f'the worker died {job.attempts} times on this item.'
      self._client.send(_reply(job.job_id, Verdict('error', 0.0, reason)))
    self._replace(worker)

  def _expire(self) -> None:
    now = time.monotonic()
    for worker in [w for w in self._workers if w.jobs and w.deadline <= now]:
      if not worker.jobs[0].attempts:  # it never began: not the item's fault
        self._lost(worker)
        continue
      job = worker.jobs.popleft()
      self._batch = 1  # this verifier may hang: let no item wait for another
      reason = f'no verdict within {self._deadline_seconds:g} s'
      self._client.send(_reply(job.job_id, Verdict('timeout', 0.0, reason)))
      self._replace(worker)

  def _dispatch(self) -> None:
    for worker in [w for w in self._workers if not w.jobs]:
      # No more than its share: the others are to have work too.
      share = -(-len(self._queue) // len(self._workers))
      data = b''
      while self._queue and len(worker.jobs) < min(self._batch, share):
        more = Channel.encode(self._queue[0].message)
        if data and len(data) + len(more) > BATCH_BYTES:
          break  # a long one goes alone, to a worker that does nothing else
        worker.jobs.append(self._queue.popleft())
        data += more
      if not data:
        return
      worker.handed_out = time.monotonic()
      worker.handed_jobs = len(worker.jobs)
      worker.deadline = worker.handed_out + self._deadline_seconds
      try:
        worker.channel.sock.sendall(data)
      except OSError:  # it died, or took nothing in for a whole deadline
        self._lost(worker)

  def _replace(self, worker: _Worker) -> None:
    self._queue.extendleft(reversed(worker.jobs))
    self._kill(worker)
    self._spawn()

  def _kill(self, worker: _Worker) -> None:
    self._workers.remove(worker)
    self._selector.unregister(worker.channel)
    worker.channel.sock.close()
    # It may not lead its group yet; macOS refuses groups of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(worker.pid, signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)  # not reaped, so the pid is its own
    self._dying.add(worker.pid)

  def _reap(self) -> None:
    for pid in list(self._dying):
      if os.waitpid(pid, os.WNOHANG)[0] == pid:
        self._dying.remove(pid)

  def _spawn(self) -> None:
    ours, theirs = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
      ours.close()
      self._client.sock.close()
      for worker in self._workers:
        worker.channel.sock.close()
      self._selector.close()
      _work(Channel(theirs), self._judge, supervisor)
    theirs.close()
    ours.settimeout(self._deadline_seconds)
    worker = _Worker(pid, Channel(ours))
    self._workers.append(worker)
    self._selector.register(worker.channel, selectors.EVENT_READ, worker)


def _work(
  channel: Channel, judge: Callable[[str, Any], Verdict], supervisor: int
) -> NoReturn:
  """A worker's life: jobs in, verdicts out; whatever is raised ends it."""
  job_id, verdicts = None, []
  try:
    try:
      os.setpgid(0, 0)  # what a verifier starts is killed along with it
      die_with_parent(supervisor)
      while (messages := channel.receive()) is not None:
        for message in messages:
          job_id = message['id']
          channel.send(*verdicts, {'id': job_id})  # it begins
          verdict = judge(message['completion'], message['answer'])
          verdicts = [_reply(job_id, verdict)]
          job_id = None
        channel.send(*verdicts)
        verdicts = []
    finally:
      if job_id is not None and (error := sys.exception()) is not None:
        traceback.print_exception(error)
        last_line = traceback.format_exception_only(error)[-1].strip()
        channel.send(_reply(job_id, Verdict('error', 0.0, last_line)))
  finally:
    os._exit(0)  # never back into the supervisor's frames


def _reply(job_id: int, verdict: Verdict) -> dict[str, Any]:
  return {
    'id': job_id,
    'status': verdict.status,
    'score': float(verdict.score),
    'reason': verdict.reason[:MAX_REASON_CHARS],
    'lenient_pass': bool(verdict.lenient_pass),
  }


def judge_of(name: str, settings: dict[str, Any]) -> Callable[..., Verdict]:
  """`verify` of the verifier `name`, bound to its settings."""
  verifier = resolve.plugin('verifiers', name)
  config = resolve.settings(verifier.Config, settings, 'verifier')

  def judge(completion: str, answer: Any) -> Verdict:
    verdict = verifier.verify(completion, answer, config)
    if not isinstance(verdict, Verdict):
      raise TypeError(f'{name}.verify returned {verdict!r}, not a Verdict.')
    return verdict

  return judge


def die_with_parent(parent: int) -> None:
  """Asks the kernel for SIGKILL when `parent` ends; ends now if it has."""
  if sys.platform == 'linux':
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != parent:
    os._exit(1)


def main(fd: int, parent: int) -> None:
  """Serves the socket `fd`, whose first message holds the settings."""
  die_with_parent(parent)
  # Ctrl-C and a polite kill reach every process of the job; the trainer
  # decides what they mean, and needs its verifier until it has ended.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  client = Channel(socket.socket(fileno=fd))
  messages = []
  while messages is not None and not messages:
    messages = client.receive()
  if messages is None:
    return
  (start,) = messages
  judge = judge_of(start['name'], start['settings'])
  if 'jax' in sys.modules:
    raise ImportError(
      f'verifier {start["name"]!r} imports JAX, and workers are forked: move '
      'what needs JAX out of the module.'
    )
  supervisor = Supervisor(
    client, judge, start['num_workers'], start['deadline_seconds']
  )
  client.send('ready')
  supervisor.run()
