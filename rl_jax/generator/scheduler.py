"""Continuous batching: what the engine runs next, decided on the host.

  submit -> queue -> prefixes -> slots -> completions
              ^         |          |
              +---------+----------+   preempted (youngest first)

A request waits in the queue for pages, then is prefilled in chunks between
decode dispatches, then waits for slots for its samples; a slot whose sample
ends is refilled while the others go on. Whoever lacks a page takes it from
the youngest holder, which goes back to the queue with the tokens that it has
and is recomputed later; the oldest is never preempted, so something always
ends and nothing is lost. Age is the order of submission, and survives
preemption. Nobody blocks: `step` does what can be done and returns.

What was preempted starts first, so that the pages which its tokens cost are
soon of use; then earlier steps' requests, then by `generator.order`: as they
came, or the longest expected ones first, since the last to end decide how long
a step takes. A prompt is expected to draw what its last completions did, as
much as it may where nothing is known.

Single-threaded, and a function of its calls only: equal calls, equal results.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_jax.generator.engine import Drawn, Engine, Prefix
from rl_jax.generator.pages import OutOfPages
from rl_jax.generator.speculation import Drafter
from rl_jax.types import (
  Completion,
  FinishReason,
  Request,
  text_before_stop,
)

_Age = tuple[int, int]  # (order of submission, sample index)
_NEWEST = 0.25  # weight of the newest completion in a row's mean length
# Share of the longest draft that must be expected to be right. SmolLM2 on two
# CPU cores, 16 slots: to verify 4 tokens costs 3.4 steps of decoding, 2 tokens
# 2.3 steps. Where memory is the bound it costs little more than one.
_WORTH = 0.6


@dataclasses.dataclass(eq=False)
class _Sample:
  """A completion in the making."""

  request: Request
  index: int
  age: _Age
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  kept: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  likeliest: list[list[tuple[int, float]]] = dataclasses.field(
    default_factory=list
  )
  stopped_by_text: bool = False

  def append(self, drawn: Drawn) -> None:
    self.tokens.append(drawn.token)
    self.logprobs.append(drawn.logprob)
    self.kept.append(drawn.kept_logmass)
    self.versions.append(drawn.policy_version)
    self.likeliest.append(drawn.likeliest)

  def sequence(self) -> np.ndarray:
    """Prompt and completion."""
    drawn = np.asarray(self.tokens, np.int32)
    return np.concatenate([self.request.prompt.tokens, drawn])

  def finish_reason(self) -> FinishReason | None:
    stopped = self.tokens[-1] in self.request.sampling.stop_ids
    if stopped or self.stopped_by_text:
      return 'stop'
    if len(self.tokens) >= self.request.sampling.max_tokens:
      return 'length'
    return None


@dataclasses.dataclass(eq=False)
class _Work:
  """Samples that wait for one prompt: a group, or one preempted sample."""

  samples: list[_Sample]

  @property
  def age(self) -> _Age:
    return self.samples[0].age

  @property
  def started(self) -> bool:
    return bool(self.samples[0].tokens)

  def __lt__(self, other: _Work) -> bool:
    return self.age < other.age


@dataclasses.dataclass(eq=False)
class _Held:
  """Work whose prompt holds pages."""

  prefix: Prefix
  samples: dict[int, _Sample]

  @property
  def age(self) -> _Age:
    return min(s.age for s in self.samples.values())


class Scheduler:
  """Runs requests on one engine.

  Args:
    decode: text of tokens; only stop strings need it.
  """

  def __init__(
    self, engine: Engine, decode: Callable[[Sequence[int]], str] | None = None
  ):
    self.engine, self._decode = engine, decode
    self.tokens_generated = 0  # drawn so far, preempted ones counted once
    self.preemptions = 0
    self._order = 0
    self._queue: list[_Work] = []  # oldest first
    self._held: list[_Held] = []  # in the order of their turns
    self._running: dict[int, _Sample] = {}
    self._new_weights: tuple[Any, int] | None = None
    # Mean length of the last completions of each row of the data.
    self._lengths: dict[str, float] = {}
    # Penalties depend on what was drawn, so a draft cannot be verified at once.
    speculate = engine.config.speculate * (engine.limits.logit_biases is None)
    self._drafter = Drafter(speculate) if speculate else None
    self._warm = False  # whether drafts have been verified yet
    self.tokens_guessed = 0  # that came with the one that was due

  @property
  def idle(self) -> bool:
    busy = self._queue or self._held or self._running
    return not busy and self._new_weights is None

  @property
  def awaits_params(self) -> bool:
    """Whether offered parameters have not been taken yet (draining)."""
    return self._new_weights is not None

  @property
  def policy_version(self) -> int:
    """Of the weights in use; -1 before the first."""
    return self.engine.policy_version

  @property
  def tokens_in_flight(self) -> int:
    """Tokens drawn for completions that have not been returned yet."""
    held = [s for h in self._held for s in h.samples.values()]
    queued = [s for w in self._queue for s in w.samples]
    return sum(len(s.tokens) for s in [*held, *queued, *self._running.values()])

  def submit(self, request: Request) -> None:
    """Queues all samples of a request.

    Raises:
      ValueError: the request can never run on this engine.
    """
    limits, sampling = self.engine.limits, request.sampling
    length = len(request.prompt.tokens) + sampling.max_tokens
    if length > limits.length:
      raise ValueError(
        f'{request.prompt.row}: prompt of {len(request.prompt.tokens)} tokens '
        f'+ max_tokens={sampling.max_tokens} = {length}, more than the '
        f"engine's {limits.length}; lower max_tokens or "
        'prompts.max_prompt_tokens.'
      )
    if len(request.prompt.tokens) == 0 or request.num_samples < 1:
      raise ValueError(
        f'{request.prompt.row}: needs a prompt of at least one token and '
        f'num_samples >= 1, got {request.num_samples}.'
      )
    if len(sampling.stop_ids) > limits.stop_ids:
      raise ValueError(
        f'{len(sampling.stop_ids)} stop ids, the engine takes at most '
        f'{limits.stop_ids}.'
      )
    if sampling.adjusted and limits.logit_biases is None:
      raise ValueError(
        'min_tokens, penalties and logit_bias: this engine was built without; '
        'give its `limits` a number of `logit_biases`.'
      )
    if len(sampling.logit_bias) > (limits.logit_biases or 0):
      raise ValueError(
        f'{len(sampling.logit_bias)} logit biases, the engine takes at most '
        f'{limits.logit_biases}.'
      )
    vocab = self.engine.vocab_size
    if max((i for i, _ in sampling.logit_bias), default=0) >= vocab:
      raise ValueError(
        f'sampling.logit_bias={sampling.logit_bias}: token ids go from 0 to '
        f'{vocab - 1}.'
      )
    if sampling.stop_strings and self._decode is None:
      raise ValueError(
        f'sampling.stop_strings={sampling.stop_strings}: this scheduler was '
        'made without `decode`, which they need.'
      )
    order, self._order = self._order, self._order + 1
    samples = [
      _Sample(request, i, (order, i)) for i in range(request.num_samples)
    ]
    bisect.insort(self._queue, _Work(samples))
    if self._drafter is not None:
      prompt = request.prompt.tokens.tolist()
      self._drafter.begin(order, prompt, request.num_samples)

  def offer_params(self, params: Any, policy_version: int) -> None:
    """New weights, taken when the config's `on_new_weights` allows."""
    self._new_weights = params, policy_version
    self._take_params()

  def step(self) -> list[Completion]:
    """Admits, prefills one dispatch, fills slots, decodes one dispatch."""
    self._take_params()
    self._admit()
    done = self._prefill()
    self._insert()
    self._reserve()
    if self._running:
      for slot, drawn in self._generate().items():
        sample = self._running[slot]
        for token in drawn:
          if not sample.stopped_by_text:
            self._append(sample, token)
        if sample.stopped_by_text or not self.engine.is_active(slot):
          self._vacate(slot)
          done.append(self._complete(sample))
    if self.engine.config.order == 'longest':
      for completion in done:
        self._learn_length(completion)
    return done

  def _generate(self) -> dict[int, list[Drawn]]:
    """Decodes, or verifies drafts where that is likely to give more."""
    if self._drafter is None:
      return self.engine.generate()
    drafts, expected = {}, 0.0
    for slot, sample in self._running.items():
      order, index = sample.age
      if draft := self._drafter.draft(order, index):
        drafts[slot] = draft
        expected += min(self._drafter.expected(order), len(draft))
    # The first time in any case, so that nothing compiles later.
    worth = _WORTH * self.engine.config.speculate * len(self._running)
    verify = expected >= worth or not self._warm
    self._warm = True
    drawn = self.engine.generate(drafts if verify else None)
    for slot, draft in drafts.items():
      tokens = [x.token for x in drawn[slot]]
      self._drafter.judge(self._running[slot].age[0], draft, tokens)
    if verify:
      self.tokens_guessed += sum(len(x) - 1 for x in drawn.values())
    return drawn

  def abort(self, key: Any) -> list[Completion]:
    """Ends the requests of this `key` now.

    Returns:
      Their samples that had not come back yet, with what each has drawn (maybe
      nothing) and finish_reason 'abort'. They will not come again.
    """
    mine = lambda sample: sample.request.key == key  # noqa: E731
    ended = []
    for slot, sample in list(self._running.items()):
      if mine(sample):
        ended.append(self._vacate(slot))
    for held in list(self._held):
      for index, sample in list(held.samples.items()):
        if mine(sample):
          ended.append(held.samples.pop(index))
          held.prefix.sample_indices.remove(index)
      self._drop_if_empty(held)
    for work in [w for w in self._queue if mine(w.samples[0])]:
      self._queue.remove(work)
      ended += work.samples
    ended.sort(key=lambda s: s.age)
    return [self._complete(sample, 'abort') for sample in ended]

  # ---- the acts of a step

  def _take_params(self) -> None:
    if self._new_weights is None:
      return
    policy = self.engine.config.on_new_weights
    if policy == 'drain' and (self._held or self._running or self._next()):
      return
    if policy == 'recompute':
      for slot in list(self._running):
        self._preempt_slot(slot)
      for held in list(self._held):
        self._preempt_held(held)
    params, version = self._new_weights
    self._new_weights = None
    acknowledged = self.engine.load_params(params, version)
    assert acknowledged == version, (acknowledged, version)

  def _next(self) -> _Work | None:
    """What may start next: while draining, only what has tokens."""
    draining = self._new_weights is not None
    ready = (w for w in self._queue if w.started or not draining)
    return min(ready, key=self._turn, default=None)

  def _turn(self, work: _Work) -> tuple[Any, ...]:
    """Sorts the queue."""
    expected = 0.0
    request = work.samples[0].request
    if self.engine.config.order == 'longest':
      expected = self._lengths.get(request.prompt.row, np.inf)
      expected = min(expected, request.sampling.max_tokens)
    return not work.started, request.step, -expected, work.age

  def _learn_length(self, completion: Completion) -> None:
    row, length = completion.request.prompt.row, len(completion.tokens)
    known = self._lengths.get(row, length)
    self._lengths[row] = known + _NEWEST * (length - known)

  def _admit(self) -> None:
    config = self.engine.config
    while len(self._held) < config.prefill_rows and (work := self._next()):
      tokens = work.samples[0].sequence()
      # Leave each running slot a page, or the newcomer is preempted at once.
      needed = -(-len(tokens) // config.page_size) + len(self._running)
      if self._running and needed > self.engine.pool.num_free:
        return
      try:
        prefix = self.engine.start(
          work.samples[0].request, tokens, [s.index for s in work.samples]
        )
      except OutOfPages:
        return
      self._queue.remove(work)
      self._held.append(_Held(prefix, {s.index: s for s in work.samples}))

  def _prefill(self) -> list[Completion]:
    """One dispatch; returns the samples whose first token is their last."""
    waiting = [h for h in self._held if not h.prefix.complete]
    if not waiting:
      return []
    self.engine.prefill([h.prefix for h in waiting])
    done = []
    for held in waiting:
      if not held.prefix.complete:
        continue
      for index, sample in list(held.samples.items()):
        self._append(sample, held.prefix.first[index])
        if sample.finish_reason() is not None:
          del held.samples[index]
          held.prefix.sample_indices.remove(index)
          done.append(self._complete(sample))
      self._drop_if_empty(held)
    return done

  def _insert(self) -> None:
    free = [
      s for s in range(self.engine.config.num_slots) if s not in self._running
    ]
    for held in list(self._held):
      # Making room for another one may have preempted this one.
      if held not in self._held or not held.prefix.complete:
        continue
      partial = len(held.prefix.tokens) % self.engine.config.page_size > 0
      if partial and not self._running and not self.engine.pool.num_free:
        self._make_room(held.age)
        if held not in self._held:
          continue  # it was itself the youngest
      room = self.engine.pool.num_free if partial else len(free)
      indices = sorted(held.samples)[: min(len(free), room)]
      if not indices:
        continue
      assignment = {index: free.pop(0) for index in indices}
      self.engine.insert(held.prefix, assignment)
      for index, slot in assignment.items():
        self._running[slot] = held.samples.pop(index)
      self._drop_if_empty(held)

  def _reserve(self) -> None:
    for slot in sorted(self._running, key=lambda s: self._running[s].age):
      while slot in self._running:
        try:
          self.engine.reserve(slot)
          break
        except OutOfPages:
          self._make_room(self._running[slot].age)

  # ---- preemption

  def _make_room(self, age: _Age) -> None:
    """Preempts the youngest holder of pages, at the latest `age` itself."""
    slot = max(self._running, key=lambda s: self._running[s].age, default=None)
    held = max(self._held, key=lambda h: h.age, default=None)
    if held and (slot is None or held.age > self._running[slot].age):
      assert held.age > age or len(self._held) + len(self._running) > 1
      self._preempt_held(held)
    else:
      assert slot is not None
      self._preempt_slot(slot)

  def _preempt_slot(self, slot: int) -> None:
    self.preemptions += 1
    bisect.insort(self._queue, _Work([self._vacate(slot)]))

  def _vacate(self, slot: int) -> _Sample:
    sample = self._running.pop(slot)
    length = len(sample.request.prompt.tokens) + len(sample.tokens)
    full = length > self.engine.config.page_size  # there is a page to know
    self.engine.free(slot, sample.sequence() if full else None)
    return sample

  def _preempt_held(self, held: _Held) -> None:
    """Back to the queue; samples with tokens of their own go one by one."""
    self.preemptions += 1
    self._held.remove(held)
    self.engine.drop(held.prefix)
    samples = sorted(held.samples.values(), key=lambda s: s.age)
    fresh = [s for s in samples if not s.tokens]
    if fresh:
      bisect.insort(self._queue, _Work(fresh))
    for sample in samples:
      if sample.tokens:
        bisect.insort(self._queue, _Work([sample]))

  def _drop_if_empty(self, held: _Held) -> None:
    if not held.samples:
      self._held.remove(held)
      self.engine.drop(held.prefix)

  def _complete(
    self, sample: _Sample, reason: FinishReason | None = None
  ) -> Completion:
    if self._drafter is not None:
      self._drafter.end(sample.age[0])
    reason = reason or sample.finish_reason()
    assert reason is not None
    return Completion(
      request=sample.request,
      sample_index=sample.index,
      tokens=np.array(sample.tokens, np.int32),
      behavior_logprobs=np.array(sample.logprobs, np.float32),
      kept_logmass=np.array(sample.kept, np.float32),
      policy_versions=np.array(sample.versions, np.int32),
      finish_reason=reason,
      likeliest=sample.likeliest,
    )

  def _append(self, sample: _Sample, drawn: Drawn) -> None:
    sample.append(drawn)
    self.tokens_generated += 1
    if self._drafter is not None:
      self._drafter.append(*sample.age, drawn.token)
    sampling = sample.request.sampling
    if sampling.stop_strings:
      assert self._decode is not None  # or `submit` had refused it
      text = text_before_stop(sample.tokens, sampling, self._decode)
      sample.stopped_by_text = text is not None
