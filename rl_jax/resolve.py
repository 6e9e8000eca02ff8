"""From a config entry to typed settings and plugin modules, by import path.

There is no registry: `algorithm.name='grpo'` is the module
`rl_jax.algorithms.grpo`, and a dotted name is imported as it stands. Every
section of a config becomes a frozen dataclass, so that a key that nobody
reads cannot exist: unknown, misplaced and retired keys are errors with a
suggestion, raised before anything compiles.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any, TypeVar, get_origin, get_type_hints

T = TypeVar('T')

# Keys that used to exist: 'section.key' -> what to write instead.
RETIRED: dict[str, str] = {}
# Kinds of values that are checked; anything else is the section's business.
_KINDS = (bool, int, float, str, tuple, Mapping)


def plugin(folder: str, name: str) -> ModuleType:
  """The module `rl_jax.<folder>.<name>`, or `name` itself if it has a dot.

  Raises:
    ValueError: no such module, or one that is no plugin; the message says
      what it lacks and lists those that exist.
  """
  path = name if '.' in name else f'rl_jax.{folder}.{name}'
  if not all(path.split('.')):  # importlib would take it as relative
    raise ValueError(f'{folder}: there is no {name!r}. {_legal(folder)}')
  try:
    module = importlib.import_module(path)
  except ModuleNotFoundError as e:
    if e.name is None or not (path == e.name or path.startswith(e.name + '.')):
      raise  # the plugin exists, something that it imports does not
    legal = available(folder)
    close = difflib.get_close_matches(name, legal, n=1)
    hint = f' Did you mean {close[0]!r}?' if close else ''
    if e.name != path:
      hint += f' (Not even {e.name!r} can be imported.)'
    raise ValueError(
      f'{folder}: there is no {name!r}.{hint} {_legal(folder)}'
    ) from e
  if lacks := _lacks(module, folder):
    raise ValueError(
      f'{folder}: {name!r} is no plugin: the module lacks '
      f'{", ".join(lacks)}; the contract is the docstring of '
      f'rl_jax/{folder}/__init__.py. {_legal(folder)}'
    )
  return module


def available(folder: str) -> list[str]:
  """Names of a folder's plugins: modules with all that its contract asks."""
  modules = pkgutil.iter_modules(_package(folder).__path__)
  return [
    name
    for name in sorted(m.name for m in modules)
    if not _lacks(importlib.import_module(f'rl_jax.{folder}.{name}'), folder)
  ]


def _lacks(module: ModuleType, folder: str) -> list[str]:
  return [n for n in _package(folder).PLUGIN if not hasattr(module, n)]


def _package(folder: str) -> ModuleType:
  return importlib.import_module(f'rl_jax.{folder}')


def _legal(folder: str) -> str:
  return (
    f'Legal: {", ".join(available(folder))}, or a module of your own by its '
    "import path, which needs a dot ('my_paper.mine' for my_paper/mine.py) and "
    'the folder above it in PYTHONPATH.'
  )


def settings(
  cls: type[T],
  section: Mapping[str, Any],
  where: str,
  elsewhere: Mapping[str, Collection[str]] | None = None,
) -> T:
  """Builds the dataclass `cls` from a config section, strictly.

  Args:
    cls: a dataclass; fields without default are required.
    section: the section's keys and values, without the `name` of a plugin.
    where: the section's name, for messages, as 'algorithm'.
    elsewhere: legal keys by section ('' for the top of the config), searched
      for where a stray key belongs.

  Raises:
    ValueError: unknown, retired or missing key, or value of a wrong type.
  """
  fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
  _check_own(cls, fields, where)
  hints = get_type_hints(cls)
  values = {}
  prefix = f'{where}.' if where else ''
  for key, value in section.items():
    if f'{prefix}{key}' in RETIRED:
      raise ValueError(
        f'{prefix}{key} is retired: use {RETIRED[f"{prefix}{key}"]}.'
      )
    if key not in fields:
      raise ValueError(unknown_key(key, where, list(fields), elsewhere))
    values[key] = _checked(value, hints[key], f'{prefix}{key}')
  missing = [
    n
    for n, f in fields.items()
    if n not in values
    and f.default is dataclasses.MISSING
    and f.default_factory is dataclasses.MISSING
  ]
  if missing:
    raise ValueError(
      f'{where}: missing {", ".join(missing)}; set it in the config file or '
      f'with --config.{prefix}{missing[0]}=.'
    )
  return cls(**values)


def _check_own(cls: type, fields: Collection[str], where: str) -> None:
  """A class that forgot its decorator or an annotation would lose a key."""
  for name in cls.__annotations__.keys() | vars(cls).keys():
    value = vars(cls).get(name)
    constant = 'ClassVar' in str(cls.__annotations__.get(name))
    if name in fields or name.startswith('_') or constant:
      continue
    if not (callable(value) or isinstance(value, property | classmethod)):
      raise ValueError(
        f'{where}: {name} of {cls.__module__}.{cls.__qualname__} is no key: '
        'annotate it, as in `tau: float = 1.0`, and put '
        '@dataclasses.dataclass(frozen=True) over the class.'
      )


def unknown_key(
  key: str,
  where: str,
  legal: list[str],
  elsewhere: Mapping[str, Collection[str]] | None = None,
) -> str:
  """The message for a key that `where` does not have; see `settings`."""
  prefix = f'{where}.' if where else ''
  message = f'{prefix}{key} is not a key. '
  homes = [
    f'{name}.{key}'.removeprefix('.')
    for name, keys in (elsewhere or {}).items()
    if key in keys
  ]
  close = difflib.get_close_matches(key, legal, n=1)
  if homes:
    message += f'Did you mean {" or ".join(homes)}? '
  elif close:
    message += f'Did you mean {prefix}{close[0]}? '
  return message + f'Legal: {", ".join(sorted(legal))}.'


def _checked(value: Any, hint: Any, where: str) -> Any:
  """`value` as the field's annotation has it, or a ValueError."""
  if hasattr(value, 'to_dict'):
    value = value.to_dict()
  kind = get_origin(hint) or hint
  if kind not in _KINDS:
    return value
  if kind is float and type(value) is int:
    return float(value)
  if kind is tuple and isinstance(value, list):
    return tuple(value)
  # To Python a bool is an int; to a config it is not.
  if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
    return value
  raise ValueError(f'{where}={value!r}: must be {kind.__name__}.')
