"""A short soak; the long one is for people."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_random_traffic_leaks_nothing_and_ends():
  done = subprocess.run(
    [sys.executable, str(ROOT / 'launch' / 'soak.py'), '--minutes=0.5'],
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == 0, done.stdout + done.stderr[-3000:]
  last = json.loads(done.stdout.splitlines()[-1])
  for what in ('aborted', 'versions', 'tokens_matched', 'tokens_guessed'):
    assert last[what] > 0, last


def test_help_names_the_flags():
  done = subprocess.run(
    [sys.executable, str(ROOT / 'launch' / 'soak.py'), '--help'],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
  assert '--minutes' in done.stdout
