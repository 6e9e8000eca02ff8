"""Plugins by name or path, and sections of a config as strict dataclasses."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import pytest
from ml_collections import ConfigDict

from rl_jax import resolve

PLUGINS = {
  'prompts': ['arithmetic', 'jsonl', 'reasoning_gym'],
  'verifiers': ['math_answer'],
  'algorithms': ['grpo', 'rloo'],
  'models': ['llama', 'qwen2', 'qwen3'],
}
NO_PLUGINS = {
  'prompts': ['base', 'stream', 'tokenizer'],
  'verifiers': ['service', 'supervisor'],
  'algorithms': ['base'],
  'models': ['base', 'layers', 'weights'],
}


@dataclasses.dataclass(frozen=True)
class Section:
  path: str
  count: int = 1
  rate: float = 0.5
  flag: bool = False
  name_of_it: str = 'x'
  ks: tuple[int, ...] = (1,)
  table: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Named:
  name: str = 'a'


# ---- plugins


@pytest.mark.parametrize('folder', PLUGINS)
def test_available_are_the_plugins_and_nothing_else(folder):
  available = resolve.available(folder)
  assert set(PLUGINS[folder]) <= set(available)
  assert not set(NO_PLUGINS[folder]) & set(available)
  assert available == sorted(available)
  for name in available:
    module = resolve.plugin(folder, name)
    assert module is importlib.import_module(f'rl_jax.{folder}.{name}')


@pytest.mark.parametrize('folder', PLUGINS)
def test_a_module_that_is_no_plugin_is_refused(folder):
  contract = importlib.import_module(f'rl_jax.{folder}').PLUGIN
  for name in NO_PLUGINS[folder]:
    with pytest.raises(ValueError, match='is no plugin') as raised:
      resolve.plugin(folder, name)
    assert f'{folder}: {name!r}' in str(raised.value)
    assert f'rl_jax/{folder}/__init__.py' in str(raised.value)
    assert any(f'lacks {part}' in str(raised.value) for part in contract)
    assert all(legal in str(raised.value) for legal in PLUGINS[folder])


@pytest.mark.parametrize(
  'folder, name, suggestion',
  [
    ('algorithms', 'gpro', "Did you mean 'grpo'?"),
    ('verifiers', 'math-answer', "Did you mean 'math_answer'?"),
    ('prompts', 'arithmetics', "Did you mean 'arithmetic'?"),
    ('prompts', 'zzz', 'Legal: '),
    ('verifiers', '', 'Legal: '),
    ('algorithms', 'nobodys_paper.mine', 'Legal: '),
    ('algorithms', 'json.nothing', 'Legal: '),
  ],
)
def test_an_unknown_plugin_lists_what_exists(folder, name, suggestion):
  with pytest.raises(ValueError, match=f'{folder}: there is no') as raised:
    resolve.plugin(folder, name)
  message = str(raised.value)
  assert repr(name) in message and suggestion in message
  assert all(legal in message for legal in PLUGINS[folder])
  assert 'a module of your own by its import path' in message
  if 'Did you mean' not in suggestion:
    assert 'Did you mean' not in message


@pytest.fixture
def paper(tmp_path, monkeypatch):
  """Writes modules of a package of its own name, `paper_of_tests`."""
  folder = tmp_path / 'paper_of_tests'
  folder.mkdir()
  monkeypatch.syspath_prepend(str(tmp_path))

  def write(name, text):
    (folder / f'{name}.py').write_text(text)
    importlib.invalidate_caches()
    return f'paper_of_tests.{name}'

  return write


def test_a_dotted_path_is_imported_as_it_stands(paper):
  path = paper('mine', 'Config = advantages = loss = None\n')
  assert resolve.plugin('algorithms', path).__name__ == path
  with pytest.raises(
    ValueError, match='lacks check_answer, verify, examples; the contract'
  ):
    resolve.plugin('verifiers', path)
  with pytest.raises(ValueError, match='there is no'):
    resolve.plugin('algorithms', 'paper_of_tests.yours')


@pytest.mark.parametrize(
  'missing', ['package_that_nobody_has', 'paper_of_tests.part_that_is_missing']
)
def test_what_a_plugin_cannot_import_is_not_the_plugin(paper, missing):
  path = paper('needy', f'import {missing}\n')
  with pytest.raises(ModuleNotFoundError) as raised:
    resolve.plugin('algorithms', path)
  assert raised.value.name == missing


def test_an_import_error_of_a_plugin_is_raised_as_it_is(paper):
  path = paper('wrong', 'from json import no_such_function\n')
  with pytest.raises(ImportError, match='no_such_function'):
    resolve.plugin('algorithms', path)


# ---- sections


def test_a_section_becomes_its_dataclass():
  given = {'path': 'p', 'rate': 2, 'ks': [1, 2]}
  section = resolve.settings(Section, given, 'sums')
  assert section == Section('p', rate=2.0, ks=(1, 2))
  assert type(section.rate) is float and type(section.ks) is tuple


def test_a_config_dict_becomes_plain():
  given = ConfigDict({'path': 'p', 'table': {'a': {'b': 1}}, 'ks': (3,)})
  section = resolve.settings(Section, given, 'sums')
  assert section == Section('p', table={'a': {'b': 1}}, ks=(3,))
  assert type(section.table) is dict and type(section.table['a']) is dict


def test_name_is_a_key_where_the_dataclass_has_it():
  assert resolve.settings(Named, {'name': 'b'}, 'x') == Named('b')


@pytest.mark.parametrize(
  'key, value, kind',
  [
    ('count', '3', 'int'),
    ('count', 3.0, 'int'),
    ('count', True, 'int'),
    ('count', None, 'int'),
    ('rate', '0.1', 'float'),
    ('rate', True, 'float'),
    ('rate', None, 'float'),
    ('flag', 1, 'bool'),
    ('flag', 'False', 'bool'),
    ('name_of_it', 3, 'str'),
    ('ks', 3, 'tuple'),
    ('ks', '1,2', 'tuple'),
    ('path', 3, 'str'),  # no default to compare with
    ('table', 3, 'Mapping'),
  ],
)
def test_a_value_of_a_wrong_type_is_refused(key, value, kind):
  given = {'path': 'p', key: value}
  with pytest.raises(ValueError) as raised:
    resolve.settings(Section, given, 'sums')
  assert str(raised.value) == f'sums.{key}={value!r}: must be {kind}.'


def test_a_required_key_is_asked_for():
  with pytest.raises(
    ValueError, match=r'sums: missing path; .*--config\.sums\.path='
  ):
    resolve.settings(Section, {'count': 2}, 'sums')


@pytest.mark.parametrize(
  'key, message',
  [
    ('coutn', r'sums\.coutn is not a key\. Did you mean sums\.count\?'),
    ('name', r'sums\.name is not a key\. Legal: count, flag'),
    ('zzz', r'sums\.zzz is not a key\. Legal: count, flag, ks, name_of_it, pa'),
    # rllm#447: a key that stands in the wrong section.
    ('warmup', r'sums\.warmup is not a key\. Did you mean optimizer\.warmup\?'),
    ('seed', r'sums\.seed is not a key\. Did you mean seed or prompts\.seed\?'),
  ],
)
def test_an_unknown_key_says_where_it_belongs(key, message):
  keys = {
    '': ['seed'],
    'sums': ['count'],
    'prompts': ['seed'],
    'optimizer': ['warmup', 'counter'],
  }
  with pytest.raises(ValueError, match=message):
    resolve.settings(Section, {'path': 'p', key: 1}, 'sums', keys)


def test_a_key_at_the_top_has_no_section_in_its_name():
  with pytest.raises(
    ValueError, match=r'^nam is not a key\. Did you mean name'
  ):
    resolve.settings(Named, {'nam': 'b'}, '')


def test_a_retired_key_names_the_new_one(monkeypatch):
  monkeypatch.setitem(resolve.RETIRED, 'sums.number', 'sums.count')
  with pytest.raises(
    ValueError, match=r'sums\.number is retired: use sums\.count'
  ):
    resolve.settings(Section, {'path': 'p', 'number': 1}, 'sums')
  with pytest.raises(ValueError, match='is not a key'):  # of that section only
    resolve.settings(Section, {'path': 'p', 'number': 1}, 'others')
