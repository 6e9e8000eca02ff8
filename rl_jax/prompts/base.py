"""What a source yields: a question and the answer to verify against.

Also which half of a procedural source a problem belongs to. That is decided
by the problem itself and not by a seed: two seeds draw the same problem sooner
or later, and then evaluation measures memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

SPLITS = ('train', 'heldout')


@dataclasses.dataclass(frozen=True)
class Row:
  """One problem. `prompt` is a user message, or the raw text to complete
  where the config has no chat template; `answer` goes to the verifier and
  must be JSON-serialisable; `solution` is a completion to imitate (SFT),
  empty where the source has none.

  Example: Row(prompt='1+2=', answer='3', solution='3')
  """

  prompt: str
  answer: Any
  solution: str = ''


def in_split(problem: str, split: str, heldout_fraction: float) -> bool:
  """Whether `problem` belongs to `split`, 'train' or 'heldout'.

  The same on every machine and Python version. The two splits are disjoint
  if both are made with the same `heldout_fraction`.
  """
  digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
  held_out = int.from_bytes(digest, 'big') < heldout_fraction * 2**64
  return held_out == (split == 'heldout')


def check_split(split: str, heldout_fraction: float) -> None:
  """ValueError unless `in_split` can be asked with these settings."""
  if split not in SPLITS:
    raise ValueError(f'{split=}: must be one of {", ".join(SPLITS)}.')
  if not 0 <= heldout_fraction < 1:
    raise ValueError(f'{heldout_fraction=}: must be in [0, 1).')
  if split == 'heldout' and heldout_fraction == 0:
    raise ValueError(
      f'{split=} with {heldout_fraction=} has no problems; set the fraction '
      'above 0, to the same value for both splits.'
    )
