"""Every line is read as it stands, or refused by file and line."""

import gzip
import json
import re

import pytest

from rl_jax.prompts.base import Row
from rl_jax.prompts.jsonl import Config, rows

# Line ends of other conventions, a NUL and an emoji, inside JSON strings.
ODD = 'a\u2028b\u2029c\u0085d\x0be\x1cf\rg\x00h🎉'


def _write(path, *records) -> str:
  lines = [json.dumps(r, ensure_ascii=False) for r in records]
  path.write_bytes('\n'.join([*lines, '']).encode())
  return str(path)


def test_only_the_line_feed_ends_a_line(tmp_path):
  # U+2028, U+2029 and U+0085 stand in the file unescaped.
  path = _write(
    tmp_path / 'a.jsonl',
    {'prompt': ODD, 'answer': ODD},
    {'prompt': 'q', 'answer': '1'},
  )
  assert rows(Config(path)) == [Row(ODD, ODD), Row('q', '1')]


def test_columns_limit_and_blank_lines(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(
    '{"q": "x", "a": 0, "s": "why"}\r\n\n{"q": "y", "a": [1], "s": "so"}'
  )
  config = Config(str(path), prompt='q', answer='a', solution='s')
  assert rows(config) == [Row('x', 0, 'why'), Row('y', [1], 'so')]
  limited = Config(str(path), prompt='q', answer='a', limit=1)
  assert rows(limited) == [Row('x', 0, '')]


def test_gzip_and_environment_variables(tmp_path, monkeypatch):
  data = b'{"prompt": "x", "answer": "1"}\n'
  (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(data))
  monkeypatch.setenv('MY_DATA', str(tmp_path))
  monkeypatch.setenv('HOME', str(tmp_path))
  assert rows(Config('$MY_DATA/a.jsonl.gz')) == [Row('x', '1')]
  assert rows(Config('~/a.jsonl.gz')) == [Row('x', '1')]


def test_gsm8k(shared):
  path = str(shared / 'data' / 'gsm8k_train.jsonl')
  found = rows(Config(path, prompt='question', solution='answer'))
  assert len(found) == 7473
  assert found[0].prompt.startswith('Natalia sold clips to 48')
  assert found[0].answer.endswith('#### 72')
  assert found[0].solution == found[0].answer


@pytest.mark.parametrize(
  'data', [b'plain', gzip.compress(b'{}' * 99)[:-9]], ids=['plain', 'cut']
)
def test_a_damaged_gzip_file_is_named(tmp_path, data):
  (tmp_path / 'a.jsonl.gz').write_bytes(data)
  with pytest.raises(ValueError, match=r'cannot read the file .*a\.jsonl\.gz'):
    rows(Config(str(tmp_path / 'a.jsonl.gz')))


@pytest.mark.parametrize('path', ['~nobody_here/x', 'x' * 5000, '/'])
def test_a_path_that_is_none_is_named(path):
  with pytest.raises(ValueError, match=f"path='{path[:9]}"):
    rows(Config(path))


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"prompt": "x", "answer"', 'not JSON'),
    (b'[' * 100_000, 'not JSON'),
    (b'{"prompt": "\xff", "answer": "1"}', 'UTF-8'),
    (b'[1]', 'must be an object'),
    (
      b'{"prompt": "x", "answer": "1", "answer": "2"}',
      "['answer'] more than once",
    ),
    (b'{"answer": "1"}', "no column 'prompt'"),
    (b'{"prompt": "x"}', "no column 'answer'"),
    (
      b'{"prompt": 3.5, "answer": "1"}',
      "'prompt' must be a non-empty string or an int",
    ),
    (
      b'{"prompt": "", "answer": "1"}',
      "'prompt' must be a non-empty string or an int",
    ),
    (b'{"prompt": "\\ud800", "answer": "1"}', 'surrogate'),
    (b'{"prompt": "x", "answer": ""}', 'nothing to verify'),
    (b'{"prompt": "x", "answer": " "}', 'nothing to verify'),
    (b'{"prompt": "x", "answer": null}', 'nothing to verify'),
    (b'{"prompt": "x", "answer": []}', 'nothing to verify'),
  ],
)
def test_bad_lines_are_named(tmp_path, line, message):
  path = tmp_path / 'bad.jsonl'
  path.write_bytes(b'{"prompt": "x", "answer": "1"}\n\n' + line + b'\n')
  with pytest.raises(ValueError, match='bad.jsonl:3: .*' + re.escape(message)):
    rows(Config(str(path)))


def test_missing_file_and_negative_limit(tmp_path):
  with pytest.raises(ValueError, match=r'there is no file .*none\.jsonl'):
    rows(Config(str(tmp_path / 'none.jsonl')))
  with pytest.raises(ValueError, match='limit=-1'):
    Config('a', limit=-1)
