"""What a source yields: a question and the answer to verify against."""

from __future__ import annotations

import dataclasses
from typing import Any


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
