"""Batch inference: completions of a file's prompts, one JSON line each.

Prompts are rendered as in training (`config.prompts`: template, system, chat),
completions are drawn as in evaluation (`config.evaluation`: temperature,
samples_per_prompt, ...) from `config.model.source`, or from the newest
checkpoint of a run. What a line holds depends on the row, its number, the
config and the parameters only, so a run that was interrupted goes on where its
file ends, and the file is in the end what it would have been.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rl_jax import config as configs
from rl_jax import parts
from rl_jax.config import Settings
from rl_jax.generator.scheduler import Scheduler
from rl_jax.journal import digest, write_json
from rl_jax.meshes import MeshPlan
from rl_jax.models import weights
from rl_jax.models.base import Model, Params
from rl_jax.prompts import stream
from rl_jax.prompts.tokenizer import Tokenizer, load_tokenizer
from rl_jax.saving import Saves
from rl_jax.types import Completion, Prompt, Request, SamplingParams

# What shapes the output; the generator's sizes only in the last bits.
_SECTIONS = (
  *('seed', 'model', 'prompts'),
  *('sampling', 'evaluation', 'generator'),
)
_WAITING = 4  # rows that wait for slots, in units of what fills all slots
_SECONDS = 5.0  # between two lines of progress


def generate(
  config: Mapping[str, Any],
  prompts: pathlib.Path,
  out: pathlib.Path,
  *,
  column: str = 'prompt',
  workdir: pathlib.Path | None = None,
) -> int:
  """Writes a line for each sample of each row of `prompts`, in order.

  Args:
    config: of a run.
    prompts: JSON lines; other columns are handed on.
    out: made, or gone on with. A line has the row's columns and `row`,
      `sample`, `completion`, `finish_reason`, `num_tokens` and `logprob` (sum
      of the tokens' log-probs under the distribution sampled from); or `row`
      and `error` where a row cannot be completed.
    column: of the prompts.
    workdir: of the run whose newest parameters are taken; by default
      `config.model.source` is.

  Returns:
    How many rows could not be completed, those of earlier calls included.

  Raises:
    ValueError: config, files or workdir do not fit; `out` is of another call.
  """
  _check_files(prompts, out, column)
  s = configs.settings(config)
  tokenizer = load_tokenizer(s.model.tokenizer or s.model.source)
  sampling = s.evaluation.sampling(s.sampling_params(tokenizer.stop_ids))
  model, plan, schedulers, sync = parts.generation(s, tokenizer)
  params = _params(s, model, plan, workdir)
  whole = configs.as_dict(config)
  made_by = {
    'config': {name: whole[name] for name in _SECTIONS},
    'prompts_sha256': hashlib.sha256(prompts.read_bytes()).hexdigest(),
    'column': column,
    'params_sha256': digest(params),
  }
  num_samples = s.evaluation.samples_per_prompt
  with open(out, 'a+', encoding='utf-8') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f'--out={out} is being written by another process.'
      ) from None
    done, failed = _resume(out, made_by, num_samples)
    for scheduler, tree in zip(schedulers, sync.send(params, 0).params):
      scheduler.offer_params(tree, 0)
    batch = _Batch(
      schedulers, s, tokenizer, sampling, column, num_samples, first=done
    )
    for lines in batch.run(_records(prompts)):
      failed += 'error' in lines[0]
      file.write(''.join(json.dumps(line) + '\n' for line in lines))
      file.flush()
  return failed


def _check_files(prompts: pathlib.Path, out: pathlib.Path, column: str) -> None:
  if not prompts.is_file():
    raise ValueError(f'--prompts={prompts}: there is no such file.')
  if not out.parent.is_dir():
    raise ValueError(f'--out={out}: there is no folder {out.parent}.')
  if out.exists() and out.samefile(prompts):
    raise ValueError(f'--out={out} is --prompts; name another file.')
  try:
    first = json.loads(next(_records(prompts), b''))
  except ValueError:
    return  # a bad row, which gets its line
  if isinstance(first, dict) and column not in first:
    raise ValueError(
      f'--prompts={prompts}: no column {column!r}; the first row has '
      f'{", ".join(sorted(first))}. Name one with --column=.'
    )


def _params(
  s: Settings, model: Model, plan: MeshPlan, workdir: pathlib.Path | None
) -> Params:
  learner = parts.rl_learner(s, model, plan)
  if workdir is None:
    if not s.model.source:
      raise ValueError(
        "config.model.source='' starts from random parameters; name the "
        '--workdir of a run of this config, or a model.source.'
      )
    return weights.load(s.model.source, model, learner.param_shardings)
  if not (workdir / 'checkpoints').is_dir():
    raise ValueError(f'--workdir={workdir} has no checkpoints.')
  with Saves(workdir, s.checkpoint) as saves:
    saved = saves.restore('rl', learner.abstract_state())
  if saved is None:
    raise ValueError(f'--workdir={workdir} has no checkpoint of RL yet.')
  return saved.state.params


def _records(path: pathlib.Path) -> Iterator[bytes]:
  with open(path, 'rb') as file:
    yield from (line for line in file if line.strip())


def _resume(
  out: pathlib.Path, made_by: dict[str, Any], num_samples: int
) -> tuple[int, int]:
  """(rows that `out` has whole, how many of them failed); cuts off the rest."""
  about = out.with_name(f'{out.name}.about.json')
  if not out.stat().st_size:
    write_json(about, made_by)
    return 0, 0
  before = json.loads(about.read_text()) if about.exists() else {}
  now = json.loads(json.dumps(made_by))
  changed = [k for k in now if before.get(k) != now[k]]
  if changed:
    raise ValueError(
      f'{out} was made with another {", ".join(changed)} (see {about}); name '
      'another --out, or delete it.'
    )
  rows = failed = end = at = 0
  samples = 0
  with open(out, 'rb') as file:
    for line in file:
      at += len(line)
      try:
        record = json.loads(line) if line.endswith(b'\n') else None
      except ValueError:
        record = None
      if record is None:
        break
      samples += 1
      if 'error' in record or samples == num_samples:
        rows, failed = rows + 1, failed + ('error' in record)
        samples, end = 0, at
  os.truncate(out, end)
  return rows, failed


@dataclasses.dataclass
class _Row:
  """A row on its way: its columns, and its samples or its error."""

  record: dict[str, Any]
  samples: dict[int, Completion] = dataclasses.field(default_factory=dict)
  error: str = ''


class _Batch:
  """Keeps the engines full, and gives rows back in order."""

  def __init__(
    self,
    schedulers: list[Scheduler],
    s: Settings,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    column: str,
    num_samples: int,
    first: int,
  ):
    self._schedulers, self._settings = schedulers, s
    self._tokenizer, self._sampling = tokenizer, sampling
    self._column, self._num_samples = column, num_samples
    self._first = first
    slots = s.generator.num_slots * len(schedulers)
    self._window = max(2, _WAITING * slots // num_samples)

  def run(self, records: Iterator[bytes]) -> Iterator[list[dict[str, Any]]]:
    """The lines of each row from `first` on."""
    rows: dict[int, _Row] = {}
    progress = _Progress(self._first)
    numbered = enumerate(records)
    next_row, more = self._first, True
    while more or rows:
      while more and len(rows) < self._window:
        number, record = next(numbered, (-1, b''))
        more = number >= 0
        if number >= self._first:
          rows[number] = self._begin(number, record)
      for scheduler in self._schedulers:
        for c in scheduler.step() if not scheduler.idle else ():
          rows[c.request.key].samples[c.sample_index] = c
      while next_row in rows and self._ended(rows[next_row]):
        yield self._lines(next_row, rows.pop(next_row))
        next_row += 1
      tokens = sum(x.tokens_generated for x in self._schedulers)
      progress.show(next_row, tokens, last=not (more or rows))

  def _begin(self, number: int, line: bytes) -> _Row:
    """Submits a row; what is wrong with it becomes its result."""
    try:
      record = json.loads(line)
    except ValueError as e:
      return _Row({}, error=f'not JSON in UTF-8: {e}')
    if not isinstance(record, dict):
      return _Row({}, error=f'must be an object, not {record!r:.80}')
    text = record.get(self._column)
    if not isinstance(text, str) or not text:
      return _Row(
        record,
        error=f'column {self._column!r} must be a non-empty string, not '
        f'{text!r:.80}',
      )
    prompts = self._settings.prompts
    try:
      text = stream.render(text, prompts, self._tokenizer)
      tokens = self._tokenizer.encode(text)
      if len(tokens) > prompts.max_prompt_tokens:
        raise ValueError(
          f'{len(tokens)} tokens, more than prompts.max_prompt_tokens='
          f'{prompts.max_prompt_tokens}'
        )
      prompt = Prompt(number, f'row {number}', text, tokens, None)
      request = Request(
        prompt, self._num_samples, self._sampling, step=0, key=number
      )
      self._schedulers[number % len(self._schedulers)].submit(request)
    except ValueError as e:  # tokeniser, template and scheduler say what
      return _Row(record, error=str(e))
    return _Row(record)

  def _ended(self, row: _Row) -> bool:
    return bool(row.error) or len(row.samples) == self._num_samples

  def _lines(self, number: int, row: _Row) -> list[dict[str, Any]]:
    if row.error:
      return [{**row.record, 'row': number, 'error': row.error}]
    lines = []
    for index, c in sorted(row.samples.items()):
      line = {
        **row.record,
        'row': number,
        'sample': index,
        'completion': c.text(self._tokenizer.decode),
        'finish_reason': c.finish_reason,
        'num_tokens': len(c.tokens),
        'logprob': float(c.behavior_logprobs.sum(dtype='float64')),
      }
      if self._settings.generator.top_logprobs:
        line['top_logprobs'] = c.likeliest
      lines.append(line)
    return lines


class _Progress:
  """A line on stderr every few seconds."""

  def __init__(self, rows: int):
    self._begin = self._shown = time.monotonic()
    self._rows = rows

  def show(self, rows: int, tokens: int, *, last: bool) -> None:
    now = time.monotonic()
    if now - self._shown < _SECONDS and not last:
      return
    self._shown = now
    seconds = max(now - self._begin, 1e-9)
    print(
      f'{rows} rows, {rows - self._rows} of them now  '
      f'{tokens / seconds:,.0f} tok/s  {seconds:.0f} s',
      file=sys.stderr,
      flush=True,
    )
