"""What a run says of itself: scalars, rollouts, seconds and tokens.

Knows the files of a run (`metrics.jsonl`, `rollouts.jsonl`, TensorBoard
events), the wall clock of each sub-mesh and the account of tokens. Does not
know what any number means, nor when to write it. It keeps no averages: a
minimum or a share over micro-batches is computed where the parts are known.

The three classes have a state that belongs in a checkpoint:
`MetricsWriter.cursor()`, `Timeline.seconds()` and `TokenLedger.state()`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from rl_jax.types import Group, Rollout

_log = logging.getLogger(__name__)

_FILES = ('metrics', 'rollouts')  # stems of the .jsonl files
CONSUMERS = ('update', 'evaluation', 'gate')


class MetricsWriter:
  """Appends to the files of one run, from one thread.

  A line of `metrics.jsonl` is {"phase": "rl", "step": 3, "time": 1.7e9,
  "loss": 0.1}, in ASCII, so that only a newline splits lines. What JSON has no
  number for is written as a string that `float` reads: "nan", "inf", "-inf".
  """

  def __init__(
    self, workdir: pathlib.Path, cursor: Mapping[str, Any] | None = None
  ):
    """Opens the files where a checkpoint's `cursor` left them.

    What was written after the cursor is cut off, so that no step is listed
    twice; in TensorBoard it is marked as superseded. Without a cursor the
    run starts anew, and all that an earlier run wrote here goes.
    """
    cursor = cursor or {}
    self._next_steps: dict[str, int] = dict(cursor.get('next_steps', {}))
    workdir.mkdir(parents=True, exist_ok=True)
    self._files = {
      stem: _open_at(workdir / f'{stem}.jsonl', cursor.get(stem, 0))
      for stem in _FILES
    }
    self._directory = workdir / 'tensorboard'
    self._events: dict[str, _TensorBoard] = {}

  def scalars(
    self, step: int, values: Mapping[str, Any], phase: str = 'rl'
  ) -> None:
    """Writes numbers of Python, numpy or jax (of no dimension) by name.

    Each phase counts its steps from 0 and is a run of its own in TensorBoard.

    Raises:
      ValueError: a value that is not one number, or a name that is taken.
    """
    step = int(step)
    numbers = {name: _number(name, value) for name, value in values.items()}
    taken = numbers.keys() & {'phase', 'step', 'time'}
    if taken:
      raise ValueError(
        f'metric {min(taken)!r}: the name is taken; use another.'
      )
    line = {n: _json_number(x) for n, x in numbers.items()}
    place = {'phase': phase, 'step': step, 'time': time.time()}
    self._write('metrics', {**place, **line})
    self._tensorboard(phase, step).scalars(step, numbers)

  def text(self, step: int, tag: str, markdown: str, phase: str = 'rl') -> None:
    """Writes a text for TensorBoard's text page; to no other file."""
    self._tensorboard(phase, step).text(int(step), tag, markdown)

  def rollouts(
    self, step: int, groups: Sequence[Group], advantages: Mapping[int, float]
  ) -> None:
    """Writes every rollout that step `step` consumed, one a line.

    Args:
      advantages: of those that were trained on, by `id` of the rollout.
    """
    for group in groups:
      for rollout in group.rollouts:
        line = {'step': int(step), **_rollout_line(group, rollout)}
        line['advantage'] = advantages.get(id(rollout))
        self._write('rollouts', line)

  def cursor(self) -> dict[str, Any]:
    """Where the files end, for a checkpoint; what lies before is on disk."""
    ends = {}
    for stem, file in self._files.items():
      os.fsync(file.fileno())
      ends[stem] = file.tell()
    return {**ends, 'next_steps': dict(self._next_steps)}

  def close(self) -> None:
    for file in self._files.values():
      file.close()
    for events in self._events.values():
      events.close()

  def _tensorboard(self, phase: str, step: int) -> _TensorBoard:
    first = self._next_steps.setdefault(phase, 0)
    if phase not in self._events:
      self._events[phase] = _TensorBoard(self._directory / phase, first)
    self._next_steps[phase] = max(first, step + 1)
    return self._events[phase]

  def _write(self, stem: str, line: dict[str, Any]) -> None:
    text = json.dumps(line, ensure_ascii=True, allow_nan=False)
    self._files[stem].write(text.encode('ascii') + b'\n')
    self._files[stem].flush()  # one write a line: a kill splits the last only


class _TensorBoard:
  """TensorBoard's event file, without TensorFlow."""

  def __init__(self, directory: pathlib.Path, first_step: int):
    # Here, since importing them costs a second that `import rl_jax` must not.
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.plugins.text import metadata
    from tensorboard.summary.writer import record_writer
    from tensorboard.util import tensor_util

    self._event: Any = event_pb2  # its names are made at run time
    self._summary: Any = summary_pb2
    self._text_metadata = metadata.create_summary_metadata
    self._tensor = tensor_util.make_tensor_proto
    # Readers take the files in the order of their names. TensorBoard's own
    # names (second, process, counter without padding) do not keep that of a
    # run that resumes within a second, so they are numbered here.
    directory.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in directory.glob('events.out.tfevents.*')]
    number = max((int(name[-6:]) + 1 for name in names), default=0)
    path = directory / f'events.out.tfevents.{number:06d}'
    self._writer = record_writer.RecordWriter(path.open('xb'))
    self._add(0, file_version='brain.Event:2')
    # Readers drop what earlier files say of `first_step` and later steps.
    log = self._event.SessionLog
    self._add(first_step, session_log=log(status=log.START))
    self.flush()

  def scalars(self, step: int, numbers: Mapping[str, int | float]) -> None:
    values = [
      self._summary.Summary.Value(tag=name, simple_value=float(number))
      for name, number in numbers.items()
    ]
    self._add(step, summary=self._summary.Summary(value=values))
    self.flush()  # seen at once, and by whoever looks after a kill

  def text(self, step: int, tag: str, markdown: str) -> None:
    # A lone surrogate of model output is not UTF-8: shown as its escape.
    data = markdown.encode('utf-8', errors='backslashreplace')
    value = self._summary.Summary.Value(
      tag=tag,
      metadata=self._text_metadata(display_name='', description=''),
      tensor=self._tensor(np.array(data, dtype=object)),
    )
    self._add(step, summary=self._summary.Summary(value=[value]))
    self.flush()

  def flush(self) -> None:
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()

  def _add(self, step: int, **what: Any) -> None:
    event = self._event.Event(step=step, wall_time=time.time(), **what)
    self._writer.write(event.SerializeToString())


class Timeline:
  """Wall seconds of each lane (a sub-mesh) by what it was doing.

  A lane is at every instant in exactly one state, `idle` when in no other, so
  that its seconds add up to the wall time since the start. Of nested states
  the inner one counts. One thread at a time drives a lane; any may read.
  """

  def __init__(
    self,
    lanes: Sequence[str],
    previous: Mapping[str, Mapping[str, float]] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock of every lane.

    Args:
      lanes: their names.
      previous: `seconds()` of the run that this one resumes, to go on from.
        What that run spent between its last checkpoint and its death, and
        the time until now, nobody knows: they are in no lane's seconds.
      clock: gives seconds that never go back.
    """
    if previous is not None and set(previous) != set(lanes):
      raise ValueError(
        f'timeline lanes={tuple(lanes)}: the checkpoint has '
        f'{tuple(previous)}; resume with the meshes that it was written with.'
      )
    self._clock = clock
    self._lock = threading.Lock()
    self._seconds = {
      lane: collections.defaultdict(float, (previous or {}).get(lane, {}))
      for lane in lanes
    }
    self._states: dict[str, list[str]] = {lane: ['idle'] for lane in lanes}
    self._since = dict.fromkeys(lanes, clock())

  @contextlib.contextmanager
  def state(self, lane: str, name: str) -> Iterator[None]:
    """Puts `lane` in state `name` for the time of the `with` block."""
    if lane not in self._states:
      raise ValueError(f'{lane=}: there is {", ".join(self._states)}.')
    with self._lock:
      self._charge(lane, self._clock())
      self._states[lane].append(name)
    try:
      yield
    finally:
      with self._lock:
        self._charge(lane, self._clock())
        self._states[lane].pop()

  def add(self, name: str, seconds: float) -> None:
    """Books time that every lane spent before the clock started."""
    with self._lock:
      for states in self._seconds.values():
        states[name] += seconds

  def seconds(self) -> dict[str, dict[str, float]]:
    """Seconds by lane and state up to now, the running states included."""
    with self._lock:
      now = self._clock()
      for lane in self._seconds:
        self._charge(lane, now)
      return {lane: dict(states) for lane, states in self._seconds.items()}

  def utilisation(
    self,
    lane: str,
    busy_states: Sequence[str],
    since: Mapping[str, Mapping[str, float]] | None = None,
  ) -> float:
    """Share of a lane's time that it was in `busy_states`; 0 of no time.

    Args:
      lane: its name.
      busy_states: the states that count.
      since: an earlier `seconds()`; None for the whole run.
    """
    spent = seconds_between(since or {}, self.seconds())[lane]
    total = math.fsum(spent.values())
    busy = math.fsum(spent.get(name, 0.0) for name in set(busy_states))
    return busy / total if total > 0 else 0.0

  def _charge(self, lane: str, now: float) -> None:
    """Books the time since the last booking to the lane's present state."""
    self._seconds[lane][self._states[lane][-1]] += now - self._since[lane]
    self._since[lane] = now


def seconds_between(
  before: Mapping[str, Mapping[str, float]],
  after: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, float]]:
  """What was added from one `Timeline.seconds()` to a later one."""
  return {
    lane: {
      name: s - before.get(lane, {}).get(name, 0.0)
      for name, s in states.items()
    }
    for lane, states in after.items()
  }


class LedgerError(RuntimeError):
  """Tokens were lost or counted twice."""


class TokenLedger:
  """The account of generated tokens: none is lost, none counted twice.

  generated = consumed + dropped (for a reason) + pending, where pending ones
  are in flight or in the buffer: their owner counts them. Thread-safe.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._generated = 0
    self._consumed = dict.fromkeys(CONSUMERS, 0)
    self._dropped: dict[str, int] = {}

  def generated(self, n: int) -> None:
    """Books n tokens that a generator has drawn."""
    with self._lock:
      self._generated += _count(n)

  def consumed(self, n: int, by: str = 'update') -> None:
    """Books n tokens as used by 'update', 'evaluation' or 'gate'."""
    if by not in CONSUMERS:
      raise ValueError(f'ledger {by=}: must be one of {CONSUMERS}.')
    with self._lock:
      self._consumed[by] += _count(n)

  def dropped(self, n: int, reason: str) -> None:
    """Books n tokens as not to be used, for a reason in a word or two."""
    if not reason:
      raise ValueError(f'ledger {reason=}: say why the tokens are dropped.')
    with self._lock:
      self._dropped[reason] = self._dropped.get(reason, 0) + _count(n)

  def balance(self, pending: int) -> None:
    """Checks the account, at a moment when nobody draws or moves tokens.

    Raises:
      LedgerError: it does not balance; the message has every number.
    """
    pending = _count(pending)
    state = self.state()
    known = sum(state['consumed'].values()) + sum(state['dropped'].values())
    if state['generated'] != known + pending:
      raise LedgerError(
        f'generated={state["generated"]} tokens, but '
        f'consumed={state["consumed"]} + dropped={state["dropped"]} + '
        f'{pending=} is {known + pending}: '
        f'{state["generated"] - known - pending:+d} unaccounted for.'
      )

  def state(self) -> dict[str, Any]:
    """The account as JSON, for a checkpoint."""
    with self._lock:
      return {
        'generated': self._generated,
        'consumed': dict(self._consumed),
        'dropped': dict(self._dropped),
      }

  @classmethod
  def from_state(cls, state: Mapping[str, Any]) -> TokenLedger:
    """The ledger that `state()` was taken of."""
    ledger = cls()
    ledger.generated(state['generated'])
    for by, n in state['consumed'].items():
      ledger.consumed(n, by)
    for reason, n in state['dropped'].items():
      ledger.dropped(n, reason)
    return ledger

  def as_dict(self) -> dict[str, int]:
    """The account as scalars: 'generated', 'consumed/update', ..."""
    state = self.state()
    return {
      'generated': state['generated'],
      **{f'consumed/{by}': n for by, n in state['consumed'].items()},
      **{f'dropped/{reason}': n for reason, n in state['dropped'].items()},
    }


def _count(n: int) -> int:
  if int(n) != n or n < 0:
    raise ValueError(f'ledger {n=}: must be a whole number >= 0.')
  return int(n)


def _number(name: str, value: Any) -> int | float:
  array = np.asarray(value)
  if array.ndim != 0 or array.dtype.kind in 'OSUc':
    raise ValueError(f'metric {name}={value!r}: must be one real number.')
  return int(array) if array.dtype.kind in 'biu' else float(array)


def _json_number(number: int | float) -> int | float | str:
  return number if math.isfinite(number) else str(number)


def _rollout_line(group: Group, rollout: Rollout) -> dict[str, Any]:
  versions = rollout.policy_versions[rollout.policy_versions >= 0].tolist()
  return {
    'prompt_id': int(group.prompt.prompt_id),
    'row': group.prompt.row,
    'sample_index': int(rollout.sample_index),
    'policy_version_oldest': min(versions, default=None),
    'policy_version_newest': max(versions, default=None),
    'prompt': group.prompt.text,
    'answer': group.prompt.answer,
    'completion': rollout.text,
    'status': rollout.verdict.status,
    'score': float(rollout.verdict.score),
    'reason': rollout.verdict.reason,
    'lenient_pass': rollout.verdict.lenient_pass,
    'num_completion_tokens': rollout.num_completion_tokens,
    'finish_reason': rollout.finish_reason,
  }


def _open_at(path: pathlib.Path, end: int) -> BinaryIO:
  """Opens a file of lines to append, cut off after `end` bytes."""
  file = open(path, 'ab')  # noqa: SIM115  the writer closes it
  size = file.tell()
  if size < end:  # the disk lost what had been written
    _log.warning('%s has %d bytes, the checkpoint says %d.', path, size, end)
    end = path.read_bytes().rfind(b'\n') + 1
  elif size > end:
    _log.warning(
      '%s: cut the last %d bytes of an earlier run, which are '
      'after its checkpoint.',
      path,
      size - end,
    )
  file.truncate(end)
  file.seek(end)
  return file
