"""The benchmark measures what its rows say; its figures are the README's."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

PATH = pathlib.Path(__file__).resolve().parents[2] / 'launch' / 'bench.py'


@pytest.fixture(scope='module')
def bench():
  spec = importlib.util.spec_from_file_location('bench', PATH)
  module = importlib.util.module_from_spec(spec)
  sys.modules['bench'] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


def test_help():
  done = subprocess.run(
    [sys.executable, PATH, '--help'], capture_output=True, text=True
  )
  assert done.returncode == 0
  for flag in ('--json', '--only', '--repeats', '--gsm8k'):
    assert flag in done.stdout
  assert '--measure' not in done.stdout  # its own


def test_every_row_can_be_measured(bench):
  for row in bench.ROWS:
    assert row.case in bench.CASES.keys() & bench.SLOTS.keys()
    assert {row.ours, row.against} <= bench.ENGINES.keys()
    assert row.target > 0


class Letters:
  """A tokenizer of one token a letter."""

  def encode(self, text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


class Clockwork:
  """Takes 2 s to the first token and 0.1 s for each after it."""

  tokenizer = Letters()

  def __init__(self):
    self.calls = []

  def run(self, rows, samples, max_tokens, temperature, stop):
    self.calls.append((len(rows), samples, max_tokens, temperature, stop))
    return 2 + 0.1 * (max_tokens - 1)


def test_decode_leaves_the_time_to_the_first_token_out(bench):
  engine = Clockwork()
  assert bench.decode(engine, ['abcd' * 20] * 99, 16) == pytest.approx(160)
  assert engine.calls[-1] == (16, 1, 64, 0.0, False)


def test_prompts_have_the_length_that_was_asked_for(bench):
  rows = bench.exact(['abc', 'defgh', 'ij'] * 9, Letters(), 3, 7)
  assert [row.tolist() for row in rows[:2]] == [
    [*b'abcdefg'],
    [*b'ijabcde'],
  ]
  assert {len(row) for row in rows} == {7}


def test_groups_a_second(bench):
  engine = Clockwork()
  texts = ['abcdefgh' * 99] * 40
  assert bench.rl(engine, texts) == pytest.approx(16 / (2 + 25.5))
  assert engine.calls[-1] == (16, 8, 256, 1.0, True)
  assert bench.shared(engine, texts) == pytest.approx(1 / (2 + 6.3))
  assert engine.calls[-1] == (1, 16, 64, 1.0, False)


def test_records_have_value_ratio_and_target(
  bench, monkeypatch, tmp_path, capsys
):
  speeds = {'float32': [3.0, 5.0], 'transformers': [2.0, 1.0]}
  monkeypatch.setattr(
    bench, 'in_process', lambda case, name, gsm8k: speeds[name].pop(0)
  )
  monkeypatch.setattr(bench.importlib.util, 'find_spec', lambda name: True)
  path = tmp_path / 'rows.jsonl'
  arguments = ['bench.py', 'generator', '--only=decode16 float32']
  monkeypatch.setattr(sys, 'argv', [*arguments, f'--json={path}'])
  bench.main()
  (record,) = map(json.loads, path.read_text().splitlines())
  assert (
    record.items()
    >= {
      'name': 'decode16 float32',
      'value': 5.0,
      'unit': 'tokens/s',
      'against': 'transformers: 2.0',
      'ratio': 2.5,
      'target': 1.7,
    }.items()
  )
  assert {'machine', 'cores', 'date'} <= record.keys()
