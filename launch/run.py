"""Trains a config: `python launch/run.py --config=configs/arithmetic.py`.

Any key may be set on the command line, as `--config.optimizer.learning_rate
=3e-4`. The same command resumes a run that was killed.
"""

import pathlib
import signal
import sys
import threading

from absl import flags
from ml_collections import config_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # configs/ import each other

from rl_jax import command_line

_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'Where all of the run goes; runs/<config name> if empty.'
)


def main() -> None:
  config = command_line.begin()
  from rl_jax.saving import Stopped
  from rl_jax.train import train

  name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config']))
  workdir = pathlib.Path(_WORKDIR.value or ROOT / 'runs' / name.stem)
  stop, signals = threading.Event(), []

  def ask(number: int, frame: object) -> None:
    """Saves and ends; a second Ctrl-C ends at once."""
    del frame
    if number == signal.SIGINT and signals:
      raise KeyboardInterrupt
    signals.append(number)
    stop.set()

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ask)
  try:
    train(config, workdir.absolute(), stop)
  except Stopped as e:
    print(f'{e}; the same command goes on from there.', flush=True)
    sys.exit(128 + signals[0])


if __name__ == '__main__':
  command_line.run(main)
