"""GRPO: group-normalised advantages, clipped ratio (arXiv:2402.03300).

  A_i = (r_i - mean(r)) / std(r)
  loss_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)

rho_t = pi / mu of token t, mu the policy that drew it. `scale='none'` leaves
out the division by std (arXiv:2503.20783); clip_high > clip_low is DAPO's
clip-higher (arXiv:2503.14476).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.algorithms import base

_MIN_STD = 1e-6


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
  clip_low: float = 0.2  # ratio below 1 - clip_low gives no gradient
  clip_high: float = 0.2  # ratio above 1 + clip_high gives no gradient
  scale: str = 'group'  # divide by the group's std: group | none

  def __post_init__(self):
    super().__post_init__()
    if self.scale not in ('group', 'none'):
      raise ValueError(
        f"algorithm.scale={self.scale!r}: must be 'group' or 'none'."
      )
    if not 0 < self.clip_low <= 1 or not self.clip_high > 0:
      raise ValueError(
        f'algorithm.clip_low={self.clip_low} must be in (0, 1] and '
        f'algorithm.clip_high={self.clip_high} > 0.'
      )


def advantages(rewards: np.ndarray, config: Config) -> np.ndarray:
  """[G] rewards of one group, not all equal -> [G] advantages."""
  centred = rewards - rewards.mean()
  if config.scale == 'none':
    return centred
  return centred / max(rewards.std(), _MIN_STD)


def loss(
  inputs: base.LossInputs, config: Config
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Token losses [B, T] and metrics."""
  log_ratio = base.log_ratio(inputs)
  ratio = jnp.exp(log_ratio)
  clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
  unclipped_gain = ratio * inputs.advantages
  clipped_gain = clipped * inputs.advantages
  metrics = {
    'ratio': ratio,
    'clip_fraction': (clipped_gain < unclipped_gain).astype(jnp.float32),
    'kl_behavior': base.KL_ESTIMATORS['k3'](log_ratio),
  }
  return -jnp.minimum(unclipped_gain, clipped_gain), metrics
