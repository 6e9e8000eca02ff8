"""What all algorithms share: inputs, aggregation, KL, groups without signal.

Knows neither model nor mesh. Normalisation is done once, on the host, by
giving each token its weight from counts over the whole batch; a sum over
tokens, micro-batches and devices is then the loss, however it is split.

Letters: B rows, T tokens, G rollouts of a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.types import Group, Rollout

_CONTRACT = 'The contract: the docstring of rl_jax/algorithms/__init__.py.'
# Log-ratios beyond this are clamped before exp: e^20 is finite in float32.
MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class Config:
  """Keys that every algorithm has under `config.algorithm`."""

  aggregation: str = 'token_mean'  # token_mean | sequence_mean | constant
  constant: float = 1.0  # tokens by which 'constant' divides each sequence
  kl_coef: float = 0.0  # weight of the KL to the reference; 0: no reference
  kl_estimator: str = 'k3'  # k3 | k2 | k1 (reports only: no mean gradient)
  truncated: str = 'keep'  # completions cut at max_tokens: keep | zero | mask
  # Of a generator whose numbers are not the learner's: none | truncated |
  # auto, which is 'truncated' with int8 or bfloat16 on either side. That
  # bounds ratios by its cap; clips of an algorithm then have nothing to do.
  correction: str = 'auto'
  correction_cap: float = 2.0  # largest weight that it gives a token

  def __post_init__(self):
    legal = {
      'aggregation': tuple(AGGREGATIONS),
      'kl_estimator': tuple(KL_ESTIMATORS),
      'truncated': ('keep', 'zero', 'mask'),
      'correction': ('auto', 'none', 'truncated'),
    }
    for name, values in legal.items():
      if getattr(self, name) not in values:
        raise ValueError(
          f'algorithm.{name}={getattr(self, name)!r}: must be one of {values}.'
        )
    if not 0 < self.constant < math.inf or not 0 <= self.kl_coef < math.inf:
      raise ValueError(
        f'algorithm.constant={self.constant} must be > 0 and '
        f'algorithm.kl_coef={self.kl_coef} >= 0, both finite.'
      )
    if not 1 <= self.correction_cap < math.inf:
      raise ValueError(
        f'algorithm.correction_cap={self.correction_cap}: must be >= 1 and '
        'finite.'
      )


class LossInputs(NamedTuple):
  """All [B, T] float32; each entry belongs to the token that it scores."""

  logprobs: jax.Array  # of the parameters being updated
  behavior_logprobs: jax.Array  # of the policy that drew the token
  reference_logprobs: jax.Array | None  # of the KL anchor, if there is one
  advantages: jax.Array
  loss_mask: jax.Array


Loss = Callable[[LossInputs], tuple[jax.Array, dict[str, jax.Array]]]


def log_ratio(inputs: LossInputs) -> jax.Array:
  """log pi / mu, clamped to +-MAX_LOG_RATIO; 0 outside the loss mask."""
  difference = jnp.where(
    inputs.loss_mask > 0, inputs.logprobs - inputs.behavior_logprobs, 0.0
  )
  return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


# ---- KL(pi || reference) from samples of pi; log_r = log reference / pi.
# http://joschu.net/blog/kl-approx.html

KL_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'k1': lambda log_r: -log_r,
  'k2': lambda log_r: log_r**2 / 2,
  'k3': lambda log_r: jnp.expm1(log_r) - log_r,
}


def kl(inputs: LossInputs, config: Config) -> jax.Array:
  """The estimate of each token, [B, T]; differentiable.

  Raises:
    ValueError: there is no reference.
  """
  if inputs.reference_logprobs is None:
    raise ValueError(
      'a KL needs reference log-probs: call Learner.set_reference before the '
      'first update.'
    )
  log_r = jnp.where(
    inputs.loss_mask > 0, inputs.reference_logprobs - inputs.logprobs, 0.0
  )
  log_r = jnp.clip(log_r, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return KL_ESTIMATORS[config.kl_estimator](log_r)


def bind(algorithm: ModuleType, config: Any) -> Loss:
  """The loss that is minimised: the plugin's own plus kl_coef * KL.

  With `correction='truncated'` the plugin sees the policy that is updated as
  the one that drew the tokens, and each token's loss is weighed by how much
  likelier it is to the learner than to the generator, up to a cap (truncated
  importance sampling, https://fengyao.notion.site/off-policy-rl): what int8
  changes is then corrected and not clipped. The plugin's own ratio is 1 then,
  since a batch has one update; the metrics say how far apart the two are.
  """

  def loss(inputs: LossInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
    if config.correction == 'truncated':
      token_loss, metrics = _corrected(algorithm, config, inputs)
    else:
      token_loss, metrics = algorithm.loss(inputs, config)
    if config.kl_coef == 0:
      return token_loss, metrics
    divergence = kl(inputs, config)
    metrics = metrics | {'kl_reference': divergence}
    return token_loss + config.kl_coef * divergence, metrics

  return loss


def _corrected(
  algorithm: ModuleType, config: Any, inputs: LossInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
  current = jax.lax.stop_gradient(inputs.logprobs)
  log_r = log_ratio(inputs._replace(logprobs=current))
  ratio = jnp.exp(log_r)
  weight = jnp.minimum(ratio, config.correction_cap)
  token_loss, metrics = algorithm.loss(
    inputs._replace(
      behavior_logprobs=jnp.where(
        inputs.loss_mask > 0, current, inputs.behavior_logprobs
      )
    ),
    config,
  )
  capped = (ratio > config.correction_cap).astype(jnp.float32)
  return token_loss * weight, metrics | {
    'correction': weight,
    'correction_capped': capped,
    'learner_over_behavior': ratio,
    'kl_behavior': jnp.expm1(log_r) - log_r,  # k3 of KL(mu || pi)
  }


def check_plugin(algorithm: ModuleType, config: Any) -> None:
  """Tries a plugin on two rewards and on 15 tokens; the model is not needed.

  Raises:
    ValueError: it does not keep the contract; says where.
  """
  where = f'algorithm {algorithm.__name__!r}'
  if not isinstance(config, Config):
    raise ValueError(f'{where}: its Config must extend algorithms.base.Config.')
  rewards = np.array([0.0, 1.0])
  shape: Any = jax.ShapeDtypeStruct((3, 5), jnp.float32)
  inputs = LossInputs(*(shape,) * len(LossInputs._fields))
  try:
    advantages = np.asarray(algorithm.advantages(rewards, config), np.float64)
    token_loss, metrics = jax.eval_shape(bind(algorithm, config), inputs)
    shapes = {'loss': token_loss.shape}
    shapes |= {f'metric {k!r}': v.shape for k, v in metrics.items()}
  except Exception as e:
    raise ValueError(
      f'{where} fails on two rewards or on inputs of shape {shape.shape}: '
      f'{type(e).__name__}: {e}. {_CONTRACT}'
    ) from e
  _check_advantages(rewards, advantages, where)
  for name, found in shapes.items():
    if found != shape.shape:
      raise ValueError(
        f'{where}: {name} has shape {found} for inputs of shape {shape.shape}: '
        f'must be one value for each token. {_CONTRACT}'
      )
  if _mixes_tokens(bind(algorithm, config), shape.shape):
    raise ValueError(
      f'{where}: the loss of a token changes with other tokens of the array. '
      'It is called on micro-batches of packed rows, so what it finds there '
      'depends on packing and learner.rows_per_microbatch; use what belongs to '
      f'the token only. {_CONTRACT}'
    )


def _check_advantages(
  rewards: np.ndarray, advantages: np.ndarray, where: str
) -> None:
  if advantages.shape != rewards.shape:
    fault = f'of shape {advantages.shape} instead of {rewards.shape}'
  elif not np.isfinite(advantages).all():
    fault = 'not finite'
  else:
    return
  raise ValueError(
    f'{where}: advantages({rewards.tolist()}) gave {advantages.tolist()}, '
    f'{fault}. {_CONTRACT}'
  )


def _mixes_tokens(loss: Loss, shape: tuple[int, int]) -> bool:
  """Whether another value at the first token is seen by the others."""
  rng = np.random.default_rng(0)
  mask = jnp.ones(shape)
  numbers = rng.standard_normal((len(LossInputs._fields) - 1, *shape))

  def others(numbers: np.ndarray) -> np.ndarray:
    inputs = LossInputs(*map(jnp.float32, numbers), loss_mask=mask)
    return np.asarray(loss(inputs)[0]).ravel()[1:]

  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    before = others(numbers)
    for field in range(len(numbers)):  # one by one: a ratio sees differences
      changed = numbers.copy()
      changed[field, 0, 0] += 1.0
      if not np.array_equal(before, others(changed), equal_nan=True):
        return True
  return False


# ---- Aggregation: the weight of a token, from the lengths of all sequences.


def _token_mean(lengths, config):
  return np.full(len(lengths), 1.0 / max(lengths.sum(), 1))


def _sequence_mean(lengths, config):
  return 1.0 / (np.maximum(lengths, 1) * max(np.sum(lengths > 0), 1))


def _constant(lengths, config):
  sequences = max(np.sum(lengths > 0), 1)
  return np.full(len(lengths), 1.0 / (config.constant * sequences))


AGGREGATIONS: dict[str, Callable] = {
  'token_mean': _token_mean,  # every token counts the same (DAPO)
  'sequence_mean': _sequence_mean,  # every sequence counts the same (GRPO)
  'constant': _constant,  # sum / constant, mean over sequences (Dr. GRPO)
}


def token_weights(lengths: Sequence[int], config: Config) -> np.ndarray:
  """Weight of each loss token of each sequence, [num_sequences] float64.

  Args:
    lengths: loss tokens of every sequence in the whole batch. An empty
      sequence has no token to weigh and leaves every count.
  """
  return AGGREGATIONS[config.aggregation](np.asarray(lengths), config)


# ---- From groups to rollouts with an advantage.


@dataclasses.dataclass(frozen=True)
class Scored:
  """A rollout that goes into the loss."""

  rollout: Rollout
  advantage: float


@dataclasses.dataclass(frozen=True)
class Selection:
  """What goes into the loss, and what does not and why (in rollouts)."""

  scored: list[Scored]
  excluded: dict[str, list[Rollout]]  # reason -> rollouts
  num_groups: int  # that give signal


EXCLUSIONS = ('unscored', 'no_signal', 'truncated', 'empty')


def select(
  groups: Sequence[Group],
  advantages: Callable[[np.ndarray], np.ndarray],
  config: Config,
) -> Selection:
  """Advantages within each group, over the rollouts that have a score.

  Rollouts whose verdict is not a judgement (`error`, `refused`) leave the
  group. Groups whose raw scores are all equal teach nothing, whatever the
  truncation rule makes of them, and leave the loss, its denominator included.
  With `truncated='zero'` a completion cut at max_tokens is rewarded 0; with
  'mask' it counts for the baseline only.

  Raises:
    ValueError: the advantages of a group are not a finite number for each.
  """
  scored: list[Scored] = []
  excluded: dict[str, list[Rollout]] = {name: [] for name in EXCLUSIONS}
  num_groups = 0
  for group in groups:
    judged = [r for r in group.rollouts if r.verdict.scored]
    excluded['unscored'] += [r for r in group.rollouts if not r.verdict.scored]
    rewards = np.array([reward(r, config) for r in judged], np.float64)
    raw = [r.verdict.score for r in judged]
    if len(judged) < 2 or _all_equal(raw) or _all_equal(rewards):
      excluded['no_signal'] += judged
      continue
    num_groups += 1
    found = np.asarray(advantages(rewards), np.float64)
    _check_advantages(rewards, found, 'algorithm')
    for rollout, advantage in zip(judged, found, strict=True):
      if rollout.num_completion_tokens == 0:
        excluded['empty'].append(rollout)
      elif config.truncated == 'mask' and rollout.finish_reason == 'length':
        excluded['truncated'].append(rollout)
      else:
        scored.append(Scored(rollout, float(advantage)))
  return Selection(scored, excluded, num_groups)


def _all_equal(values: Sequence[float] | np.ndarray) -> bool:
  return max(values) == min(values)  # a std would see rounding


def reward(rollout: Rollout, config: Config) -> float:
  """The verdict's score, after the truncation rule."""
  if config.truncated == 'zero' and rollout.finish_reason == 'length':
    return 0.0
  return rollout.verdict.score
