"""What a sample may draw next: what came last time after the same tokens.

"Last time" is in its prompt, in the completions of its siblings (samples of
the same prompt repeat each other) or earlier in its own. Drafts only decide
how much is verified at once, never what is drawn: a draft is kept as far as it
is what the sampler draws anyway (`Programs.verify`).

Host only; knows tokens, no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_ORDERS = (4, 3, 2)  # tokens that must be the same, the most first
_NEWEST = 0.2  # weight of the newest draft in a group's mean gain


@dataclasses.dataclass(eq=False)
class _Text:
  """A prompt and a sample's tokens as they grow."""

  tokens: list[int]


@dataclasses.dataclass(eq=False)
class _Group:
  """Samples of one prompt."""

  texts: dict[int, _Text]
  # The last tokens seen -> (text, place of the token that came next).
  next: dict[tuple[int, ...], tuple[_Text, int]]
  gain: float = 0.0  # tokens of a draft that were drawn, mean of the last ones
  open: int = 0


class Drafter:
  """Drafts of up to `length` tokens for the samples of running requests."""

  def __init__(self, length: int):
    self._length = length
    self._groups: dict[Any, _Group] = {}

  def begin(
    self, request: Any, prompt: Sequence[int], num_samples: int
  ) -> None:
    """A request was submitted; `request` is its identity."""
    group = self._groups[request] = _Group({}, {}, open=num_samples)
    text = _Text([])
    for token in prompt:
      _append(group, text, token)
    group.texts[-1] = text

  def append(self, request: Any, index: int, token: int) -> None:
    """Sample `index` drew it."""
    group = self._groups[request]
    text = group.texts.get(index)
    if text is None:
      text = group.texts[index] = _Text(list(group.texts[-1].tokens))
    _append(group, text, token)

  def end(self, request: Any) -> None:
    """One of its samples is done; the last one takes the group along."""
    group = self._groups[request]
    group.open -= 1
    if not group.open:
      del self._groups[request]

  def draft(self, request: Any, index: int) -> list[int]:
    """Tokens that may come next; none where nothing is like it."""
    group = self._groups[request]
    tokens = group.texts[index].tokens
    for order in _ORDERS:
      found = group.next.get(tuple(tokens[-order:]))
      if found is not None:
        text, at = found
        return text.tokens[at : at + self._length]
    return []

  def expected(self, request: Any) -> float:
    """Drafted tokens that a sample of it is likely to draw."""
    return self._groups[request].gain

  def judge(
    self, request: Any, draft: Sequence[int], drawn: Sequence[int]
  ) -> None:
    """Learns how good drafts are, whether this one was verified or not."""
    group, same = self._groups[request], 0
    for a, b in zip(draft, drawn):
      if a != b:
        break
      same += 1
    group.gain += _NEWEST * (same - group.gain)


def _append(group: _Group, text: _Text, token: int) -> None:
  """Remembers what `token` came after, and adds it."""
  tokens = text.tokens
  for order in _ORDERS:
    if len(tokens) >= order:
      group.next[tuple(tokens[-order:])] = text, len(tokens)
  tokens.append(token)
