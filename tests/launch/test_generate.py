"""The entry point of batch inference, as a shell calls it."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from rl_jax.models import weights
from rl_jax.models.base import Model, ModelConfig
from rl_jax.prompts.tokenizer import load_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]


def launch(script, *arguments):
  return subprocess.run(
    [sys.executable, str(ROOT / 'launch' / script), *map(str, arguments)],
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_help_names_the_flags():
  done = launch('generate.py', '--help')
  for flag in ('--config', '--prompts', '--out', '--column', '--workdir'):
    assert flag in done.stdout
  assert 'Traceback' not in done.stdout + done.stderr


CONFIG = """
from configs import base

def get_config():
  config = base.get_config()
  config.model.source = {source!r}
  sums = dict(name='arithmetic', max_digits=1)
  config.prompts.train = dict(sums=sums)
  config.prompts.heldout = dict(sums=sums)
  config.generator.num_slots = 4
  return config
"""


@pytest.mark.slow
def test_rows_that_cannot_be_completed_are_told_by_the_exit_code(tmp_path):
  source, config = tmp_path / 'model', tmp_path / 'config.py'
  model = Model(
    ModelConfig(
      vocab_size=14,
      d_model=16,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      d_ffn=8,
    )
  )
  weights.save_hf(source, model, model.init(jax.random.key(0)))
  load_tokenizer('chars:0123456789+=').save(source)
  config.write_text(CONFIG.format(source=str(source)))
  rows = [{'question': '1+1='}, {'question': 7}]
  prompts, out = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
  prompts.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  done = launch(
    'generate.py',
    f'--config={config}',
    '--config.sampling.max_tokens=3',
    f'--prompts={prompts}',
    f'--out={out}',
    '--column=question',
  )
  assert done.returncode == 1, done.stderr
  assert '1 rows could not be completed' in done.stderr
  first, second = map(json.loads, out.read_text().splitlines())
  assert 1 <= first['num_tokens'] <= 3 and first['row'] == 0
  assert second['row'] == 1 and "column 'question'" in second['error']
