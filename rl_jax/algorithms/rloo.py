"""RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740).

  A_i = r_i - mean of the other rewards
  loss_t = -min(rho_t, max_ratio) A log pi_t,  rho without gradient

rho_t = pi / mu corrects for a policy that is older than the learner; it is 1
on policy, and truncated (arXiv:1802.01561) so that off policy it stays
bounded.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.algorithms import base


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
  max_ratio: float = 2.0  # cap of the importance weight

  def __post_init__(self):
    super().__post_init__()
    if not self.max_ratio >= 1:
      raise ValueError(f'algorithm.max_ratio={self.max_ratio}: must be >= 1.')


def advantages(rewards: np.ndarray, config: Config) -> np.ndarray:
  """[G >= 2] rewards of one group -> [G] advantages."""
  others = (rewards.sum() - rewards) / (len(rewards) - 1)
  return rewards - others


def loss(
  inputs: base.LossInputs, config: Config
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Token losses [B, T] and metrics."""
  log_ratio = base.log_ratio(inputs)
  ratio = jnp.exp(log_ratio)
  weight = jax.lax.stop_gradient(jnp.minimum(ratio, config.max_ratio))
  metrics = {
    'ratio': ratio,
    'clip_fraction': (ratio > config.max_ratio).astype(jnp.float32),
    'kl_behavior': base.KL_ESTIMATORS['k3'](log_ratio),
  }
  return -weight * inputs.advantages * inputs.logprobs, metrics
