"""Forces eight CPU devices before JAX starts, so that sharding tests run."""

import os
import pathlib

import pytest

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope='session')
def shared() -> pathlib.Path:
  """Folder with the data sets; its absence is a failure where CI is set."""
  path = pathlib.Path(os.environ.get('RL_JAX_SHARED', ROOT.parent / 'shared'))
  if not path.is_dir():
    message = f'{path} is missing; set RL_JAX_SHARED to the folder of data.'
    if os.environ.get('CI'):
      pytest.fail(message)
    pytest.skip(message)
  return path
