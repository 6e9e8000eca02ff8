"""Sources -> one endless, shuffled, resumable stream of `types.Prompt`.

Knows rows, weights and tokenised lengths; knows no verifier, no model and no
step. Built on random access by `grain.MapDataset`: draw number n is a pure
function of the data, the config and n, so that all there is to save is how
many prompts were drawn. What that number means is guarded by a fingerprint
over everything that shapes the stream.

  rows -> drop what is too long -> shuffle (anew each epoch) -> repeat -> mix
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

from rl_jax import resolve, types
from rl_jax.prompts.base import Row
from rl_jax.prompts.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_SLOT = '{prompt}'
_CHUNK = 4096  # rows tokenised at once: bounds memory


@dataclasses.dataclass(frozen=True)
class Config:
  seed: int = 0  # of the order, besides the run's seed; of the held-out set
  max_prompt_tokens: int = 128  # after the chat template; longer are dropped
  chat: bool = False  # render by the tokeniser's chat template
  system: str = ''  # system message; needs chat
  template: str = _SLOT  # what stands around a row's prompt
  # label -> dict(name=source, weight=1.0, ...the source's keys)
  train: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # label -> dict(name=source, ...the source's keys)
  heldout: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.max_prompt_tokens < 1:
      raise ValueError(
        f'prompts.max_prompt_tokens={self.max_prompt_tokens!r}: must be >= 1.'
      )
    if _SLOT not in self.template:
      raise ValueError(
        f'prompts.template={self.template!r}: must contain {_SLOT}, where '
        'the prompt of a row goes.'
      )
    if self.system and not self.chat:
      raise ValueError(
        f'prompts.system={self.system!r} needs chat=True; without a chat '
        'template, write it into prompts.template.'
      )
    for where in ('train', 'heldout'):
      for label, entry in getattr(self, where).items():
        if not isinstance(entry, Mapping):
          raise ValueError(
            f'prompts.{where}.{label}={entry!r}: every source needs a label, '
            f'as in {where}=dict(mine=dict({label}={entry!r}, ...)).'
          )


class PromptStream:
  """The training prompts, for ever; two equal streams draw the same.

  Attributes:
    report: label -> {'rows': read, 'dropped': too long, 'longest': tokens}.
  """

  def __init__(
    self,
    sources: Mapping[str, Mapping[str, Any]],
    config: Config,
    tokenizer: Tokenizer,
    *,
    seed: int,
  ):
    """Loads and checks every row.

    Args:
      sources: label -> entry, as `config.train`.
      config: how rows become prompts.
      tokenizer: of the policy.
      seed: of the run; with `config.seed` it decides the order.

    Raises:
      ValueError: a bad entry, a bad row, or a source without usable rows.
    """
    self._config, self._tokenizer = config, tokenizer
    weights = {label: _weight(label, sources[label]) for label in sources}
    entries = {label: _without_weight(sources[label]) for label in sources}
    self._loaded = _load(entries, 'prompts.train', config, tokenizer)
    self.report = {s.label: s.report for s in self._loaded}
    self._draws: Any = grain.MapDataset.mix(
      [
        grain.MapDataset.source(s.keys)
        .shuffle(seed=_seed(config.seed, seed, s.label))
        .repeat()
        for s in self._loaded
      ],
      [weights[s.label] for s in self._loaded],
    )
    self._fingerprint = _digest(
      [
        *(config.seed, config.max_prompt_tokens),
        *(config.chat, config.system, config.template, seed),
        *((s.label, weights[s.label], s.digest) for s in self._loaded),
      ]
    )
    self._num_drawn = 0

  def take(self, n: int) -> list[types.Prompt]:
    """The next `n` prompts; goes on into the next epoch, shuffled anew."""
    first, self._num_drawn = self._num_drawn, self._num_drawn + n
    keys = [self._draws[i] for i in range(first, self._num_drawn)]
    return _prompts(keys, first, self._loaded, self._config, self._tokenizer)

  def answers(self) -> list[tuple[str, Any]]:
    """(row, gold answer) of every row that may be drawn."""
    return [
      (f'{label}/{i}', source.rows[i].answer)
      for source in self._loaded
      for label, i in source.keys
    ]

  def check_solutions(self, row_tokens: int) -> None:
    """Proves that SFT can imitate every row.

    Raises:
      ValueError: a row without solution, with one that the tokeniser cannot
        spell, or that is longer than `row_tokens` with its prompt.
    """
    for source in self._loaded:
      for start in range(0, len(source.keys), _CHUNK):
        indices = [i for _, i in source.keys[start : start + _CHUNK]]
        for i in indices:
          if not source.rows[i].solution:
            raise ValueError(
              f'prompts.train.{source.label}: row {i} has no solution to '
              'imitate; set sft.num_steps=0, or have the source give solutions '
              '(of jsonl: name their column).'
            )
        for i, solution in zip(indices, self._solutions(source, indices)):
          length = source.lengths[i] + len(solution)
          if length > row_tokens:
            raise ValueError(
              f'prompts.train.{source.label}: row {i} has {length} tokens with '
              f'its solution, learner.row_tokens={row_tokens}: raise it, or '
              'take the row out.'
            )

  def solution(self, prompt: types.Prompt) -> np.ndarray:
    """[T] int32, the completion to imitate for `prompt`, with its stop."""
    label, _, index = prompt.row.rpartition('/')
    source = next(s for s in self._loaded if s.label == label)
    return self._solutions(source, [int(index)])[0]

  def _solutions(
    self, source: _Source, indices: Sequence[int]
  ) -> list[np.ndarray]:
    texts = [source.rows[i].solution for i in indices]
    stop = np.int32(self._tokenizer.stop_ids[0])
    tokens = self._tokenizer.encode_batch(texts, continues=True)
    return [np.append(ids, stop) for ids in tokens]

  def get_state(self) -> dict[str, Any]:
    """JSON-serialisable; everything that `set_state` needs."""
    return {'num_drawn': self._num_drawn, 'fingerprint': self._fingerprint}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where the stream that gave `state` stood.

    Raises:
      ValueError: the data or the settings that shape the stream changed.
    """
    if state['fingerprint'] != self._fingerprint:
      raise ValueError(
        f'the prompts changed: this stream is {self._fingerprint}, the saved '
        f'one {state["fingerprint"]}, so draw {state["num_drawn"]} would be '
        'another row. Restore the data files, the prompts.* settings, the '
        'tokeniser and the seed of the saved run, or start a new run from its '
        'parameters.'
      )
    self._num_drawn = state['num_drawn']


def heldout_prompts(
  sources: Mapping[str, Mapping[str, Any]],
  config: Config,
  tokenizer: Tokenizer,
  n: int,
) -> tuple[list[types.Prompt], str]:
  """A fixed evaluation set: `n` rows of `sources`, none twice, shuffled.

  Depends on `config.seed`, not on the run's seed. Gives all rows, and logs a
  warning, where there are fewer than `n`; warns too where a row is also in
  `config.train`.

  Returns:
    The prompts, and a fingerprint of what they were taken from; `n` does not
    change it.
  """
  if n < 1:
    raise ValueError(f'{n=}: must be >= 1.')
  loaded = _load(sources, 'prompts.heldout', config, tokenizer)
  keys = [key for source in loaded for key in source.keys]
  if dropped := sum(source.report['dropped'] for source in loaded):
    _log.warning(
      'prompts.heldout: %d rows are too long to be asked, so pass@k is that of '
      'the other %d; raise prompts.max_prompt_tokens to count them.',
      dropped,
      len(keys),
    )
  if n > len(keys):
    _log.warning(
      'prompts.heldout: %d prompts asked for, only %d exist.', n, len(keys)
    )
  order: Any = grain.MapDataset.source(keys).shuffle(
    seed=_seed(config.seed, 'heldout')
  )
  keys = [order[i] for i in range(min(n, len(keys)))]
  prompts = _prompts(keys, 0, loaded, config, tokenizer)
  _warn_of_overlap(keys, loaded, config)
  return prompts, _digest([config.seed, *((s.label, s.digest) for s in loaded)])


@dataclasses.dataclass(frozen=True)
class _Source:
  """The rows of one entry and which of them are short enough."""

  label: str
  rows: Sequence[Row]
  keys: list[tuple[str, int]]  # (label, row number) of the rows kept
  lengths: Sequence[int]  # tokens of the prompt of each row
  report: dict[str, int]
  digest: str  # of the rows, as rendered and tokenised


def _load(
  entries: Mapping[str, Mapping[str, Any]],
  where: str,
  config: Config,
  tokenizer: Tokenizer,
) -> list[_Source]:
  """In the order of the labels, since that of a config may change."""
  if not entries:
    raise ValueError(
      f"{where} names no source; add one such as {where}.sums = dict(name='"
      "arithmetic')."
    )
  return [
    _load_source(label, entries[label], f'{where}.{label}', config, tokenizer)
    for label in sorted(entries)
  ]


def _load_source(
  label: str,
  entry: Mapping[str, Any],
  where: str,
  config: Config,
  tokenizer: Tokenizer,
) -> _Source:
  rows = _rows(entry, where)
  lengths: list[int] = []
  digest = hashlib.sha256()
  for start in range(0, len(rows), _CHUNK):
    chunk = [rows[i] for i in range(start, min(start + _CHUNK, len(rows)))]
    for i, row in enumerate(chunk, start):
      _check_row(row, i, where)
    texts = [render(row.prompt, config, tokenizer) for row in chunk]
    tokens = _encoded(texts, start, where, tokenizer)
    lengths += [len(t) for t in tokens]
    facts = [(t, r.answer, r.solution) for t, r in zip(texts, chunk)]
    digest.update(_serialised(facts, where))
    digest.update(np.concatenate(tokens).tobytes())
  kept = [i for i, n in enumerate(lengths) if 0 < n <= config.max_prompt_tokens]
  report = {
    'rows': len(rows),
    'dropped': len(rows) - len(kept),
    'longest': max(lengths, default=0),
  }
  _tell(report, where, config)
  return _Source(
    label,
    rows,
    [(label, i) for i in kept],
    lengths,
    report,
    digest.hexdigest(),
  )


def _encoded(
  texts: list[str], first: int, where: str, tokenizer: Tokenizer
) -> list[np.ndarray]:
  try:
    return tokenizer.encode_batch(texts)
  except ValueError:
    for i, text in enumerate(texts, first):  # which of them was it?
      try:
        tokenizer.encode(text)
      except ValueError as e:
        raise ValueError(f'{where}: row {i}: {e}') from e
    raise


def _rows(entry: Mapping[str, Any], where: str) -> Sequence[Row]:
  if not isinstance(entry.get('name'), str):
    raise ValueError(f'{where}: has no name; set it to the name of a source.')
  source = resolve.plugin('prompts', entry['name'])
  keys = {key: value for key, value in entry.items() if key != 'name'}
  try:
    return source.rows(resolve.settings(source.Config, keys, where))
  except ValueError as e:  # a source does not know by which name it is called
    named = where in str(e)
    raise ValueError(str(e) if named else f'{where}: {e}') from e


def _check_row(row: Row, i: int, where: str) -> None:
  if not isinstance(row.prompt, str) or not row.prompt:
    raise ValueError(f'{where}: row {i}: prompt {row.prompt!r} must be a text.')
  answer = row.answer.strip() if isinstance(row.answer, str) else row.answer
  if answer is None or answer in ('', [], {}):
    raise ValueError(
      f'{where}: row {i} ({row.prompt!r:.80}): the answer is {row.answer!r}: '
      'there is nothing to verify against; correct or remove the row.'
    )


def _serialised(facts: list[Any], where: str) -> bytes:
  try:
    return json.dumps(facts, sort_keys=True).encode()
  except TypeError as e:
    raise ValueError(f'{where}: an answer is not plain JSON: {e}') from e


def _tell(report: Mapping[str, int], where: str, config: Config) -> None:
  limit = f'max_prompt_tokens={config.max_prompt_tokens}'
  if not report['rows']:
    raise ValueError(f'{where}: the source has no rows; check its keys.')
  if report['dropped'] == report['rows']:
    raise ValueError(
      f'{where}: no prompt is left of {report["rows"]} rows: the longest has '
      f'{report["longest"]} tokens, {limit}. Raise prompts.max_prompt_tokens '
      'or check the source.'
    )
  _log.info(
    '%s: %d rows, the longest of %d tokens; %d dropped (tokens > %s).',
    where,
    report['rows'],
    report['longest'],
    report['dropped'],
    limit,
  )


def _weight(label: str, entry: Mapping[str, Any]) -> float:
  weight = entry.get('weight', 1.0)
  number = isinstance(weight, int | float) and not isinstance(weight, bool)
  if not number or not 1e-6 <= weight <= 1e6:  # grain counts in integers
    raise ValueError(
      f'prompts.train.{label}.{weight=}: must be a number from 1e-6 to 1e6, '
      'this source in proportion to the others; remove the entry to leave the '
      'source out.'
    )
  return float(weight)


def _without_weight(entry: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in entry.items() if key != 'weight'}


def render(prompt: str, config: Config, tokenizer: Tokenizer) -> str:
  """A row's prompt as the policy sees it: template, then chat template."""
  text = config.template.replace(_SLOT, prompt)
  if not config.chat:
    return text
  messages = [{'role': 'user', 'content': text}]
  if config.system:
    messages.insert(0, {'role': 'system', 'content': config.system})
  return tokenizer.render(messages)


def _prompts(
  keys: Sequence[tuple[str, int]],
  first_id: int,
  loaded: Sequence[_Source],
  config: Config,
  tokenizer: Tokenizer,
) -> list[types.Prompt]:
  """The prompts of `keys`, numbered from `first_id`."""
  rows_of = {source.label: source.rows for source in loaded}
  rows = [rows_of[label][i] for label, i in keys]
  texts = [render(row.prompt, config, tokenizer) for row in rows]
  return [
    types.Prompt(first_id + n, f'{label}/{i}', text, tokens, row.answer)
    for n, ((label, i), row, text, tokens) in enumerate(
      zip(keys, rows, texts, tokenizer.encode_batch(texts))
    )
  ]


def _warn_of_overlap(
  keys: Sequence[tuple[str, int]], loaded: Sequence[_Source], config: Config
) -> None:
  rows_of = {source.label: source.rows for source in loaded}
  heldout = {rows_of[label][i].prompt for label, i in keys}
  for label, entry in config.train.items():
    where = f'prompts.train.{label}'
    shared = heldout & {r.prompt for r in _rows(_without_weight(entry), where)}
    if shared:
      _log.warning(
        '%d of %d held-out prompts are also in %s, such as %r: evaluation '
        'measures memory there.',
        len(shared),
        len(heldout),
        where,
        min(shared),
      )


def _seed(*parts: int | str) -> int:
  """32 bits, so that neighbouring seeds and labels give unlike orders."""
  return int(_digest(list(parts))[:8], 16)


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
