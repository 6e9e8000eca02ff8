"""Rows from a JSON-lines file, one object a line, plain or gzipped.

Knows columns; knows no verifier: an answer is handed on as it stands. Lines
end at the line feed only, since U+2028, U+0085 and others that
`str.splitlines` cuts at may stand in a JSON string.

GSM8K: `dict(name='jsonl', path='gsm8k_train.jsonl', prompt='question',
solution='answer')`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Any

from rl_jax.prompts.base import Row


@dataclasses.dataclass(frozen=True)
class Config:
  path: str  # `~` and environment variables are expanded
  prompt: str = 'prompt'  # column of the question
  answer: str = 'answer'  # column of what the verifier is given
  solution: str = ''  # column of a completion to imitate, '' for none
  limit: int = 0  # only the first rows, 0 for all

  def __post_init__(self):
    if self.limit < 0:
      raise ValueError(
        f'limit={self.limit!r}: must be >= 0 (0 takes all rows).'
      )


def rows(config: Config) -> Sequence[Row]:
  """Every row of the file, checked.

  Raises:
    ValueError: no such file, or 'file:line: what is wrong'.
  """
  path = pathlib.Path(os.path.expanduser(os.path.expandvars(config.path)))
  try:
    data = path.read_bytes()
    if path.suffix == '.gz':
      data = gzip.decompress(data)
  except FileNotFoundError:
    raise ValueError(
      f'path={config.path!r}: there is no file {path}.'
    ) from None
  except (OSError, EOFError, zlib.error) as e:
    raise ValueError(
      f'path={config.path!r}: cannot read the file {path}: {e}'
    ) from e
  result = []
  for number, line in enumerate(data.split(b'\n'), start=1):
    if config.limit and len(result) == config.limit:
      break
    if line.strip():
      result.append(_row(line, config, f'{path}:{number}'))
  return result


def _row(line: bytes, config: Config, where: str) -> Row:
  try:
    record = json.loads(line.decode('utf-8'), object_pairs_hook=_object)
  # Of the encoding, of the JSON, or nested too deep.
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{where}: not JSON in UTF-8: {e}') from e
  if not isinstance(record, dict):
    raise ValueError(f'{where}: must be an object, not {record!r:.80}.')
  answer = _column(record, config.answer, where)
  if answer is None or answer in ([], {}) or _blank(answer):
    raise ValueError(
      f'{where}: column {config.answer!r} is {answer!r}: nothing to verify '
      'against; remove the row or name another column.'
    )
  return Row(
    prompt=_text(record, config.prompt, where),
    answer=answer,
    solution=_text(record, config.solution, where) if config.solution else '',
  )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  record = dict(pairs)
  if len(record) < len(pairs):
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    raise ValueError(f'an object has {twice} more than once')
  return record


def _column(record: dict[str, Any], column: str, where: str) -> Any:
  if column not in record:
    raise ValueError(
      f'{where}: no column {column!r}; it has {", ".join(sorted(record))}.'
    )
  return record[column]


def _text(record: dict[str, Any], column: str, where: str) -> str:
  value = _column(record, column, where)
  if type(value) is int:
    return str(value)
  if not isinstance(value, str) or not value:
    raise ValueError(
      f'{where}: column {column!r} must be a non-empty string or an int, not '
      f'{value!r:.80}.'
    )
  if re.search('[\ud800-\udfff]', value):
    raise ValueError(
      f'{where}: column {column!r} has half of a surrogate pair, which no '
      'tokeniser takes.'
    )
  return value


def _blank(value: Any) -> bool:
  return isinstance(value, str) and not value.strip()
