"""How good the policy is, as numbers with an interval.

Knows finished groups and the keys of an evaluation; knows nothing of how the
groups were made: `train.py` draws them through the same rollout path as the
groups it trains on. A rollout that could not be verified is a failure here
and is reported as such: it never leaves the denominator, as it does in
training. There is no bootstrap: pass@k has a closed form.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from rl_jax.types import Group, Rollout, SamplingParams


@dataclasses.dataclass(frozen=True)
class Config:
  """The keys under `config.evaluation`."""

  num_prompts: int = 256
  samples_per_prompt: int = 1
  ks: tuple[int, ...] = (1,)  # which pass@k to report, besides pass@1
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  stop_strings: tuple[str, ...] = ()
  min_tokens: int = 0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  max_tokens: int = 0  # of a completion; 0: as in training
  every_steps: int = 0  # 0: only before and after training

  def __post_init__(self):
    checks = {
      'num_prompts': (self.num_prompts >= 1, '>= 1'),
      'samples_per_prompt': (self.samples_per_prompt >= 1, '>= 1'),
      'ks': (
        all(type(k) is int and k >= 1 for k in self.ks),
        'whole numbers >= 1',
      ),
      'max_tokens': (self.max_tokens >= 0, '>= 0 (0: as in training)'),
      'every_steps': (
        self.every_steps >= 0,
        '>= 0 (0: only before and after training)',
      ),
    }
    for name, (ok, legal) in checks.items():
      if not ok:
        raise ValueError(
          f'evaluation.{name}={getattr(self, name)!r}: must be {legal}.'
        )
    if max(self.ks, default=1) > self.samples_per_prompt:
      raise ValueError(
        f'evaluation.ks={self.ks}: pass@{max(self.ks)} needs '
        f'evaluation.samples_per_prompt >= {max(self.ks)}, and it is '
        f'{self.samples_per_prompt}.'
      )
    if self.temperature == 0 and self.samples_per_prompt > 1:
      raise ValueError(
        f'evaluation.samples_per_prompt={self.samples_per_prompt}: at '
        'evaluation.temperature=0 all samples of a prompt are the same; set '
        'it to 1, or a temperature > 0.'
      )
    self.sampling(SamplingParams(max_tokens=max(1, self.min_tokens)))

  def is_due(self, step: int) -> bool:
    """Whether to evaluate after `step` learner steps, besides the start."""
    return step > 0 and self.every_steps > 0 and step % self.every_steps == 0

  def sampling(self, training: SamplingParams) -> SamplingParams:
    """How evaluation samples; what it does not set is as in `training`.

    Raises:
      ValueError: a key of this section is out of its range.
    """
    try:
      return dataclasses.replace(
        training,
        max_tokens=self.max_tokens or training.max_tokens,
        temperature=self.temperature,
        top_k=self.top_k,
        top_p=self.top_p,
        min_p=self.min_p,
        stop_strings=self.stop_strings,
        min_tokens=self.min_tokens,
        repetition_penalty=self.repetition_penalty,
        presence_penalty=self.presence_penalty,
        frequency_penalty=self.frequency_penalty,
        logit_bias=self.logit_bias,
      )
    except ValueError as e:
      message = str(e).replace('sampling.', 'evaluation.', 1)
      raise ValueError(message) from None


@dataclasses.dataclass(frozen=True)
class EvalResult:
  """What one evaluation says; every rate is a share of all its rollouts.

  The one exception is `accepted_stop_rate`: of the rollouts that pass, the
  share that ended by a stop token and not at the length limit. A policy that
  is right but rambles on until it is cut has a low one. It is nan if nothing
  passes.
  """

  num_prompts: int
  num_samples: int  # rollouts, of all prompts
  # By k, which always has 1: 'value', and the 95% interval 'low' to 'high'.
  pass_at: dict[int, dict[str, float]]
  truncation_rate: float  # ended at the length limit
  accepted_stop_rate: float
  lenient_pass_at_1: float  # with those that pass but for the format
  error_rate: float  # not verified: status 'error' or 'refused'
  mean_completion_tokens: float
  mean_score: float  # what could not be verified scores 0

  def as_dict(self) -> dict[str, float]:
    """Flat, for the metrics writer; `low`, `high` and `n` are of pass@1."""
    first = self.pass_at[1]
    flat = {
      'pass_at_1': first['value'],
      'low': first['low'],
      'high': first['high'],
      'n': self.num_prompts,
    }
    for k, estimate in self.pass_at.items():
      if k != 1:
        flat[f'pass_at_{k}'] = estimate['value']
        flat[f'pass_at_{k}_low'] = estimate['low']
        flat[f'pass_at_{k}_high'] = estimate['high']
    rest = (f.name for f in dataclasses.fields(self)[3:])
    return {
      **flat,
      'num_samples': self.num_samples,
      **{name: getattr(self, name) for name in rest},
    }


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
  """Unbiased estimate that one of k samples is right, from n >= k samples.

  1 - C(n - c, k) / C(n, k) of https://arxiv.org/abs/2107.03374, eq. 1, in
  whole numbers until the last division.
  """
  if not 0 <= num_correct <= num_samples:
    raise ValueError(f'{num_correct=}: must be in [0, {num_samples=}].')
  if not 1 <= k <= num_samples:
    raise ValueError(
      f'{k=}: pass@k needs 1 <= k <= {num_samples=}; draw more samples per '
      'prompt (evaluation.samples_per_prompt) or ask for a smaller k.'
    )
  total = math.comb(num_samples, k)
  return (total - math.comb(num_samples - num_correct, k)) / total


def wilson(mean: float, n: int, z: float = 1.96) -> tuple[float, float]:
  """Wilson's score interval for a mean of n draws that lie in [0, 1].

  Unlike mean +- z * s / sqrt(n) it keeps a width at 0 and 1, where early and
  late evaluations are. Source: https://doi.org/10.2307/2276774.
  """
  if n < 1:
    raise ValueError(f'{n=}: an interval needs at least one draw.')
  if not 0 <= mean <= 1:
    raise ValueError(f'{mean=}: must be in [0, 1].')
  shrink = 1 / (1 + z * z / n)
  centre = shrink * (mean + z * z / (2 * n))
  half = shrink * z * math.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2)
  # The bounds contain the mean in exact arithmetic; rounding must not say no.
  return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def summarise(groups: Sequence[Group], ks: Sequence[int]) -> EvalResult:
  """The statistics of one evaluation, pass@1 and pass@k for each of `ks`.

  The interval counts prompts, not rollouts: samples of one prompt are not
  independent. It is Wilson's on the mean of the per-prompt estimates, which
  is conservative: of all numbers in [0, 1] with a given mean, zeros and ones
  have the largest variance, and they are what Wilson assumes. It covers the
  draw of prompts, and is as wide with one sample per prompt as with many.

  Raises:
    ValueError: no groups, or a k above the number of a prompt's samples.
  """
  if not groups:
    raise ValueError('groups=[]: an evaluation needs at least one prompt.')
  rollouts = [r for group in groups for r in group.rollouts]
  passing = [r for r in rollouts if r.verdict.status == 'pass']
  return EvalResult(
    num_prompts=len(groups),
    num_samples=len(rollouts),
    pass_at={k: _pass_at(groups, k) for k in sorted({1, *ks})},
    truncation_rate=_mean([r.finish_reason == 'length' for r in rollouts]),
    accepted_stop_rate=_mean([r.finish_reason == 'stop' for r in passing]),
    lenient_pass_at_1=_mean(
      [r.verdict.status == 'pass' or r.verdict.lenient_pass for r in rollouts]
    ),
    error_rate=_mean(
      [r.verdict.status in ('error', 'refused') for r in rollouts]
    ),
    mean_completion_tokens=_mean([r.num_completion_tokens for r in rollouts]),
    mean_score=_mean([_score(r) for r in rollouts]),
  )


def _pass_at(groups: Sequence[Group], k: int) -> dict[str, float]:
  """pass@k averaged over prompts."""
  estimates = [
    pass_at_k(
      sum(r.verdict.status == 'pass' for r in group.rollouts),
      len(group.rollouts),
      k,
    )
    for group in groups
  ]
  value = _mean(estimates)
  low, high = wilson(value, len(groups))
  return {'value': value, 'low': low, 'high': high}


def _score(rollout: Rollout) -> float:
  return float(rollout.verdict.score) if rollout.verdict.scored else 0.0


def _mean(values: Sequence[float]) -> float:
  return math.fsum(values) / len(values) if values else math.nan
