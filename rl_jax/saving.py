"""What a checkpoint of a run holds, and how a run finds its place again.

Two series under `workdir/checkpoints`: `sft` (by SFT step) and `rl` (by
learner step). Each checkpoint has the whole train state, and on the host the
journal, the prompt stream, finished groups and prompts in flight. Random
numbers need no saving: they are functions of the seed and of counters that
are saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rl_jax.checkpoint import (
  Checkpointer,
  group_from_json,
  group_to_json,
  prompt_from_json,
  prompt_to_json,
)
from rl_jax.config import Checkpoint
from rl_jax.learner.learner import TrainState
from rl_jax.types import Group, Prompt


class Stopped(Exception):
  """The run was asked to stop, and has saved what it had done."""


@dataclasses.dataclass(frozen=True)
class Saved:
  """A restored checkpoint."""

  step: int
  state: TrainState
  host: Mapping[str, Any]

  @property
  def ready(self) -> dict[int, Group]:
    """Finished groups by admission index."""
    groups = self.host['rollouts']['ready']
    return {int(i): group_from_json(g) for i, g in groups.items()}

  @property
  def in_flight(self) -> dict[int, Prompt]:
    """Prompts by admission index that are to be run again."""
    prompts = self.host['rollouts']['in_flight']
    return {int(i): prompt_from_json(p) for i, p in prompts.items()}


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps a second run out of `workdir`; the kernel unlocks a dead one's.

  Raises:
    ValueError: another run has it, or it is no directory.
  """
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f'workdir {workdir} is a file; name a directory.')
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / '.lock', 'a+') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise ValueError(
        f'{workdir} is in use by the run of process {file.read()}; wait for '
        'its end, or name another --workdir.'
      ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    yield


class Saves:
  """The checkpoints of a workdir."""

  def __init__(self, workdir: pathlib.Path, config: Checkpoint):
    self.every_steps = config.every_steps
    self._series = {
      phase: Checkpointer(workdir / 'checkpoints' / phase, config.keep)
      for phase in ('sft', 'rl')
    }

  def __enter__(self) -> Saves:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    for series in self._series.values():
      series.close()

  def restore(self, phase: str, abstract_state: TrainState) -> Saved | None:
    """The newest whole checkpoint of a phase; see Checkpointer.restore."""
    found = self._series[phase].restore(abstract_state)
    return Saved(*found) if found else None

  def save(
    self,
    phase: str,
    step: int,
    state: TrainState,
    host: Mapping[str, Any],
    *,
    wait: bool = False,
  ) -> None:
    """In the background, unless `wait`; `state` may be donated afterwards."""
    self._series[phase].save(step, state, host, wait=wait)

  def is_due(self, step: int) -> bool:
    return step % self.every_steps == 0


def rollouts_to_json(snapshot: Mapping[str, Any]) -> dict[str, Any]:
  """`RolloutWorker.snapshot()` as JSON; see `Saved` for the way back."""
  return {
    'num_admitted': snapshot['num_admitted'],
    'unfinished_tokens': snapshot['unfinished_tokens'],
    'ready': {i: group_to_json(g) for i, g in snapshot['ready'].items()},
    'in_flight': {
      i: prompt_to_json(p) for i, p in snapshot['in_flight'].items()
    },
  }
