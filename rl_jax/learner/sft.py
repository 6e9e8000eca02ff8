"""Supervised fine-tuning, by the same update as RL.

Imitates the `solution` of rows: cross-entropy of the solution and of the stop
token after it, mean over all tokens of the batch. Knows tokens only.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from rl_jax.algorithms.base import LossInputs
from rl_jax.learner import optimizer


@dataclasses.dataclass(frozen=True)
class Config(optimizer.Config):
  """Keys of `config.sft`: its length, and an optimiser of its own."""

  section: ClassVar[str] = 'sft'
  num_steps: int = 0  # 0: no supervised phase
  examples_per_step: int = 64
  learning_rate: float = 1e-3  # peak


def loss(inputs: LossInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
  """-log p of each token, [B, T]."""
  return -inputs.logprobs, {}


def example(
  prompt: np.ndarray, solution: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """(tokens, loss_mask), [T] int32 and float32: every solution token counts."""
  tokens = np.concatenate([prompt, solution]).astype(np.int32)
  mask = np.zeros(len(tokens), np.float32)
  mask[len(prompt) :] = 1.0
  return tokens, mask
