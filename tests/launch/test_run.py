"""The entry point, as a shell calls it."""

import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = 'configs/arithmetic.py'


@pytest.fixture
def launch(tmp_path):
  def launch(*arguments):
    return subprocess.run(
      [
        *(sys.executable, str(ROOT / 'launch' / 'run.py')),
        *(f'--workdir={tmp_path / "run"}', *arguments),
      ],
      capture_output=True,
      text=True,
      timeout=60,
      cwd=tmp_path,  # from anywhere
    )

  return launch


def test_help_names_the_flags(launch):
  done = launch('--help')
  assert '--config' in done.stdout and '--workdir' in done.stdout
  assert 'runs/<config name>' in done.stdout
  assert 'Traceback' not in done.stdout + done.stderr


def test_the_config_is_asked_for(launch):
  done = launch()
  assert done.returncode != 0
  assert '--config must have a value other than None' in done.stderr
  assert 'Traceback' not in done.stderr


def test_positional_arguments_are_refused(launch, tmp_path):
  done = launch(f'--config={ROOT / CONFIG}', 'resume', 'config.seed=3')
  assert done.returncode != 0
  output = done.stdout + done.stderr
  assert "['resume', 'config.seed=3']: only --flags are taken" in output
  assert not (tmp_path / 'run').exists()


def test_a_typo_ends_the_run_before_it_begins(launch, tmp_path):
  begin = time.monotonic()
  done = launch(f'--config={ROOT / CONFIG}', '--config.optimizer.clip_low=0.3')
  assert time.monotonic() - begin < 20
  assert done.returncode != 0
  assert (
    'optimizer.clip_low is not a key. Did you mean algorithm.clip_low?'
    in done.stderr
  )
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'flag, message',
  [
    ('--config.foo.bar=1', "there is no section 'foo'"),
    ('--config.algorithm=rloo', 'as --config.algorithm.name=rloo.'),
    ('--config.num_steps=x', 'num_steps'),
    ('--confg=x', "Unknown command line flag 'confg'"),
    ('--config.prompts_per_step=0', 'prompts_per_step=0: must be'),
  ],
)
def test_a_mistake_is_one_message(launch, tmp_path, flag, message):
  done = launch(f'--config={ROOT / CONFIG}', flag)
  assert done.returncode == 1
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()


def test_the_entry_point_is_thin():
  lines = (ROOT / 'launch' / 'run.py').read_text().splitlines()
  assert len(lines) <= 60
