"""What the scripts in launch/ share: the config flag, and plain errors for it.

A mistake in a flag or in the config ends the script with one message and no
traceback. Knows flags; trains nothing.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

from absl import app, flags
from ml_collections import config_flags

# Keys of a plugin need not stand in the config file, so new ones are taken;
# rl_jax.config refuses those that nobody reads.
CONFIG = config_flags.DEFINE_config_file(
  'config', accept_new_attributes=True, lock_config=False
)


def run(main: Any) -> None:
  """`absl.app.run`; `main` takes no arguments."""
  flags.mark_flag_as_required('config')
  app.run(lambda argv: main(), flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
  try:
    positional = flags.FLAGS(argv)[1:]
  except flags.Error as e:
    whole = re.search(r'--?config\.(\w+)=(\S*)', ' '.join(argv))
    if whole and 'ConfigDict' in str(e):  # somebody set a section
      e = f'{e} A key of it is set as --config.{whole[1]}.name={whole[2]}.'
    sys.exit(f'{e} See --help.')
  except KeyError as e:  # of ml_collections; its message has quotes of its own
    sys.exit(f'--config: there is no section {e.args[0]}; see configs/base.py.')
  if positional:
    sys.exit(f'{positional}: only --flags are taken.')
  return argv


def begin() -> Any:
  """The config, after its keys were checked; JAX has its devices then."""
  config = CONFIG.value
  logging.getLogger('jax').setLevel(logging.WARNING)
  from rl_jax import config as configs

  try:
    settings = configs.settings(config)
  except ValueError as e:
    sys.exit(str(e))
  import jax

  if settings.mesh.num_cpu_devices > 0:
    jax.config.update('jax_num_cpu_devices', settings.mesh.num_cpu_devices)
  return config
