"""Trains a config: `python launch/run.py --config=configs/arithmetic.py`.

Any key may be set on the command line, as `--config.optimizer.learning_rate
=3e-4`. The same command resumes a run that was killed.
"""

import logging
import pathlib
import signal
import sys
import threading

from absl import app, flags
from ml_collections import config_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # configs/ import each other

# Keys of a plugin need not stand in the config file, so new ones are taken;
# rl_jax.config refuses those that nobody reads.
_CONFIG = config_flags.DEFINE_config_file(
  'config', accept_new_attributes=True, lock_config=False
)
_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'Where all of the run goes; runs/<config name> if empty.'
)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1:]}: only --flags are taken.')
  config = _CONFIG.value
  logging.getLogger('jax').setLevel(logging.WARNING)
  import jax

  if config.mesh.num_cpu_devices > 0:
    jax.config.update('jax_num_cpu_devices', config.mesh.num_cpu_devices)
  from rl_jax.saving import Stopped
  from rl_jax.train import train

  name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config']))
  workdir = pathlib.Path(_WORKDIR.value or ROOT / 'runs' / name.stem)
  stop = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stop.set())
  try:
    train(config, workdir.absolute(), stop)
  except Stopped as e:
    print(f'{e}; saved: the same command goes on from there.', flush=True)
    sys.exit(128 + signal.SIGTERM)


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main)
