"""The thread that makes groups: generator, then verifier, then buffer.

  stream --admit--> schedulers --completions--> verifier --verdicts--> groups
     ^                  ^                                                |
     |                  +-- weights, evaluation (handed over by the      |
     |                      learner's thread, taken between dispatches)  v
     +--- room in the buffer <--------------------------------------- buffer

The worker waits only when there is nothing to generate; it is woken by
`advance`, `load_params` and `generate`. Verdicts arrive on the verifier's
thread while generation goes on. Whatever fails in either thread fails the
buffer and every waiting call, so the learner's thread ends with the traceback
at its next `take`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rl_jax.metrics import Timeline, TokenLedger
from rl_jax.rollout.buffer import GroupBuffer
from rl_jax.types import (
  Completion,
  Group,
  Prompt,
  Request,
  Rollout,
  SamplingParams,
  Verdict,
)

LANE = 'generation'
_POLL_SECONDS = 0.5  # how soon `generate` sees that it is to stop


class Generator(Protocol):
  """What the worker needs of `generator.scheduler.Scheduler`."""

  @property
  def tokens_generated(self) -> int: ...
  @property
  def tokens_in_flight(self) -> int: ...
  @property
  def idle(self) -> bool: ...
  @property
  def awaits_params(self) -> bool: ...
  @property
  def policy_version(self) -> int: ...
  def submit(self, request: Request) -> None: ...
  def offer_params(self, params: Any, policy_version: int) -> None:
    """The first are taken at once; later ones may wait for some steps."""

  def step(self) -> list[Completion]: ...


@dataclasses.dataclass(frozen=True)
class Job:
  """Strings in, strings out: how completions become verdicts."""

  take_prompts: Callable[[int], list[Prompt]]
  decode: Callable[[Sequence[int]], str]
  verify: Callable[[str, Any], Future[Verdict]]


@dataclasses.dataclass
class _Open:
  """A group in the making."""

  request: Request
  deliver: Callable[[Group], None]
  rollouts: dict[int, Rollout] = dataclasses.field(default_factory=dict)
  num_returned: int = 0  # completions that have left the scheduler
  num_tokens: int = 0  # of those


class RolloutWorker:
  """Fills the buffer with verified groups, and answers `generate`."""

  def __init__(
    self,
    generators: Sequence[Generator],
    buffer: GroupBuffer,
    job: Job,
    *,
    sampling: SamplingParams,
    completions_per_prompt: int,
    timeline: Timeline,
    ledger: TokenLedger,
  ):
    self._generators, self._buffer, self._job = generators, buffer, job
    self._sampling, self._num_samples = sampling, completions_per_prompt
    self._timeline, self._ledger = timeline, ledger
    self._wake = threading.Condition()  # guards all below
    self._open: dict[tuple[Any, int], _Open] = {}  # (owner, index) -> group
    self._orders: list[tuple[Request, Callable[[Group], None]]] = []
    self._weights: tuple[Sequence[Any], int] | None = None
    self._offered: int | None = None  # version that is being loaded
    self._loaded = -1  # version that all engines have
    self._failure: BaseException | None = None
    self._stopping = False
    self._in_flight = 0
    self._generated = 0
    self._tickets = 0
    self._thread = threading.Thread(
      target=self._run, name='rollout-worker', daemon=True
    )

  # ---- the learner's thread

  def __enter__(self) -> RolloutWorker:
    self._thread.start()
    return self

  def __exit__(self, *exc_info: Any) -> None:
    """Ends the thread after the dispatch that is running."""
    with self._wake:
      self._stopping = True
      self._wake.notify_all()
    self._thread.join()

  def load_params(self, params: Sequence[Any], policy_version: int) -> int:
    """Hands new weights to every engine, one tree each.

    Returns when all engines have them: the version that they acknowledge.
    """
    with self._wake:
      self._weights = params, policy_version
      self._offered = policy_version
      self._wake.notify_all()
      self._wait(lambda: self._offered is None)
      return self._loaded

  def advance(self, policy_version: int) -> None:
    """Lets the prompts in that this version of the policy allows."""
    self._buffer.advance(policy_version)
    with self._wake:
      self._wake.notify_all()

  def generate(
    self,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: SamplingParams,
    step: int,
    stop: threading.Event | None = None,
  ) -> list[Group] | None:
    """Verified groups outside the buffer (evaluation, gate); waits for all.

    None if `stop` was set meanwhile; what was drawn is dropped then.
    """
    groups: dict[int, Group] = {}
    with self._wake:
      for i, prompt in enumerate(prompts):
        request = Request(prompt, num_samples, sampling, step)
        deliver = lambda group, i=i: groups.__setitem__(i, group)  # noqa: E731
        self._orders.append((request, deliver))
      self._wake.notify_all()
      self._wait(lambda: len(groups) == len(prompts), stop)
      if len(groups) < len(prompts):
        self._abandon_orders(groups.values())
        return None
    return [groups[i] for i in range(len(prompts))]

  def restart(self, prompts: dict[int, Prompt]) -> None:
    """Runs prompts again that were in flight when the run was saved.

    To be called before the first `load_params`.
    """
    for index, prompt in prompts.items():
      self._submit_admitted(index, prompt)

  def snapshot(self, host_state: Callable[[], dict]) -> dict[str, Any]:
    """What resume needs of the rollouts, at one instant.

    Args:
      host_state: read at the same instant (prompt stream, ledger).

    Returns:
      'num_admitted'; 'ready': groups by admission index; 'in_flight': prompts
      by admission index; 'unfinished_tokens': drawn for those; and whatever
      `host_state` gives.
    """
    with self._wake:
      return host_state() | {
        'num_admitted': self._buffer.num_admitted,
        'ready': self._buffer.ready(),
        'in_flight': {
          index: work.request.prompt
          for (owner, index), work in self._open.items()
          if owner is None
        },
        'unfinished_tokens': self._unfinished_tokens(),
      }

  def balance(self) -> None:
    """LedgerError unless every token is accounted for.

    To be called when no result of `take` or `generate` awaits its entry.
    """
    with self._wake:
      ready = self._buffer.ready().values()
      self._ledger.balance(
        self._unfinished_tokens()
        + sum(group.num_completion_tokens for group in ready)
      )

  def _unfinished_tokens(self) -> int:
    return self._in_flight + sum(w.num_tokens for w in self._open.values())

  def _abandon_orders(self, delivered: Iterable[Group]) -> None:
    """Books what orders have drawn, and will draw yet, as dropped."""

    def drop(group: Group) -> None:
      self._ledger.dropped(group.num_completion_tokens, 'interrupted')

    for group in delivered:
      drop(group)
    self._orders = []
    for (owner, _), work in self._open.items():
      if owner is not None:
        work.deliver = drop

  def _wait(
    self, done: Callable[[], bool], stop: threading.Event | None = None
  ) -> None:
    """Until `done`, or until `stop` is set."""
    while not (self._stopping or done()):
      if stop is not None and stop.is_set():
        return
      # Signal handlers, which set `stop`, cannot notify.
      self._wake.wait(None if stop is None else _POLL_SECONDS)
    if self._failure is not None:
      raise self._failure
    if not done():
      raise RuntimeError('the rollout worker was ended; nothing will come.')

  # ---- the worker's thread

  def _run(self) -> None:
    try:
      while not self._stopping:
        self._take_weights()
        self._admit()
        if self._loaded < 0 or all(g.idle for g in self._generators):
          self._check_returned()
          self._rest()
          continue
        with self._timeline.state(LANE, 'generate'):
          done = [c for g in self._generators for c in g.step()]
        self._collect(done)
    except BaseException as e:  # noqa: BLE001  the learner's thread raises it
      self._fail(e)

  def _take_weights(self) -> None:
    with self._wake:
      weights, self._weights = self._weights, None
    if weights is not None:
      params, version = weights
      with self._timeline.state(LANE, 'load'):
        for generator, tree in zip(self._generators, params, strict=True):
          generator.offer_params(tree, version)
    with self._wake:
      # Newer ones may have come since the look above.
      pending = self._weights is not None or any(
        g.awaits_params for g in self._generators
      )
      if self._offered is None or pending:
        return
      versions = {g.policy_version for g in self._generators}
      assert versions == {self._offered}, (versions, self._offered)
      self._loaded, self._offered = self._offered, None
      self._wake.notify_all()

  def _admit(self) -> None:
    with self._wake:
      orders, self._orders = self._orders, []
    for request, deliver in orders:
      self._tickets += 1
      self._submit(('order', self._tickets), request, deliver)
    with self._wake:  # a snapshot sees all of this or none of it
      indices = self._buffer.admit()
      prompts = self._job.take_prompts(len(indices))
      for index, prompt in zip(indices, prompts, strict=True):
        self._submit_admitted(index, prompt)

  def _submit_admitted(self, index: int, prompt: Prompt) -> None:
    step = self._buffer.step_of(index)
    request = Request(prompt, self._num_samples, self._sampling, step)
    self._submit(
      (None, index), request, lambda group: self._buffer.put(index, group)
    )

  def _submit(
    self,
    key: tuple[Any, int],
    request: Request,
    deliver: Callable[[Group], None],
  ) -> None:
    with self._wake:
      self._open[key] = _Open(request, deliver)
    generator = self._generators[key[1] % len(self._generators)]
    generator.submit(dataclasses.replace(request, key=key))

  def _check_returned(self) -> None:
    """RuntimeError if generators that are idle owe completions."""
    if self._loaded < 0:  # they have not begun
      return
    with self._wake:
      for (_, index), work in self._open.items():
        if work.num_returned < work.request.num_samples:
          engine = index % len(self._generators)
          raise RuntimeError(
            f'generator {engine} is idle, but returned {work.num_returned} of '
            f'{work.request.num_samples} completions of prompt '
            f'{work.request.prompt.prompt_id} ({work.request.prompt.row}).'
          )

  def _rest(self) -> None:
    with self._wake:
      self._wake.wait_for(
        lambda: (
          self._stopping
          or self._weights is not None
          or bool(self._orders)
          or self._buffer.has_room
        )
      )

  def _collect(self, completions: list[Completion]) -> None:
    with self._wake:
      generated = sum(g.tokens_generated for g in self._generators)
      self._ledger.generated(generated - self._generated)
      self._generated = generated
      self._in_flight = sum(g.tokens_in_flight for g in self._generators)
      for completion in completions:
        work = self._open[completion.request.key]
        work.num_returned += 1
        work.num_tokens += len(completion.tokens)
    for completion in completions:
      self._verify(completion)

  def _verify(self, completion: Completion) -> None:
    text = completion.text(self._job.decode)
    future = self._job.verify(text, completion.request.prompt.answer)
    future.add_done_callback(lambda f: self._verified(completion, text, f))

  # ---- the verifier's thread

  def _verified(
    self, completion: Completion, text: str, future: Future[Verdict]
  ) -> None:
    try:
      rollout = _rollout(completion, text, future.result())
      with self._wake:
        work = self._open[completion.request.key]
        work.rollouts[completion.sample_index] = rollout
        if len(work.rollouts) == work.request.num_samples:
          del self._open[completion.request.key]
          ordered = [work.rollouts[i] for i in sorted(work.rollouts)]
          work.deliver(Group(work.request.prompt, ordered))
          self._wake.notify_all()
    except BaseException as e:  # noqa: BLE001  a future swallows exceptions
      self._fail(e)

  def _fail(self, error: BaseException) -> None:
    self._buffer.fail(error)
    with self._wake:
      self._failure = self._failure or error
      self._stopping = True
      self._wake.notify_all()


def _rollout(completion: Completion, text: str, verdict: Verdict) -> Rollout:
  prompt = completion.request.prompt.tokens

  def padded(values: np.ndarray, fill: float) -> np.ndarray:
    head = np.full(len(prompt), fill, values.dtype)
    return np.concatenate([head, values])

  return Rollout(
    sample_index=completion.sample_index,
    tokens=np.concatenate([prompt, completion.tokens]),
    loss_mask=padded(np.ones(len(completion.tokens), np.float32), 0),
    behavior_logprobs=padded(completion.behavior_logprobs, 0),
    kept_logmass=padded(completion.kept_logmass, 0),
    policy_versions=padded(completion.policy_versions, -1),
    finish_reason=completion.finish_reason,
    text=text,
    verdict=verdict,
  )
