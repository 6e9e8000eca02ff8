"""Before JAX starts: eight CPU devices, and programs compiled once.

The compilation cache is that of this test run: its processes share it, those
of pytest-xdist and those that tests launch, and it goes with the first.
"""

import os
import pathlib
import tempfile

import pytest

os.environ['JAX_PLATFORMS'] = 'cpu'
if 'PYTEST_XDIST_WORKER' not in os.environ:
  _compiled = tempfile.TemporaryDirectory(prefix='rl_jax_compiled_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _compiled.name
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

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
