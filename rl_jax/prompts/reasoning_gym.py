"""Procedural problems from `reasoning-gym`, those with a number as answer.

Knows which of its tasks our verifiers can judge; asks the library for
questions and gold answers only, never for a score. Left out are tasks whose
answer is rounded, is one of several, or can be copied from the question, and
`number_sequence`, which needs 70 ms a problem.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from rl_jax.prompts import base

TASKS = (
  'aiw',
  'basic_arithmetic',
  'chain_sum',
  'circuit_logic',
  'count_bits',
  'count_primes',
  'decimal_chain_sum',
  'gcd',
  'gsm_symbolic',
  'largest_island',
  'lcm',
  'leg_counting',
  'letter_counting',
  'products',
  'rectangle_count',
  'rotten_oranges',
  'self_reference',
  'simple_equations',
  'simple_geometry',
)


@dataclasses.dataclass(frozen=True)
class Config:
  task: str = 'chain_sum'  # one of TASKS
  seed: int = 0
  size: int = 1000  # problems drawn; repeats and the other split are left out
  split: str = 'train'  # or 'heldout'
  heldout_fraction: float = 0.1  # of all questions; the same in both splits
  params: Mapping[str, Any] = dataclasses.field(
    default_factory=dict  # the task's own settings, as dict(min_terms=2)
  )

  def __post_init__(self):
    base.check_split(self.split, self.heldout_fraction)
    if self.task not in TASKS:
      raise ValueError(
        f'task={self.task!r}: must be one of {", ".join(TASKS)}.'
      )
    if self.size < 1:
      raise ValueError(f'size={self.size!r}: must be >= 1.')


def rows(config: Config) -> Sequence[base.Row]:
  """The problems of the split, each question once.

  Raises:
    ValueError: `params` that the task does not take.
    ModuleNotFoundError: reasoning-gym is not installed.
  """
  library = _import()
  legal = _params(library, config.task)
  unknown = sorted(set(config.params) - set(legal))
  if unknown:
    raise ValueError(
      f'params.{unknown[0]} is not a setting of {config.task}. Legal: '
      f'{", ".join(legal)}.'
    )
  try:
    problems = library.create_dataset(
      config.task, seed=config.seed, size=config.size, **config.params
    )
  except (AssertionError, TypeError, ValueError) as e:  # it refuses a value
    raise ValueError(
      f'params={dict(config.params)}: {config.task} refuses: {e}'
    ) from e
  answers = {p['question']: str(p['answer']) for p in problems}
  return [
    base.Row(question, answer, answer)
    for question, answer in answers.items()
    if base.in_split(question, config.split, config.heldout_fraction)
  ]


def _params(library: ModuleType, task: str) -> list[str]:
  _, config_class = library.factory.DATASETS[task]
  names = {f.name for f in dataclasses.fields(config_class)}
  return sorted(names - {'seed', 'size'})


def _import() -> ModuleType:
  try:
    with warnings.catch_warnings():
      # One of its dependencies leaves a data file open while it is imported.
      warnings.filterwarnings('ignore', 'unclosed file', ResourceWarning)
      import reasoning_gym
  except ModuleNotFoundError as e:
    if e.name != 'reasoning_gym':
      raise
    raise ModuleNotFoundError(
      "reasoning-gym is not installed: pip install -e '.[reasoning-gym]'.",
      name='reasoning_gym',
    ) from e
  return reasoning_gym
