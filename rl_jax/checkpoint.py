"""Checkpoints: everything that a resume needs, all of it or nothing.

Knows two things to keep: a pytree of jax arrays (sharded in any way) and a
dict of JSON for what lives on the host. Does not know what is in either, nor
when to save. Orbax writes a checkpoint under a temporary name and renames it
when it is complete, so that a kill at any point leaves the older ones whole.

  save(step) --+--> copies to host, returns   (the caller may donate now)
               +--> background: write, rename
  next save, wait or close: joins the background write (its failure is raised
  here), then deletes what is older than the newest `keep`.

Sizes and formats are checked on restore and a damaged checkpoint is passed
over, but there is no checksum over array data: a flipped bit on the disk may
go unseen. Several processes call every method together, on one shared file
system; the host dict is that of process 0.
"""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from rl_jax.types import Group, Prompt, Rollout, Verdict

_log = logging.getLogger(__name__)

_TEMPORARY = '*.orbax-checkpoint-tmp*'
# What orbax and tensorstore raise on a file that is missing, cut or garbled.
_DAMAGE = (OSError, ValueError, KeyError, TypeError)


class CheckpointError(RuntimeError):
  """There are checkpoints and none of them can be read."""


class MismatchError(ValueError):
  """A whole checkpoint holds other arrays than the config asks for."""


class Checkpointer:
  """Saves in the background; restores the newest checkpoint that is whole."""

  def __init__(self, directory: pathlib.Path, keep: int = 2):
    """Opens `directory` and makes it if need be; deletes nothing yet."""
    if keep < 1:
      raise ValueError(f'checkpoint {keep=}: must be >= 1.')
    logging.getLogger('absl').addFilter(_not_orbax_chatter)
    self._directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._owner = False  # has saved, so whatever is temporary here is stale
    self._damaged: dict[int, str] = {}  # step -> why it could not be read
    # Orbax would delete old checkpoints in its background thread and fail the
    # save if that fails; `_clean` does it instead.
    self._manager = ocp.CheckpointManager(
      self._directory,
      item_names=('arrays', 'host'),
      options=ocp.CheckpointManagerOptions(max_to_keep=None),
    )

  def save(
    self,
    step: int,
    arrays: Any,
    host: Mapping[str, Any],
    *,
    wait: bool = False,
  ) -> None:
    """Starts to write a checkpoint; a step that exists is left as it is.

    Args:
      step: number of learner steps done.
      arrays: pytree of jax arrays; may be donated once this returns.
      host: JSON-able; may be changed once this returns.
      wait: return only when the checkpoint is complete on the disk.

    Raises:
      ValueError: a leaf that is not a plain jax array.
      TypeError: something in `host` is not JSON.
      Whatever failed the previous save, which was in the background.
    """
    named = _named(arrays)
    for name, leaf in named.items():
      _check_savable(name, leaf)
    leaves = {n: [list(a.shape), str(a.dtype)] for n, a in named.items()}
    # As text, since orbax would read the caller's dict in the background.
    text = json.dumps(host)
    self._owner = True
    self.wait()
    if step not in self._manager.all_steps():
      self._manager.save(
        step,
        args=ocp.args.Composite(
          arrays=ocp.args.StandardSave(named),
          host=ocp.args.JsonSave(
            {'step': step, 'leaves': leaves, 'host': text}
          ),
        ),
        force=True,  # also if a later step exists
      )
    if wait:
      self.wait()

  def restore(
    self, abstract_arrays: Any
  ) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest whole checkpoint as (step, arrays, host); None without any.

    A damaged checkpoint is passed over with a warning, and the next save
    renames it to `damaged_<step>`: the run will come by its step again and
    must be able to save there.

    Args:
      abstract_arrays: pytree of jax.ShapeDtypeStruct, each with the sharding
        to restore to, which may differ from the one that was saved.

    Raises:
      MismatchError: a ValueError; the checkpoint holds other leaves, shapes
        or dtypes.
      CheckpointError: there are checkpoints, all of them damaged.
    """
    wanted = _named(abstract_arrays)
    for name, leaf in wanted.items():
      _check_target(name, leaf)
    self.wait()
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        named, host = self._load(step, wanted)
      except MismatchError:
        raise
      except _DAMAGE as e:
        self._damaged[step] = f'{type(e).__name__}: {str(e)[:300]}'
        _log.warning(
          'Checkpoint %d is incomplete or damaged and is passed over: %s',
          step,
          self._damaged[step],
        )
        continue
      values = [named[name] for name in wanted]
      treedef = jax.tree.structure(abstract_arrays)
      return step, jax.tree.unflatten(treedef, values), host
    if self._damaged:
      reasons = ''.join(f'\n  {s}: {why}' for s, why in self._damaged.items())
      raise CheckpointError(
        f'{self._directory}: no checkpoint can be read. Repair one, or move '
        f'the directory away to start anew.{reasons}'
      )
    return None

  def wait(self) -> None:
    """Returns when no write is under way; raises if the last one failed."""
    self._manager.wait_until_finished()
    self._clean()

  def close(self) -> None:
    """Waits, then lets go of the background threads."""
    self.wait()
    self._manager.close()

  def _load(
    self, step: int, wanted: dict[str, Any]
  ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    header = self._read(step, host=ocp.args.JsonRestore()).host
    if header['step'] != step:
      raise OSError(f'it is of step {header["step"]}, and was renamed')
    _check_leaves(header['leaves'], wanted, self._directory / str(step))
    host = json.loads(header['host'])
    args = ocp.args.StandardRestore(wanted)
    try:
      return self._read(step, arrays=args).arrays, host
    except Exception as e:
      # Orbax wraps what tensorstore says of a shard in a bare Exception.
      if type(e) is Exception:
        raise OSError(f'{e.__cause__}; {e}') from e
      raise

  def _read(self, step: int, **items: Any) -> Any:
    return self._manager.restore(step, args=ocp.args.Composite(**items))

  def _clean(self) -> None:
    """Deletes old checkpoints and what killed runs left half written.

    Only once this object has saved, and hence owns the directory: one that
    merely reads must not touch what a live run is writing.
    """
    if not self._owner:
      return
    if jax.process_index() == 0:
      for step in self._damaged:
        _set_aside(self._directory / str(step))
      whole = sorted(set(self._manager.all_steps()) - set(self._damaged))
      old = [self._directory / str(step) for step in whole[: -self._keep]]
      for path in [*old, *self._directory.glob(_TEMPORARY)]:
        _delete(path)
    multihost_utils.sync_global_devices('old checkpoints are gone')
    self._damaged = {
      step: why
      for step, why in self._damaged.items()
      if (self._directory / str(step)).exists()  # could not be set aside
    }
    self._manager.reload()


def group_to_json(group: Group) -> dict[str, Any]:
  """A group as JSON; `group_from_json` gives it back bit by bit."""
  return {
    'prompt': prompt_to_json(group.prompt),
    'rollouts': [_rollout_to_json(r) for r in group.rollouts],
  }


def group_from_json(data: Mapping[str, Any]) -> Group:
  """The group that `group_to_json` wrote."""
  return Group(
    prompt=prompt_from_json(data['prompt']),
    rollouts=tuple(_rollout_from_json(r) for r in data['rollouts']),
  )


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
  """A prompt as JSON; `prompt_from_json` gives it back bit by bit."""
  return {
    'prompt_id': int(prompt.prompt_id),
    'row': prompt.row,
    'text': prompt.text,
    'tokens': _to_list('tokens', prompt.tokens),
    'answer': prompt.answer,
  }


def prompt_from_json(data: Mapping[str, Any]) -> Prompt:
  """The prompt that `prompt_to_json` wrote."""
  return Prompt(**{**data, 'tokens': _to_array('tokens', data['tokens'])})


# Per-token arrays of records: a float32 is a float64 of JSON without loss.
_DTYPES: dict[str, type[np.generic]] = {
  'tokens': np.int32,
  'loss_mask': np.float32,
  'behavior_logprobs': np.float32,
  'kept_logmass': np.float32,
  'policy_versions': np.int32,
}


def _rollout_to_json(rollout: Rollout) -> dict[str, Any]:
  verdict = rollout.verdict
  return {
    'sample_index': int(rollout.sample_index),
    **{name: _to_list(name, getattr(rollout, name)) for name in _DTYPES},
    'finish_reason': rollout.finish_reason,
    'text': rollout.text,
    'verdict': {
      'status': verdict.status,
      'score': float(verdict.score),
      'reason': verdict.reason,
      'lenient_pass': verdict.lenient_pass,
    },
  }


def _rollout_from_json(data: Mapping[str, Any]) -> Rollout:
  arrays = {name: _to_array(name, data[name]) for name in _DTYPES}
  return Rollout(**{**data, **arrays, 'verdict': Verdict(**data['verdict'])})


def _to_list(name: str, array: np.ndarray) -> list[int] | list[float]:
  if array.dtype != _DTYPES[name] or array.ndim != 1:
    raise ValueError(
      f'{name}: is {array.dtype}{list(array.shape)}, must be '
      f'{np.dtype(_DTYPES[name])}[T] to come back as it was.'
    )
  return array.tolist()


def _to_array(name: str, values: list[int] | list[float]) -> np.ndarray:
  return np.array(values, dtype=_DTYPES[name])


def _named(tree: Any) -> dict[str, Any]:
  """Leaves by dotted path; flat, so that orbax need not know the nodes."""
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  named = {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in paths
  }
  if len(named) != len(paths):
    raise ValueError('Two leaves have the same dotted path; rename one.')
  return named


def _check_savable(name: str, leaf: Any) -> None:
  if not isinstance(leaf, jax.Array):
    raise ValueError(
      f'{name}: is a {type(leaf).__name__}, must be a jax array; what lives '
      'on the host belongs in the host dict.'
    )
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    raise ValueError(f'{name}: is a typed key; save jax.random.key_data of it.')


def _check_target(name: str, leaf: jax.ShapeDtypeStruct) -> None:
  """A target that cannot be made must not look like a damaged file."""
  if leaf.sharding is None:
    raise ValueError(f'{name}: give its ShapeDtypeStruct a sharding.')
  try:
    leaf.sharding.shard_shape(leaf.shape)
  except ValueError as e:
    raise ValueError(f'{name}: cannot be sharded so: {e}') from e


def _check_leaves(
  saved: Mapping[str, Any], wanted: Mapping[str, Any], path: pathlib.Path
) -> None:
  """Compares a checkpoint's leaves with those that the config asks for."""
  advice = (
    'The config differs from the one that wrote it: restore that config, or '
    'give this run a directory of its own.'
  )
  for name, leaf in wanted.items():
    if name not in saved:
      raise MismatchError(f'{path}: has no leaf {name}. {advice}')
    shape, dtype = saved[name]
    if (tuple(shape), dtype) != (tuple(leaf.shape), str(leaf.dtype)):
      raise MismatchError(
        f'{path}: leaf {name} is {dtype}{shape}, and '
        f'{leaf.dtype}{list(leaf.shape)} is wanted. {advice}'
      )
  extra = [name for name in saved if name not in wanted]
  if extra:
    raise MismatchError(
      f'{path}: has leaves that are not wanted: {", ".join(extra[:5])}'
      f'{", ..." if len(extra) > 5 else ""}. {advice}'
    )


def _set_aside(path: pathlib.Path) -> None:
  aside = path.with_name(f'damaged_{path.name}')
  shutil.rmtree(aside, ignore_errors=True)
  try:
    path.rename(aside)
  except OSError as e:
    _log.warning('Cannot set the damaged checkpoint %s aside: %s', path, e)


def _delete(path: pathlib.Path) -> None:
  try:
    shutil.rmtree(path)
  except OSError as e:
    _log.warning('Cannot delete the old checkpoint %s: %s', path, e)


def _not_orbax_chatter(record: logging.LogRecord) -> bool:
  """Filter: orbax shares absl's logger and tells it of every step it takes."""
  orbax = 'orbax' in pathlib.PurePath(record.pathname).parts
  return record.levelno >= logging.ERROR or not orbax
