"""AdamW with warm-up, decay and clipping by global norm, from optax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import optax


@dataclasses.dataclass(frozen=True)
class Config:
  """Keys of `config.optimizer` (and of `config.sft` for its own phase)."""

  section: ClassVar[str] = 'optimizer'  # for messages
  learning_rate: float = 1e-4  # peak
  warmup_steps: int = 0  # linear, from 0
  decay: str = 'constant'  # constant | linear | cosine, to the last step
  final_fraction: float = 0.0  # learning rate at the end, as part of the peak
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0  # of matrices only
  max_grad_norm: float = 1.0  # global norm; 0: no clipping

  def __post_init__(self):
    if self.decay not in ('constant', 'linear', 'cosine'):
      raise ValueError(
        f'{self.section}.decay={self.decay!r}: must be constant, linear or '
        'cosine.'
      )
    # Written so that nan is refused.
    checks = {
      'learning_rate': (0 < self.learning_rate < math.inf, '> 0 and finite'),
      'warmup_steps': (self.warmup_steps >= 0, '>= 0'),
      'final_fraction': (0 <= self.final_fraction <= 1, 'in [0, 1]'),
      'b1': (0 <= self.b1 < 1, 'in [0, 1)'),
      'b2': (0 <= self.b2 < 1, 'in [0, 1)'),
      'eps': (0 < self.eps < math.inf, '> 0 and finite'),
      'weight_decay': (0 <= self.weight_decay < math.inf, '>= 0 and finite'),
      'max_grad_norm': (self.max_grad_norm >= 0, '>= 0 (0: no clipping)'),
    }
    for name, (ok, legal) in checks.items():
      if not ok:
        raise ValueError(
          f'{self.section}.{name}={getattr(self, name)}: must be {legal}.'
        )


def schedule(config: Config, num_steps: int) -> optax.Schedule:
  """Learning rate of update 0, 1, ..., num_steps - 1."""
  warmup = config.warmup_steps
  steps = 'sft.num_steps' if config.section == 'sft' else 'num_steps'
  if warmup >= num_steps > 0 and warmup > 0:
    raise ValueError(
      f'{config.section}.warmup_steps={warmup}: must be < the {num_steps} '
      f'steps that there are; lower it, or raise {steps}.'
    )
  peak, rest = config.learning_rate, max(num_steps - warmup, 1)
  after: optax.Schedule = {
    'constant': lambda: optax.constant_schedule(peak),
    'linear': lambda: optax.linear_schedule(
      peak, peak * config.final_fraction, rest
    ),
    'cosine': lambda: optax.cosine_decay_schedule(
      peak, rest, config.final_fraction
    ),
  }[config.decay]()
  if not warmup:
    return after
  # The first update already moves: warm-up runs from peak/warmup to peak.
  ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
  return optax.join_schedules([ramp, after], [warmup])


def build(config: Config, num_steps: int) -> optax.GradientTransformation:
  parts = []
  if config.max_grad_norm:
    parts.append(optax.clip_by_global_norm(config.max_grad_norm))
  parts.append(
    optax.adamw(
      schedule(config, num_steps),
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
      mask=_decayed,
    )
  )
  return optax.chain(*parts)


def _decayed(params: Any) -> Any:
  """True for matrices; norms and biases are not decayed."""

  def decays(path, _):
    name = path[-1].key
    return not (name.endswith('norm') or name.endswith('bias'))

  return jax.tree_util.tree_map_with_path(decays, params)
