"""Sequences -> packed rows with segment ids; host arrays only.

Letters: B rows, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_jax.types import TrainBatch


@dataclasses.dataclass(frozen=True)
class Item:
  """One sequence, with the advantage and weight of its loss tokens."""

  tokens: np.ndarray  # [T] int32
  loss_mask: np.ndarray  # [T] float32
  behavior_logprobs: np.ndarray  # [T] float32
  kept_logmass: np.ndarray  # [T] float32
  advantage: float
  weight: float


def pack(items: Sequence[Item], row_tokens: int) -> TrainBatch:
  """First-fit, longest first: few rows, and always the same ones.

  Raises:
    ValueError: a sequence is longer than a row.
  """
  order = sorted(range(len(items)), key=lambda i: -len(items[i].tokens))
  rows: list[list[int]] = []
  room: list[int] = []
  for i in order:
    length = len(items[i].tokens)
    if length > row_tokens:
      raise ValueError(
        f'a sequence of {length} tokens does not fit '
        f'learner.row_tokens={row_tokens}; raise it to at least {length}.'
      )
    row = next((r for r, free in enumerate(room) if free >= length), None)
    if row is None:
      row = len(rows)
      rows.append([])
      room.append(row_tokens)
    rows[row].append(i)
    room[row] -= length
  return _fill(items, rows, row_tokens)


def _fill(
  items: Sequence[Item], rows: list[list[int]], row_tokens: int
) -> TrainBatch:
  shape = (len(rows), row_tokens)
  ints = {k: np.zeros(shape, np.int32) for k in _INTS}
  floats = {k: np.zeros(shape, np.float32) for k in _FLOATS}
  for r, members in enumerate(rows):
    begin = 0
    for segment, i in enumerate(members, start=1):
      item = items[i]
      at = (r, slice(begin, begin + len(item.tokens)))
      ints['tokens'][at] = item.tokens
      ints['segment_ids'][at] = segment
      ints['positions'][at] = np.arange(len(item.tokens))
      floats['loss_mask'][at] = item.loss_mask
      floats['loss_weights'][at] = item.loss_mask * item.weight
      floats['advantages'][at] = item.loss_mask * item.advantage
      floats['behavior_logprobs'][at] = item.behavior_logprobs
      floats['kept_logmass'][at] = item.kept_logmass
      begin += len(item.tokens)
  return TrainBatch(**ints, **floats)


_INTS = ('tokens', 'segment_ids', 'positions')
_FLOATS = (
  'loss_mask',
  'loss_weights',
  'advantages',
  'behavior_logprobs',
  'kept_logmass',
)
