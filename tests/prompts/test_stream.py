"""Draws, epochs, mixtures, resume and the checks of the data."""

import dataclasses
import importlib
import json
import logging
import re
import sys
import types as python_types

import ml_collections
import numpy as np
import pytest

from rl_jax import resolve
from rl_jax.prompts.base import Row
from rl_jax.prompts.stream import Config, PromptStream, heldout_prompts
from rl_jax.prompts.tokenizer import load_tokenizer

CHARS = load_tokenizer('chars:0123456789abcdefghijklmnopqrstuvwxyz+-*= [].')


@pytest.fixture
def source(tmp_path):
  """Writes a JSON-lines file and returns the entry that reads it."""

  def write(*pairs, name='rows', **keys):
    path = tmp_path / f'{name}.jsonl'
    lines = [json.dumps({'prompt': p, 'answer': a}) + '\n' for p, a in pairs]
    path.write_text(''.join(lines))
    return {'name': 'jsonl', 'path': str(path), **keys}

  return write


def _numbered(n, start=0):
  return [(str(i), str(i)) for i in range(start, start + n)]


def _stream(sources, *, seed=0, tokenizer=CHARS, **keys):
  return PromptStream(sources, Config(**keys), tokenizer, seed=seed)


def _rows(prompts):
  return [p.row for p in prompts]


# Draws and epochs


def test_a_prompt_is_rendered_and_tokenised(source):
  stream = _stream({'a': source(('1+2=', '3'))}, template='is {prompt}')
  (prompt,) = stream.take(1)
  assert (prompt.prompt_id, prompt.row) == (0, 'a/0')
  assert (prompt.text, prompt.answer) == ('is 1+2=', '3')
  assert prompt.tokens.tolist() == CHARS.encode('is 1+2=').tolist()
  assert prompt.tokens.dtype == np.int32


def test_every_epoch_has_every_row_in_another_order(source):
  stream = _stream({'a': source(*_numbered(20))})
  epochs = [_rows(stream.take(20)) for _ in range(3)]
  for epoch in epochs:
    assert sorted(epoch) == sorted(f'a/{i}' for i in range(20))
  assert len({tuple(epoch) for epoch in epochs}) == 3


def test_take_in_pieces_is_take_at_once(source):
  sources = {'a': source(*_numbered(7))}
  once, pieces = _stream(sources).take(23), _stream(sources)
  drawn = [p for n in (1, 0, 5, 17) for p in pieces.take(n)]
  assert _rows(drawn) == _rows(once)
  assert [p.prompt_id for p in drawn] == list(range(23))


def test_order_follows_both_seeds(source):
  sources = {'a': source(*_numbered(50))}
  orders = [
    _rows(PromptStream(sources, Config(seed=mine), CHARS, seed=run).take(50))
    for mine, run in ((0, 0), (0, 1), (1, 0), (0, 0))
  ]
  assert orders[0] == orders[3]
  assert len({tuple(order) for order in orders}) == 3


def test_neighbouring_seeds_are_not_shifted_epochs(source):
  # grain adds the epoch to the seed: seed 1 would replay seed 0's epoch 1.
  sources = {'a': source(*_numbered(50))}
  second_epoch = _rows(_stream(sources, seed=0).take(100))[50:]
  assert second_epoch != _rows(_stream(sources, seed=1).take(50))


# Mixtures


def test_weights_are_shares(source):
  sources = {
    'a': source(*_numbered(10), name='a', weight=3),
    'b': source(*_numbered(30), name='b', weight=1.0),
  }
  rows = _rows(_stream(sources).take(400))
  assert sum(row.startswith('a/') for row in rows) == 300
  # b, of 30 rows, is drawn 100 times: each row 3 or 4 times
  counts = [rows.count(f'b/{i}') for i in range(30)]
  assert set(counts) == {3, 4}


def test_sources_with_equal_rows_have_unlike_orders(source):
  entry = source(*_numbered(30))
  rows = _rows(_stream({'a': entry, 'b': dict(entry)}).take(60))
  a = [row[2:] for row in rows if row.startswith('a/')]
  b = [row[2:] for row in rows if row.startswith('b/')]
  assert sorted(a) == sorted(b) and a != b


@pytest.mark.parametrize(
  'weight', [0, -1.0, float('nan'), float('inf'), '1', 1e308, 5e-324, 10**400]
)
def test_bad_weights(source, weight):
  sources = {'a': source(*_numbered(3), weight=weight)}
  with pytest.raises(ValueError, match=r'prompts\.train\.a\.weight=.*remove'):
    _stream(sources)


# Resume


@pytest.mark.parametrize('saved_after', [1, 2, 3, 4, 7])
def test_resume_is_no_interruption(source, saved_after):
  """Two steps of 4 an epoch; step 2 ends on its border."""
  sources = {'a': source(*_numbered(8))}
  whole = _stream(sources)
  steps = [whole.take(4) for _ in range(10)]
  first = _stream(sources)
  for _ in range(saved_after):
    first.take(4)
  state = json.loads(json.dumps(first.get_state()))
  resumed = _stream(sources)
  resumed.set_state(state)
  for step in steps[saved_after:]:
    again = resumed.take(4)
    assert _rows(again) == _rows(step)
    assert [p.prompt_id for p in again] == [p.prompt_id for p in step]
    assert [p.text for p in again] == [p.text for p in step]


def test_resume_of_a_mixture(source):
  sources = {
    'a': source(*_numbered(5), name='a', weight=2.0),
    'b': source(*_numbered(3), name='b'),
  }
  whole, first = _stream(sources).take(40), _stream(sources)
  first.take(17)
  resumed = _stream(dict(reversed(sources.items())))  # order of no matter
  resumed.set_state(first.get_state())
  assert _rows(resumed.take(23)) == _rows(whole)[17:]


@pytest.mark.parametrize(
  'change',
  [
    {'answer': '9'},
    {'prompt': '9'},
    {'rows': 9},
    {'label': 'b'},
    {'weight': 2.0},
    {'keys': {'max_prompt_tokens': 1}},
    {'keys': {'template': '{prompt} '}},
    {'keys': {'seed': 1}},
    {'tokenizer': load_tokenizer('chars:9876543210+= ')},
  ],
  ids=lambda change: next(iter(change)),
)
def test_changed_data_is_refused(source, change):
  other = source(('1', '1'), name='other')
  rows = _numbered(8)
  state = _stream({'a': source(*rows), 'o': other}).get_state()
  rows = _numbered(change.get('rows', 8))
  rows[3] = (change.get('prompt', '3'), change.get('answer', '3'))
  entry = source(*rows, weight=change.get('weight', 1.0))
  changed = PromptStream(
    {change.get('label', 'a'): entry, 'o': other},
    Config(**change.get('keys', {})),
    change.get('tokenizer', CHARS),
    seed=0,
  )
  with pytest.raises(ValueError, match=r'the prompts changed.*start a new run'):
    changed.set_state(state)


def test_changed_run_seed_is_refused(source):
  sources = {'a': source(*_numbered(8))}
  state = _stream(sources, seed=0).get_state()
  with pytest.raises(ValueError, match='the prompts changed'):
    _stream(sources, seed=1).set_state(state)


# Lengths


def test_one_of_ten_is_too_long(source, caplog):
  rows = [*_numbered(9), ('1' * 20, '1')]
  with caplog.at_level(logging.INFO):
    stream = _stream({'a': source(*rows)}, max_prompt_tokens=19)
  assert stream.report == {'a': {'rows': 10, 'dropped': 1, 'longest': 20}}
  assert '1 dropped (tokens > max_prompt_tokens=19)' in caplog.text
  assert 'a/9' not in _rows(stream.take(27))
  kept = _stream({'a': source(*rows)}, max_prompt_tokens=20)
  assert kept.report['a']['dropped'] == 0
  assert 'pass@k' not in caplog.text
  sources = {'a': source(*rows)}
  config = Config(heldout=sources, max_prompt_tokens=19)
  prompts, _ = heldout_prompts(sources, config, CHARS, 9)
  assert len(prompts) == 9
  assert (
    '1 rows are too long to be asked, so pass@k is that of the other 9'
    in (caplog.text)
  )


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  """Byte-level, so a CJK character is 3 tokens; one merged word; a chat."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = ['<s>', '</s>', *letters, 'aa', 'aaaa']
  pipeline = Tokenizer(
    models.BPE({t: i for i, t in enumerate(tokens)}, [('a', 'a'), ('aa', 'aa')])
  )
  pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  pipeline.decoder = decoders.ByteLevel()
  pipeline.add_special_tokens(['<s>', '</s>'])
  path = tmp_path_factory.mktemp('words')
  pipeline.save(str(path / 'tokenizer.json'))
  template = (
    '<s>{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}'
    '{% if add_generation_prompt %}a:{% endif %}'
  )
  config = {'bos_token': '<s>', 'eos_token': '</s>', 'chat_template': template}
  (path / 'tokenizer_config.json').write_text(json.dumps(config))
  return load_tokenizer(str(path))


def test_tokens_are_counted_not_characters(source, words):
  rows = [('aaaa' * 5, '1'), ('数' * 8, '1')]  # 5 and 24 tokens
  stream = _stream({'a': source(*rows)}, tokenizer=words, max_prompt_tokens=10)
  assert stream.report == {'a': {'rows': 2, 'dropped': 1, 'longest': 24}}
  assert _rows(stream.take(2)) == ['a/0', 'a/0']


def test_the_chat_template_counts(source, words):
  # <s> u : x </s> a : are 7 tokens
  sources = {'a': source(('x', '1'))}
  keys = {'tokenizer': words, 'chat': True}
  stream = _stream(sources, max_prompt_tokens=7, **keys)
  (prompt,) = stream.take(1)
  assert prompt.text == '<s>u:x</s>a:'
  assert len(prompt.tokens) == 7
  with pytest.raises(ValueError, match=r'no prompt is left of 1 .* 7 tokens'):
    _stream(sources, max_prompt_tokens=6, **keys)


def test_system_message_and_template(source, words):
  stream = _stream(
    {'a': source(('x', '1'))},
    tokenizer=words,
    chat=True,
    system='be brief',
    template='{prompt} {y}{prompt}',
  )
  assert stream.take(1)[0].text == '<s>s:be brief</s>u:x {y}x</s>a:'


# Bad data and bad settings


def _plugin(monkeypatch, rows):
  """A source of one's own, by its import path."""
  module = python_types.ModuleType('my_paper.source')
  exec(
    'import dataclasses\n@dataclasses.dataclass(frozen=True)\n'
    'class Config:\n  n: int = 1\n',
    module.__dict__,
  )
  module.rows = lambda config: rows
  monkeypatch.setitem(sys.modules, 'my_paper.source', module)
  return {'a': {'name': 'my_paper.source'}}


@pytest.mark.parametrize(
  'row, message',
  [
    (Row('', '1'), "row 1: prompt ''"),
    (Row(3, '1'), 'row 1: prompt 3'),  # pyright: ignore[reportArgumentType]
    (Row('1', ''), "row 1 ('1'): the answer is ''"),
    (Row('1', ' \n'), 'row 1'),
    (Row('1', None), 'the answer is None'),
    (Row('1', []), 'the answer is []'),
    (Row('1', {1}), 'not plain JSON'),
    (Row('1A', '1'), "'A' in '1A'"),
  ],
)
def test_bad_rows(monkeypatch, row, message):
  sources = _plugin(monkeypatch, [Row('0', '0'), row])
  with pytest.raises(ValueError, match=re.escape(message)):
    _stream(sources)


def test_a_source_of_no_rows(monkeypatch):
  with pytest.raises(ValueError, match=r'prompts\.train\.a: .* has no rows'):
    _stream(_plugin(monkeypatch, []))


def test_zero_is_an_answer(monkeypatch):
  stream = _stream(_plugin(monkeypatch, [Row('1', 0), Row('2', False)]))
  assert sorted(p.answer for p in stream.take(2)) == [0, False]


@pytest.mark.parametrize(
  'sources, message',
  [
    ({}, 'names no source'),
    ({'a': {}}, 'prompts.train.a: has no name'),
    ({'a': {'name': 'arithmetics'}}, "Did you mean 'arithmetic'?"),
    ({'a': {'name': 'base'}}, "'base' is no plugin"),
    (
      {'a': {'name': 'arithmetic', 'max_digit': 2}},
      'Did you mean prompts.train.a.max_digits?',
    ),
    ({'a': {'name': 'arithmetic', 'max_digits': '2'}}, 'must be int'),
  ],
)
def test_bad_entries(sources, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    _stream(sources)


@pytest.mark.parametrize(
  'keys, message',
  [
    ({'max_prompt_tokens': 0}, 'max_prompt_tokens=0'),
    ({'template': 'no slot'}, 'must contain {prompt}'),
    ({'system': 'be brief'}, 'needs chat=True'),
    ({'heldout': {'name': 'jsonl'}}, "heldout.name='jsonl': every source"),
  ],
)
def test_bad_config(keys, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    Config(**keys)


def test_a_source_of_several_is_named(source):
  sources = {
    'a': source(*_numbered(3)),
    'b': {'name': 'jsonl', 'path': '/nowhere/x'},
  }
  with pytest.raises(ValueError, match=r"prompts\.train\.b: path='/nowhere/x'"):
    _stream(sources)


def test_config_from_a_config_dict():
  prompts = ml_collections.ConfigDict(
    {
      'max_prompt_tokens': 16,
      'train': {'sums': {'name': 'arithmetic', 'weight': 1.0}},
      'heldout': {'sums': {'name': 'arithmetic', 'split': 'heldout'}},
    }
  )
  prompts.train.sums.weight = 2.0
  config = resolve.settings(Config, prompts, 'prompts')
  stream = PromptStream(config.train, config, CHARS, seed=0)
  prompts = stream.take(5)
  heldout, _ = heldout_prompts(config.heldout, config, CHARS, 2000)
  assert len(heldout) == 1008  # of 10,000 problems
  assert not {p.text for p in prompts} & {p.text for p in heldout}


def test_a_solution_goes_on_after_its_prompt(source):
  # Were it a text of its own, a second bos would stand in the middle.
  tokenizer = dataclasses.replace(
    CHARS, add_bos=True, alphabet={}, special=CHARS.special | {'bos': '<pad>'}
  )
  stream = _stream(
    {'a': source(('1+2=', '3'), solution='answer')}, tokenizer=tokenizer
  )
  (prompt,) = stream.take(1)
  assert prompt.tokens.tolist() == [0, *CHARS.encode('1+2=')]
  assert stream.solution(prompt).tolist() == [*CHARS.encode('3'), 1]


def test_solution(source):
  entry = source(*_numbered(4), solution='answer')
  stream = _stream({'a/b': entry})
  for prompt in stream.take(4):
    assert CHARS.decode(stream.solution(prompt)[:-1]) == prompt.answer
    assert stream.solution(prompt)[-1] == CHARS.stop_ids[0]
  longest = max(len(p.tokens) for p in stream.take(4)) + 2
  stream.check_solutions(longest)
  message = rf'a/b: row \d has {longest} tokens .*row_tokens={longest - 1}'
  with pytest.raises(ValueError, match=message):
    stream.check_solutions(longest - 1)


def test_a_prompt_that_cannot_be_spelt_is_named(source):
  sources = {'a': source(('1', '1'), ('2 Z', '2'))}
  with pytest.raises(
    ValueError, match=r"prompts\.train\.a: row 1: 'Z' in '2 Z'"
  ):
    _stream(sources)


def test_a_solution_that_cannot_be_spelt_is_found_before_it_is_drawn(
  monkeypatch,
):
  rows = [Row('1', '1', '1'), Row('2', '2', '2 Z')]
  stream = _stream(_plugin(monkeypatch, rows))
  with pytest.raises(ValueError, match="in '2 Z' is not in the alphabet"):
    stream.check_solutions(8)


def test_answers_are_those_of_the_rows_that_may_be_drawn(source):
  rows = [('1', 'a'), ('2' * 9, 'b'), ('3', 'c')]
  stream = _stream({'x': source(*rows)}, max_prompt_tokens=8)
  assert stream.answers() == [('x/0', 'a'), ('x/2', 'c')]


def test_a_row_without_solution_is_named(source):
  sources = {
    'a': source(*_numbered(4), solution='answer', name='a'),
    'b': source(*_numbered(4), name='b'),
  }
  message = r'prompts\.train\.b: row 0 has no solution.*sft\.num_steps=0'
  with pytest.raises(ValueError, match=message):
    _stream(sources).check_solutions(100)


# Held-out prompts


def test_heldout_is_fixed_and_without_repetition(source):
  sources = {
    'a': source(*_numbered(20), name='a'),
    'b': source(*_numbered(20, 20), name='b'),
  }
  config = Config(seed=0)
  prompts, fingerprint = heldout_prompts(sources, config, CHARS, 10)
  assert [p.prompt_id for p in prompts] == list(range(10))
  assert len(set(_rows(prompts))) == 10
  assert {row[0] for row in _rows(prompts)} == {'a', 'b'}
  again, same = heldout_prompts(sources, config, CHARS, 10)
  assert _rows(again) == _rows(prompts) and same == fingerprint
  fewer, same = heldout_prompts(sources, config, CHARS, 5)
  assert _rows(fewer) == _rows(prompts)[:5] and same == fingerprint
  other, changed = heldout_prompts(sources, Config(seed=1), CHARS, 10)
  assert _rows(other) != _rows(prompts) and changed != fingerprint
  source(*_numbered(19, 20), ('39', '40'), name='b')  # one answer is another
  _, changed = heldout_prompts(sources, config, CHARS, 10)
  assert changed != fingerprint


def test_heldout_of_too_few_rows_says_so(source, caplog):
  entry = source(*_numbered(3))
  prompts, _ = heldout_prompts({'a': entry}, Config(), CHARS, 5)
  assert sorted(_rows(prompts)) == ['a/0', 'a/1', 'a/2']
  assert '5 prompts asked for, only 3 exist' in caplog.text


def test_heldout_tells_of_training_rows(source, caplog):
  train = {'a': source(*_numbered(4), name='a', weight=1.0)}
  heldout = {'a': source(*_numbered(4, 3), name='b')}
  heldout_prompts(heldout, Config(train=train), CHARS, 4)
  assert "1 of 4 held-out prompts are also in prompts.train.a, such as '3'" in (
    caplog.text
  )


def test_heldout_refuses(source):
  sources = {'a': source(*_numbered(3))}
  with pytest.raises(ValueError, match='n=0'):
    heldout_prompts(sources, Config(), CHARS, 0)
  sources['a']['weight'] = 1.0
  with pytest.raises(ValueError, match=r'prompts\.heldout\.a\.weight is not'):
    heldout_prompts(sources, Config(), CHARS, 1)


# The contract of the folder


@pytest.mark.parametrize(
  'name, keys',
  [
    ('arithmetic', {}),
    ('jsonl', {'prompt': 'question', 'limit': 50}),
    ('reasoning_gym', {'size': 50}),
  ],
)
def test_every_source_keeps_the_contract(shared, name, keys):
  if name == 'jsonl':
    keys['path'] = str(shared / 'data' / 'gsm8k_test.jsonl')
  module = importlib.import_module(f'rl_jax.prompts.{name}')
  config = resolve.settings(module.Config, keys, 'prompts')
  rows = module.rows(config)
  assert len(rows) > 0
  assert rows[0] == module.rows(config)[0]
  assert all(isinstance(row, Row) for row in rows)
  json.dumps([row.answer for row in rows])
