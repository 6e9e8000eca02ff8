"""The records that cross stages; nothing else does.

`Prompt -> Rollout -> Group -> TrainBatch -> (params, policy_version)`.

Knows no JAX: arrays here live on the host. Every per-token array is indexed
by the token that it scores: `behavior_logprobs[t]` belongs to `tokens[t]`.
Masks come from lengths, never from comparing ids with a pad or stop id.

Letters in shapes: B rows, T tokens, G rollouts of a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

FinishReason = Literal['stop', 'length', 'abort']
Status = Literal['pass', 'fail', 'timeout', 'error', 'refused']
STATUSES: tuple[Status, ...] = ('pass', 'fail', 'timeout', 'error', 'refused')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One draw from the prompt stream.

  Example:
    Prompt(prompt_id=7, row='arithmetic/123', text='1+2=',
           tokens=np.array([3, 12, 4, 13]), answer='3')
  """

  prompt_id: int  # number of the draw: unique in a run, seeds the sampler
  row: str  # 'source/row number': which row of which source was drawn
  text: str  # as rendered by the chat template, before tokenisation
  tokens: np.ndarray  # [T] int32
  answer: Any  # what the verifier is given; JSON-serialisable


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How completions are drawn; every field is honoured by the engine.

  `temperature=0` is greedy. The distribution is softmax(logits / temperature)
  cut to the top_k most likely tokens, then to the smallest set of mass
  >= top_p, then to tokens of at least min_p times the likeliest one.

  The fields from `stop_strings` on are for evaluation and serving: training
  samples from the policy itself. A stop string ends the completion with the
  token that completes it; `Completion.text` leaves it out.
  """

  max_tokens: int  # completion tokens, the stop token included
  temperature: float = 1.0
  top_k: int = 0  # 0: all
  top_p: float = 1.0  # 1: all
  min_p: float = 0.0  # 0: all
  stop_ids: tuple[int, ...] = ()  # any of them ends the completion
  stop_strings: tuple[str, ...] = ()  # so does any of them in its text
  min_tokens: int = 0  # completion tokens before which nothing ends it
  repetition_penalty: float = 1.0  # 1: none; divides logits of tokens seen
  presence_penalty: float = 0.0  # subtracted from logits of tokens drawn
  frequency_penalty: float = 0.0  # as presence, each time a token was drawn
  logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added) pairs

  def __post_init__(self):
    checks = {
      'max_tokens': (self.max_tokens >= 1, '>= 1'),
      'temperature': (
        0 <= self.temperature < math.inf,
        '>= 0 (0 is greedy) and finite',
      ),
      'top_k': (self.top_k >= 0, '>= 0 (0 keeps all tokens)'),
      'top_p': (0 < self.top_p <= 1, 'in (0, 1]'),
      'min_p': (0 <= self.min_p < 1, 'in [0, 1)'),
      'stop_ids': (all(i >= 0 for i in self.stop_ids), 'token ids >= 0'),
      'stop_strings': (
        isinstance(self.stop_strings, tuple)
        and all(isinstance(x, str) and x for x in self.stop_strings),
        'a tuple of strings that are not empty',
      ),
      'min_tokens': (
        0 <= self.min_tokens <= self.max_tokens,
        f'from 0 to max_tokens={self.max_tokens}',
      ),
      'repetition_penalty': (
        0 < self.repetition_penalty < math.inf,
        '> 0 (1 is none) and finite',
      ),
      'presence_penalty': (math.isfinite(self.presence_penalty), 'finite'),
      'frequency_penalty': (math.isfinite(self.frequency_penalty), 'finite'),
      'logit_bias': (
        all(map(_is_bias, self.logit_bias))
        and len(dict(self.logit_bias)) == len(self.logit_bias),
        'pairs of a token id >= 0, each once, and a finite number',
      ),
    }
    for name, (ok, legal) in checks.items():
      if not ok:
        raise ValueError(
          f'sampling.{name}={getattr(self, name)!r}: must be {legal}.'
        )

  @property
  def truncated(self) -> bool:
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

  @property
  def adjusted(self) -> bool:
    """Whether logits are changed before temperature."""
    changes = self.presence_penalty or self.frequency_penalty or self.min_tokens
    return bool(changes or self.repetition_penalty != 1 or self.logit_bias)


def _is_bias(pair: Any) -> bool:
  try:
    token, bias = pair
    return type(token) is int and token >= 0 and math.isfinite(bias)
  except (TypeError, ValueError):
    return False


def text_before_stop(
  tokens: Sequence[int],
  sampling: SamplingParams,
  decode: Callable[[Sequence[int]], str],
) -> str | None:
  """The text up to the first stop string, None where there is none.

  One that ends before `min_tokens` tokens is text like any other.
  """
  text = decode(tokens)
  early = len(decode(tokens[: max(0, sampling.min_tokens - 1)]))
  found = [
    text.find(stop, max(0, early - len(stop) + 1))
    for stop in sampling.stop_strings
  ]
  first = min((i for i in found if i >= 0), default=None)
  return None if first is None else text[:first]


@dataclasses.dataclass(frozen=True)
class Request:
  """Asks the generator for `num_samples` completions of one prompt.

  (step, prompt_id, sample index, position) and the run's seed are all that
  the random numbers depend on.
  """

  prompt: Prompt
  num_samples: int
  sampling: SamplingParams
  step: int
  key: Any = None  # the caller's own, returned with each completion


@dataclasses.dataclass(frozen=True)
class Completion:
  """What the generator returns for one sample; what stopped it is included.

  Example: Completion(request, 0, tokens=[7, 8, 2], ..., finish='stop')
  """

  request: Request
  sample_index: int
  tokens: np.ndarray  # [T] int32
  behavior_logprobs: np.ndarray  # [T] float32, under the sampled distribution
  kept_logmass: np.ndarray  # [T] float32, log mass kept by top-k/p, min-p
  policy_versions: np.ndarray  # [T] int32, of the weights that drew the token
  finish_reason: FinishReason
  # Of each token the likeliest tokens in its place with their log-probs, before
  # truncation; as many as `generator.top_logprobs`.
  likeliest: Sequence[list[tuple[int, float]]] = ()

  def text(self, decode: Callable[[Sequence[int]], str]) -> str:
    """Decoded, without the stop token, or from the stop string on."""
    tokens, sampling = self.tokens.tolist(), self.request.sampling
    if self.finish_reason != 'stop':
      return decode(tokens)
    if tokens[-1] in sampling.stop_ids:
      return decode(tokens[:-1])
    text = text_before_stop(tokens, sampling, decode)
    assert text is not None  # or it had not stopped
    return text


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a verifier says of one completion: a status, never a bare float.

  `error` is trouble of the infrastructure, not of the completion: it leaves
  the group's statistics and the loss. A `timeout` counts as a wrong answer
  only if the completion itself used up its time.

  Example: Verdict(status='pass', score=1.0, reason='exact: 3')
  """

  status: Status
  score: float  # in [0, 1]
  reason: str
  # Of a 'fail': right, but not where or how the answer was to be given. It is
  # reported, so that a gain in format is not taken for one in skill.
  lenient_pass: bool = False

  def __post_init__(self):
    if self.status not in STATUSES:
      raise ValueError(f'{self.status=}: must be one of {STATUSES}.')
    if not 0.0 <= self.score <= 1.0:  # also refuses nan
      raise ValueError(f'{self.score=}: must be a number in [0, 1].')
    if self.lenient_pass and self.status != 'fail':
      raise ValueError(f"{self.lenient_pass=}: is of a 'fail' only.")

  @property
  def scored(self) -> bool:
    """Whether the score says something about the completion."""
    return self.status in ('pass', 'fail', 'timeout')


@dataclasses.dataclass(frozen=True)
class Rollout:
  """One attempt at a prompt: the prompt's tokens, then what was sampled.

  Example (prompt of 2 tokens, completion of 3):
    tokens            = [5, 6, 7, 8, 2]
    loss_mask         = [0, 0, 1, 1, 1]
    behavior_logprobs = [0, 0, -.1, -.7, -.2]
    kept_logmass      = [0, 0, 0, 0, 0]
    policy_versions   = [-1, -1, 4, 4, 4]
  """

  sample_index: int  # 0 .. G-1 within the group
  tokens: np.ndarray  # [T] int32
  loss_mask: np.ndarray  # [T] float32, 1 where the policy chose the token
  behavior_logprobs: np.ndarray  # [T] float32, under the sampled distribution
  kept_logmass: np.ndarray  # [T] float32, log mass kept by top-k/p, min-p
  policy_versions: np.ndarray  # [T] int32, -1 where the policy chose nothing
  finish_reason: FinishReason
  text: str  # the completion, decoded, without its stop token
  verdict: Verdict

  @property
  def num_completion_tokens(self) -> int:
    return int(self.loss_mask.sum())


@dataclasses.dataclass(frozen=True)
class Group:
  """The G rollouts of one prompt, in the order of `sample_index`."""

  prompt: Prompt
  rollouts: Sequence[Rollout]

  @property
  def oldest_version(self) -> int:
    """Policy version of the oldest token that the policy chose."""
    versions = np.concatenate([r.policy_versions for r in self.rollouts])
    return int(versions[versions >= 0].min())

  @property
  def num_completion_tokens(self) -> int:
    return sum(r.num_completion_tokens for r in self.rollouts)


@dataclasses.dataclass(frozen=True)
class TrainBatch:
  """Packed rows; several sequences share a row, told apart by segment id.

  `loss_weights` already holds the aggregation's normaliser, computed from
  global counts, so that a sum over tokens, micro-batches and devices of
  `loss_weights * token_loss` is the loss.

  Example (one row of 6: a sequence of 3 tokens, one of 2, a pad):
    tokens       = [[5, 6, 7, 8, 9, 0]]
    segment_ids  = [[1, 1, 1, 2, 2, 0]]
    positions    = [[0, 1, 2, 0, 1, 0]]
    loss_mask    = [[0, 1, 1, 0, 1, 0]]
    loss_weights = [[0, 1/3, 1/3, 0, 1/3, 0]]   (token mean)
  """

  tokens: np.ndarray  # [B, T] int32
  segment_ids: np.ndarray  # [B, T] int32, 0 on padding
  positions: np.ndarray  # [B, T] int32, from 0 in each sequence
  loss_mask: np.ndarray  # [B, T] float32
  loss_weights: np.ndarray  # [B, T] float32
  advantages: np.ndarray  # [B, T] float32
  behavior_logprobs: np.ndarray  # [B, T] float32
  kept_logmass: np.ndarray  # [B, T] float32
