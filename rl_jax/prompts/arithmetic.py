"""Integer arithmetic, 'a+b=' -> 'c': a task that a tiny model can learn.

Knows no data file. Operands are drawn from 0 to 10 ** max_digits - 1. Whether
a problem is held out depends on the problem alone, so the training and the
held-out split share none, whatever their seeds.
"""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Sequence

from rl_jax.prompts import base

_OPERATORS = {'+': operator.add, '-': operator.sub, '*': operator.mul}
_LISTABLE = 200_000  # problems; larger spaces are sampled
_MAX_DIGITS = 6  # random.random() has 53 bits, enough to draw two operands


@dataclasses.dataclass(frozen=True)
class Config:
  min_digits: int = 1  # of an operand
  max_digits: int = 2
  operators: str = '+'  # any of + - *; answers to '-' may be negative
  num_rows: int = 0  # 0: every problem of the split
  split: str = 'train'  # or 'heldout'
  heldout_fraction: float = 0.1  # of all problems; the same in both splits
  seed: int = 0  # which problems, where num_rows leaves some out

  def __post_init__(self):
    base.check_split(self.split, self.heldout_fraction)
    signs = set(self.operators)
    repeated = len(signs) < len(self.operators)
    if not signs or repeated or not signs <= set(_OPERATORS):
      raise ValueError(
        f'operators={self.operators!r}: must be one or more of '
        f'{"".join(_OPERATORS)!r}, each once.'
      )
    if not 1 <= self.min_digits <= self.max_digits <= _MAX_DIGITS:
      raise ValueError(
        f'min_digits={self.min_digits!r}, max_digits={self.max_digits!r}: '
        f'must be 1 to {_MAX_DIGITS}, in this order.'
      )
    if self.num_rows < 0:
      raise ValueError(
        f'num_rows={self.num_rows!r}: must be >= 0 (0 takes all).'
      )

  @property
  def operands(self) -> range:
    first = 0 if self.min_digits == 1 else 10 ** (self.min_digits - 1)
    return range(first, 10**self.max_digits)

  @property
  def num_problems(self) -> int:
    """Of both splits."""
    return len(self.operators) * len(self.operands) ** 2


def rows(config: Config) -> Sequence[base.Row]:
  """The problems of the split, each once."""
  if config.num_problems > _LISTABLE:
    return _sampled(config)
  make = _maker(config)
  found = [
    row
    for row in map(make, range(config.num_problems))
    if base.in_split(row.prompt, config.split, config.heldout_fraction)
  ]
  if config.num_rows > len(found):
    raise ValueError(
      f'{config.num_rows=}: the {config.split} split of {config.num_problems} '
      f'problems has {len(found)}; ask for at most that many, or raise '
      'max_digits.'
    )
  if config.num_rows:
    return random.Random(config.seed).sample(found, config.num_rows)
  return found


def _sampled(config: Config) -> Sequence[base.Row]:
  """`num_rows` different problems of a space too large to list."""
  size, share = config.num_problems, config.heldout_fraction
  share = share if config.split == 'heldout' else 1 - share
  most = int(share * size) // 2  # so that draws rarely repeat
  if not 1 <= config.num_rows <= most:
    raise ValueError(
      f'{config.num_rows=}: of {size} problems, set how many to sample for the '
      f'{config.split} split, 1 to {most}.'
    )
  draw, make = random.Random(config.seed).random, _maker(config)
  chosen: dict[str, base.Row] = {}
  while len(chosen) < config.num_rows:
    row = make(int(draw() * size))
    if base.in_split(row.prompt, config.split, config.heldout_fraction):
      chosen[row.prompt] = row
  return list(chosen.values())


def _maker(config: Config) -> Callable[[int], base.Row]:
  """Problem number i of the whole space, as a row."""
  operands = config.operands
  operators = [(sign, _OPERATORS[sign]) for sign in config.operators]

  def make(index: int) -> base.Row:
    index, b = divmod(index, len(operands))
    which, a = divmod(index, len(operands))
    a, b = operands[a], operands[b]
    sign, apply = operators[which]
    answer = str(apply(a, b))
    return base.Row(f'{a}{sign}{b}=', answer, answer)

  return make
