"""The account of a run: what it did, where its time and tokens went.

Owns the files of a workdir but the checkpoints: `config.json`,
`metrics.jsonl`, `rollouts.jsonl`, `tensorboard/`, `summary.json`; prints the
live line. Knows records and numbers, drives nothing.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rl_jax.algorithms.base import Selection
from rl_jax.evaluate import EvalResult
from rl_jax.metrics import (
  MetricsWriter,
  Timeline,
  TokenLedger,
  seconds_between,
)
from rl_jax.models.base import Params
from rl_jax.rollout.worker import LANE as GENERATION
from rl_jax.sync.single_process import Sent
from rl_jax.types import STATUSES, Group

TRAINING = 'training'
# A resumed run may change these; anything else would be another run.
_CHANGEABLE = ('num_steps', 'checkpoint', 'evaluation', 'service')
_TRUNCATION_ALARM = 0.5
_ERROR_ALARM = 0.05
_EMPTY_ALARM = 0.5
_SAME_ALARM = 0.9  # over no fewer prompts than
_SAME_PROMPTS = 4
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain')


class _Compilations:
  """Counts what XLA compiles in this process from its making on."""

  def __init__(self):
    self.count = 0
    jax.monitoring.register_event_duration_secs_listener(self._event)

  def _event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
    del duration_secs, kwargs
    self.count += event == '/jax/core/compile/backend_compile_duration'

  def close(self) -> None:
    jax.monitoring.unregister_event_duration_listener(self._event)


class Journal:
  """One run's account; `saved` is the `state()` of the run it resumes."""

  def __init__(
    self,
    workdir: pathlib.Path,
    config: dict[str, Any],
    saved: Mapping[str, Any] | None,
    heldout: str,
  ):
    """Opens the files of the workdir, or makes them.

    Args:
      workdir: of the run.
      config: of the run.
      saved: `state()` of the run that is resumed.
      heldout: fingerprint of what the held-out prompts are taken from.

    Raises:
      ValueError: the workdir holds a run of another config, or one that was
        evaluated on other prompts.
    """
    self.workdir = workdir
    check_config(workdir, config)
    saved = saved or {}
    if saved.get('heldout', heldout) != heldout:
      raise ValueError(
        f'the held-out prompts changed since {workdir} was saved, so its '
        'evaluations before and after would not compare. Restore the files of '
        'prompts.heldout, or use another --workdir.'
      )
    self._heldout = heldout
    versions = _versions()
    changed = {
      name: f'{old} -> {versions[name]}'
      for name, old in saved.get('versions', {}).items()
      if versions.get(name) != old
    }
    if changed:
      self.say(
        f'WARNING: saved by other versions, so not bit by bit: {changed}'
      )
    self._writer = MetricsWriter(workdir, saved.get('cursor'))
    (workdir / 'summary.json').unlink(missing_ok=True)  # of an end before
    write_json(workdir / 'config.json', config)
    self._config = config
    self.timeline = Timeline((GENERATION, TRAINING), saved.get('seconds'))
    self.ledger = TokenLedger.from_state(
      saved.get('ledger', TokenLedger().state())
    )
    self.evaluations: dict[str, Any] = dict(saved.get('evaluations', {}))
    self.parity: dict[str, Any] = {}
    self._synced = dict(
      saved.get('synced', {'count': 0, 'bytes': 0, 'seconds': 0.0})
    )
    self._compilations = _Compilations()
    self._step_begins()
    self._step_seconds: collections.deque[float] = collections.deque(maxlen=16)
    self._compiled = False
    self._alarmed: set[str] = set()

  def __enter__(self) -> Journal:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self._compilations.close()
    self._writer.close()

  def state(self) -> dict[str, Any]:
    """For a checkpoint; JSON-able."""
    return {
      'cursor': self._writer.cursor(),
      'heldout': self._heldout,
      'versions': _versions(),
      'seconds': self.timeline.seconds(),
      'ledger': self.ledger.state(),
      'evaluations': self.evaluations,
      'synced': self._synced,
    }

  def say(self, message: str) -> None:
    print(message, flush=True)

  @contextlib.contextmanager
  def training(self, state: str) -> Iterator[None]:
    """Puts the training sub-mesh in `state` meanwhile."""
    with self.timeline.state(TRAINING, state):
      yield

  # ---- what happened

  def synced(self, sent: Sent) -> None:
    self._synced['count'] += 1
    self._synced['bytes'] += sent.num_bytes
    self._synced['seconds'] += sent.seconds

  def evaluated(
    self, name: str, step: int, result: EvalResult, groups: Sequence[Group]
  ) -> None:
    self.ledger.consumed(_tokens(groups), 'evaluation')
    values = result.as_dict()
    self.evaluations[name] = {
      'step': step,
      **values,
      'config': _json(self._config['evaluation']),
    }
    phase = 'sft' if name == 'before_sft' else 'rl'
    scalars = {f'evaluation/{k}': v for k, v in values.items()}
    self._writer.scalars(step, scalars, phase)
    self._writer.text(
      step, f'evaluation/{name}', _sample_text(groups[0]), phase
    )
    self._step_begins()
    self.say(
      f'evaluation {name}: pass@1 {values["pass_at_1"]:.3f} '
      f'[{values["low"]:.3f}, {values["high"]:.3f}] on {values["n"]} prompts '
      f'({values["lenient_pass_at_1"]:.3f} with any format), '
      f'{values["truncation_rate"]:.0%} truncated, '
      f'{values["error_rate"]:.0%} without verdict'
    )

  def has_evaluated(self, name: str, step: int) -> bool:
    """Whether the run that this one resumes has done it, and just so."""
    done = self.evaluations.get(name, {})
    asked = _json(self._config['evaluation'])
    return done.get('step') == step and done.get('config') == asked

  def gated(
    self, difference: np.ndarray, layers: np.ndarray, groups: Sequence[Group]
  ) -> None:
    """Generator and learner were compared.

    Args:
      difference: of each token's log-prob.
      layers: relative error of each layer, where the generator is quantised.
      groups: that were drawn for it.
    """
    self.ledger.consumed(_tokens(groups), 'gate')
    self.parity = {
      'max': float(difference.max()),
      'mean': float(difference.mean()),
      'num_tokens': len(difference),
      **({'drift_by_layer': layers.tolist()} if len(layers) else {}),
    }
    self.say(
      f'parity of generator and learner: |log-prob difference| max '
      f'{self.parity["max"]:.2e}, mean {self.parity["mean"]:.2e} over '
      f'{len(difference)} tokens'
    )
    if len(layers):
      self.say(
        f'drift of the quantised layers: {layers[0]:.1%} in the first, '
        f'{layers.max():.1%} at most (layer {layers.argmax()}), '
        f'{layers[-1]:.1%} in the last'
      )

  def imitated(self, step: int, num_steps: int, metrics: Mapping[str, float]):
    """An SFT step."""
    scalars = {f'sft/{k}': v for k, v in metrics.items()}
    self._writer.scalars(step, scalars, 'sft')
    if (step + 1) % 20 == 0 or step + 1 == num_steps:
      self.say(f'sft {step + 1}/{num_steps}  loss {metrics["loss"]:.3f}')

  def trained(
    self,
    step: int,
    num_steps: int,
    groups: Sequence[Group],
    selection: Selection,
    metrics: Mapping[str, float],
  ) -> None:
    """A learner step, from its rollouts to the sync after it."""
    self._book(selection)
    values = rollout_metrics(groups, step)
    values |= {
      'groups_with_signal': selection.num_groups,
      'skipped_update': float(not selection.scored),
      **{f'excluded/{k}': len(v) for k, v in selection.excluded.items()},
      **{f'update/{k}': v for k, v in metrics.items()},
    }
    values |= self._speed()
    self._writer.scalars(step, values)
    advantages = {id(s.rollout): s.advantage for s in selection.scored}
    self._writer.rollouts(step, groups, advantages)
    self._writer.text(step, 'rollout', _sample_text(groups[0]))
    self._print_line(step, num_steps, values)
    self._alarm(values, groups)

  def _book(self, selection: Selection) -> None:
    self.ledger.consumed(
      sum(s.rollout.num_completion_tokens for s in selection.scored), 'update'
    )
    for reason, rollouts in selection.excluded.items():
      tokens = sum(r.num_completion_tokens for r in rollouts)
      if tokens:
        self.ledger.dropped(tokens, reason)

  def _step_begins(self) -> None:
    self._since = self.timeline.seconds()
    self._generated = self.ledger.state()['generated']
    self._compiled_before = self._compilations.count

  def _speed(self) -> dict[str, float]:
    """Seconds, tokens, compilations since the last step or evaluation."""
    since, before = self._since, self._generated
    compiled_before = self._compiled_before
    self._step_begins()
    spent = seconds_between(since, self._since)
    wall = sum(spent[TRAINING].values())
    busy = {
      GENERATION: spent[GENERATION].get('generate', 0.0),
      TRAINING: spent[TRAINING].get('update', 0.0),
    }
    return {
      'seconds/step': wall,
      **{
        f'seconds/{lane}/{name}': s
        for lane, states in spent.items()
        for name, s in states.items()
      },
      **{
        f'utilisation/{lane}': s / max(wall, 1e-9) for lane, s in busy.items()
      },
      'tokens_per_second': (self._generated - before) / max(wall, 1e-9),
      'compilations': self._compiled_before - compiled_before,
    }

  def _print_line(
    self, step: int, num_steps: int, v: Mapping[str, float]
  ) -> None:
    # The first step of a process compiles, and foretells nothing.
    if self._compiled:
      self._step_seconds.append(v['seconds/step'])
    self._compiled = True
    eta = '?'
    if self._step_seconds:
      left = (num_steps - step - 1) * statistics.fmean(self._step_seconds)
      eta = str(datetime.timedelta(seconds=round(left)))
    self.say(
      f'step {step + 1:>4}/{num_steps}  reward {v["reward"]:.3f}  '
      f'pass@1 {v["pass_at_1"]:.3f}  len {v["completion_tokens"]:.1f}  '
      f'{v["tokens_per_second"]:,.0f} tok/s  '
      f'gen {v["utilisation/generation"]:.0%}  '
      f'learn {v.get("seconds/training/update", 0.0):.2f}s  '
      f'eta {eta}'
      + ('  (no signal: update skipped)' if v['skipped_update'] else '')
    )

  def _alarm(
    self, values: Mapping[str, float], groups: Sequence[Group]
  ) -> None:
    if values['truncated_frac'] >= _TRUNCATION_ALARM:
      self._warn(
        'truncated',
        f'{values["truncated_frac"]:.0%} of the completions were cut at '
        'sampling.max_tokens; raise it, or see algorithm.truncated.',
      )
    if values['verdict/error'] >= _ERROR_ALARM:
      verdicts = [r.verdict for g in groups for r in g.rollouts]
      reason = next(v.reason for v in verdicts if v.status == 'error')
      self._warn(
        'error',
        f'{values["verdict/error"]:.0%} of the completions could not be '
        f'verified and leave the loss; the first: {reason}',
      )
    # Signs of a policy that has collapsed; reward alone may hide them.
    if values['empty_frac'] >= _EMPTY_ALARM:
      self._warn(
        'empty',
        f'{values["empty_frac"]:.0%} of the completions are empty; look at '
        'rollouts.jsonl. The policy may have collapsed: lower '
        'optimizer.learning_rate, or raise sampling.min_tokens.',
      )
    if values['same_frac'] >= _SAME_ALARM and len(groups) >= _SAME_PROMPTS:
      self._warn(
        'same',
        f'{values["same_frac"]:.0%} of the completions of {len(groups)} '
        'prompts are one text; look at rollouts.jsonl. The policy may have '
        'collapsed: lower optimizer.learning_rate, or raise '
        'algorithm.kl_coef.',
      )

  def _warn(self, kind: str, message: str) -> None:
    """Once for each kind."""
    if kind not in self._alarmed:
      self._alarmed.add(kind)
      self.say(f'WARNING: {message}')

  # ---- the end

  def summarise(self, params: Params, plan: str) -> dict[str, Any]:
    """Writes `summary.json`, prints it for people, and returns it."""
    seconds = self.timeline.seconds()
    summary = {
      'evaluation': self.evaluations,
      'wall_seconds': sum(seconds[TRAINING].values()),
      'seconds': seconds,
      'tokens': self.ledger.as_dict(),
      'parity': self.parity,
      'sync': self._synced,
      'params_sha256': digest(params),
      'mesh': plan,
      'versions': _versions(),
      'hardware': _hardware(),
      'command': sys.argv,
      'finished': datetime.datetime.now(datetime.UTC).isoformat(),
    }
    write_json(self.workdir / 'summary.json', summary)
    self.say(summary_text(summary, self.workdir))
    return summary


def rollout_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
  """What the rollouts of a step look like."""
  rollouts = [r for g in groups for r in g.rollouts]
  scored = [r.verdict.score for r in rollouts if r.verdict.scored]
  lengths = np.array([r.num_completion_tokens for r in rollouts])
  staleness = [step - g.oldest_version for g in groups]
  status = [r.verdict.status for r in rollouts]
  texts = [r.text.strip() for r in rollouts]
  return {
    'reward': float(np.mean(scored)) if scored else math.nan,
    'pass_at_1': status.count('pass') / len(status),
    'completion_tokens': float(lengths.mean()),
    'completion_tokens_max': float(lengths.max()),
    'truncated_frac': float(
      np.mean([r.finish_reason == 'length' for r in rollouts])
    ),
    'empty_frac': texts.count('') / len(texts),
    'same_frac': max(collections.Counter(texts).values()) / len(texts),
    'staleness': float(np.mean(staleness)),
    'staleness_max': float(max(staleness)),
    **{f'verdict/{s}': status.count(s) / len(status) for s in STATUSES},
  }


def check_config(workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
  """ValueError if the workdir holds a run that this config cannot resume."""
  path = workdir / 'config.json'
  if not path.exists():
    if any((workdir / 'checkpoints').glob('*/*')):
      raise ValueError(
        f'{workdir} has checkpoints but no config.json that says of which '
        'run. Put it back, use another --workdir, or delete this one.'
      )
    return
  old, new = _flat(_read_json(path)), _flat(_json(config))
  changed = [
    f'{key}: {old.get(key)!r} -> {new.get(key)!r}'
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key) and key.split('.')[0] not in _CHANGEABLE
  ]
  if changed:
    raise ValueError(
      f'{workdir} holds a run of another config ({"; ".join(changed)}). Use '
      'another --workdir, or delete this one. A resumed run may change '
      f'{", ".join(_CHANGEABLE)} only.'
    )
  decay = new.get('optimizer.decay', 'constant')
  if decay != 'constant' and old.get('num_steps') != new.get('num_steps'):
    raise ValueError(
      f'num_steps: {old.get("num_steps")} -> {new.get("num_steps")}: with '
      f'optimizer.decay={decay!r} the steps done had the learning rates of a '
      'run of the old length. Keep num_steps, or use another --workdir.'
    )


def finished(
  workdir: pathlib.Path, config: Mapping[str, Any]
) -> dict[str, Any] | None:
  """The summary of this very run, if the workdir holds its end."""
  paths = workdir / 'summary.json', workdir / 'config.json'
  if not all(path.exists() for path in paths):
    return None
  if _read_json(paths[1]) != _json(config):
    return None
  try:
    return _read_json(paths[0])
  except ValueError:  # it is made again
    return None


def digest(params: Params) -> str:
  """SHA-256 of all parameters, in the order of their paths."""
  sha = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    sha.update(jax.tree_util.keystr(path).encode())
    sha.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
  return sha.hexdigest()


def write_json(path: pathlib.Path, value: Any) -> None:
  """Atomically: a reader sees the old file or the new one."""
  temporary = path.with_name(f'.{path.name}.{os.getpid()}')
  with open(temporary, 'w') as file:
    json.dump(_json(value), file, indent=2, allow_nan=False)
    file.write('\n')
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(
      f'{path} is damaged ({e}); restore it, or name another --workdir.'
    ) from e
  if not isinstance(value, dict):
    raise ValueError(f'{path} is damaged: it holds {value!r:.80}.')
  return value


def summary_text(summary: Mapping[str, Any], workdir: pathlib.Path) -> str:
  """The end of a run, for people."""
  lines = ['', 'evaluation      pass@1   95% interval     any format  prompts']
  for name, e in summary['evaluation'].items():
    # A resumed run may have begun under a version that did not measure it.
    lenient = e.get('lenient_pass_at_1', float('nan'))
    lines.append(
      f'{name:<15} {e["pass_at_1"]:.3f}    [{e["low"]:.3f}, {e["high"]:.3f}]'
      f'   {lenient:.3f}       {e["n"]}'
    )
  lines.append(f'\nwall time       {summary["wall_seconds"]:.0f} s')
  for lane, states in summary['seconds'].items():
    total = max(sum(states.values()), 1e-9)
    parts = sorted(states.items(), key=lambda x: -x[1])
    lines.append(
      f'{lane:<15} ' + ', '.join(f'{name} {s / total:.0%}' for name, s in parts)
    )
  lines += [
    f'tokens          {summary["tokens"]}',
    f'parameters      sha256 {summary["params_sha256"]}',
    f'checkpoints     {workdir}/checkpoints',
    f'TensorBoard     tensorboard --logdir {workdir}/tensorboard',
    f'everything      {workdir}/summary.json',
  ]
  return '\n'.join(lines)


def _tokens(groups: Sequence[Group]) -> int:
  return sum(g.num_completion_tokens for g in groups)


def _sample_text(group: Group) -> str:
  """Markdown of a prompt and its first rollouts."""
  parts = [f'**prompt** ({group.prompt.row})\n\n```\n{group.prompt.text}\n```']
  for r in group.rollouts[:2]:
    parts.append(
      f'**{r.verdict.status} {r.verdict.score:g}** ({r.verdict.reason}; '
      f'{r.num_completion_tokens} tokens, {r.finish_reason})\n\n'
      f'```\n{r.text}\n```'
    )
  return '\n\n'.join(parts)


def _flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat |= _flat(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def _json(value: Any) -> Any:
  """As it comes back from a file: tuples are lists, nan is 'nan'."""
  if isinstance(value, Mapping):
    return {str(key): _json(v) for key, v in value.items()}
  if isinstance(value, list | tuple):
    return [_json(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)  # JSON has no such number
  return value


def _versions() -> dict[str, str]:
  found = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {'python': platform.python_version(), **found}


def _hardware() -> dict[str, Any]:
  return {
    'host': platform.machine(),
    'cpu_cores': os.cpu_count(),
    'devices': [d.device_kind for d in jax.devices()],
  }
