"""What the scripts in launch/ share: the config flag, and plain errors for it.

A mistake in a flag or in the config ends the script with one message and no
traceback. Knows flags; trains nothing.
"""

from __future__ import annotations

import logging
import os
import pathlib
import re
import sys
import traceback
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
  app.run(lambda argv: _guarded(main), flags_parser=_parse)


def _guarded(main: Any) -> None:
  """Ends the process when `main` fails, whatever threads are still there.

  A checkpoint that cannot be written leaves some of orbax's waiting for
  minutes.
  """
  try:
    main()
  except Exception as e:  # noqa: BLE001  # told, and the process ends
    raised_in = traceback.extract_tb(e.__traceback__)[-1].filename
    ours = pathlib.Path(raised_in).is_relative_to(pathlib.Path(__file__).parent)
    if isinstance(e, ValueError) and ours:  # says what to do
      print(e, file=sys.stderr)
    else:
      traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
  from rl_jax import meshes, resolve

  mesh = resolve.settings(meshes.Config, config.get('mesh', {}), 'mesh')
  import jax

  if mesh.num_cpu_devices > 0:
    jax.config.update('jax_num_cpu_devices', mesh.num_cpu_devices)
  configs.settings(config)  # tries plugins, on the devices that there are now
  return config
