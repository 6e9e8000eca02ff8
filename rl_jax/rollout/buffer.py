"""The bounded buffer between generator and learner.

  generator --admit--> [0][1][2]...[n-1] | [n].. --take--> learner
      ^                     in order of admission             |
      +------- advance: one more step may be admitted --------+

Staleness is bounded by admission: a prompt that will be consumed at step c is
admitted only when the learner has reached version c - max_staleness, so no
finished group is ever thrown away. Groups are consumed strictly in the order
of admission. The generator asks `admit`, which gives more after `advance`;
the learner waits in `take`, is woken by `put`; `fail` wakes both and raises
in the learner.

With max_staleness = 0 this is synchronous training.
"""

from __future__ import annotations

import threading

from rl_jax.types import Group


class GroupBuffer:
  """Groups by admission index; step c consumes indices [c*n, (c+1)*n).

  Args:
    groups_per_step: n, `prompts_per_step`.
    max_staleness: steps that a group may be behind when it is consumed.
    num_steps: steps of the run; nothing is admitted for later ones.
    next_step: the step that will be consumed first (resume).
  """

  def __init__(
    self,
    groups_per_step: int,
    max_staleness: int,
    num_steps: int,
    next_step: int = 0,
  ):
    if groups_per_step < 1 or max_staleness < 0:
      raise ValueError(
        f'prompts_per_step={groups_per_step} must be >= 1 and '
        f'max_staleness={max_staleness} >= 0.'
      )
    self._n, self._max_staleness = groups_per_step, max_staleness
    self._num_steps = num_steps
    self._step = next_step  # the next to be consumed
    self._version = -1  # no weights yet: nothing may be admitted
    self._admitted = next_step * groups_per_step
    self._groups: dict[int, Group] = {}
    self._failure: BaseException | None = None
    self._changed = threading.Condition()

  # ---- generator side

  def admit(self) -> range:
    """Admission indices of all prompts that may start now."""
    with self._changed:
      count = max(0, self._limit() - self._admitted)
      start, self._admitted = self._admitted, self._admitted + count
      return range(start, self._admitted)

  @property
  def has_room(self) -> bool:
    """Whether `admit` would give anything."""
    with self._changed:
      return self._limit() > self._admitted

  def step_of(self, index: int) -> int:
    """The step that will consume this admission index."""
    return index // self._n

  def put(self, index: int, group: Group) -> None:
    with self._changed:
      assert self._step * self._n <= index < self._admitted, index
      assert index not in self._groups, index
      self._groups[index] = group
      self._changed.notify_all()

  def fail(self, error: BaseException) -> None:
    """Makes every present and later `take` raise `error`."""
    with self._changed:
      self._failure = self._failure or error
      self._changed.notify_all()

  # ---- learner side

  def take(self, timeout: float | None = None) -> list[Group] | None:
    """The groups of the next step, in order of admission.

    Returns:
      None if they were not all there after `timeout` seconds.

    Raises:
      The error of a failed producer.
    """
    assert self._step < self._num_steps, 'nothing is admitted for this step'
    wanted = range(self._step * self._n, (self._step + 1) * self._n)

    def complete():
      return all(i in self._groups for i in wanted)

    with self._changed:
      self._changed.wait_for(lambda: self._failure or complete(), timeout)
      if self._failure:
        raise self._failure
      if not complete():
        return None
      self._step += 1
      return [self._groups.pop(i) for i in wanted]

  def advance(self, policy_version: int) -> None:
    """The generators have this version: more prompts may be admitted."""
    with self._changed:
      self._version = policy_version
      self._changed.notify_all()

  def _limit(self) -> int:
    # Version v consumes step v; step v + max_staleness is the last allowed,
    # and the run's last step the last of all.
    steps = min(self._version + self._max_staleness + 1, self._num_steps)
    return steps * self._n if self._version >= 0 else 0

  # ---- account and resume

  @property
  def num_admitted(self) -> int:
    return self._admitted

  def ready(self) -> dict[int, Group]:
    """A snapshot of the finished groups by admission index."""
    with self._changed:
      return dict(self._groups)

  def restore(self, num_admitted: int, groups: dict[int, Group]) -> None:
    with self._changed:
      self._admitted = num_admitted
      self._groups = dict(groups)
