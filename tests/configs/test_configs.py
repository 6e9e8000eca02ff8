"""The shipped configs: every key stands in base, and every flag is heard."""

import dataclasses
import io
import itertools
import pathlib
import re
import sys
import tokenize

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from rl_jax import config
from rl_jax.algorithms import grpo
from rl_jax.verifiers import math_answer

# ml_collections loads the files in a way that Python is to drop.
pytestmark = pytest.mark.filterwarnings(
  r'ignore:the load_module\(\) method:DeprecationWarning'
)

FOLDER = pathlib.Path(__file__).resolve().parents[2] / 'configs'
BASE = FOLDER / 'base.py'
RUNS = sorted(
  p for p in FOLDER.glob('*.py') if p.name not in ('base.py', '__init__.py')
)


@pytest.fixture
def parse(monkeypatch):
  """The config of a command line, as launch/run.py reads it."""
  monkeypatch.syspath_prepend(str(FOLDER.parent))

  def parse(path, *arguments):
    values = flags.FlagValues()
    handle = config_flags.DEFINE_config_file(
      'config',
      accept_new_attributes=True,
      lock_config=False,
      flag_values=values,
    )
    line = ['run.py', f'--config={path}', *arguments]
    monkeypatch.setattr(sys, 'argv', line)  # ml_collections looks there
    assert values(line) == ['run.py']
    return handle.value

  return parse


def leaves(tree, prefix=''):
  for key, value in tree.items():
    if isinstance(value, ConfigDict) and len(value):
      yield from leaves(value, f'{prefix}{key}.')
    elif not isinstance(value, ConfigDict):
      yield f'{prefix}{key}', value


def defaults(cls):
  """Of a dataclass, by key; a factory's is what it makes."""
  return {
    f.name: f.default
    if f.default is not dataclasses.MISSING
    else f.default_factory()  # pyright: ignore[reportCallIssue]
    for f in dataclasses.fields(cls)
  }


def typed(values):
  """1 and 1.0 and True are equal, and not the same default."""
  return {key: (type(value), value) for key, value in values.items()}


@pytest.mark.parametrize('name', config._SECTIONS)
def test_base_has_every_key_of_a_section_with_its_default(parse, name):
  section = parse(BASE).to_dict()[name]
  assert typed(section) == typed(defaults(config._SECTIONS[name]))


def test_base_has_every_other_key_and_no_more(parse):
  base = parse(BASE).to_dict()
  top = {k: v for k, v in base.items() if not isinstance(v, dict)}
  assert typed(top) == typed(defaults(config.Run))
  plugins = {'algorithm': {'name': 'grpo'}, 'verifier': {'name': 'math_answer'}}
  assert {k: base[k] for k in base.keys() - top.keys()} == {
    **{name: base[name] for name in config._SECTIONS},
    **plugins,
  }


def commented_keys(source):
  """{line number: (key, whether a comment ends the line)} of key=value."""
  tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
  comments = {t.start[0] for t in tokens if t.type == tokenize.COMMENT}
  return {
    key.start[0]: (key.string, key.start[0] in comments)
    for key, equals in itertools.pairwise(tokens)
    if key.type == tokenize.NAME
    and equals.string == '='
    and not key.line.rstrip().endswith('(')  # a section begins
  }


def test_every_key_of_base_has_a_comment(parse):
  keys = commented_keys(BASE.read_text())
  assert len(keys) == len([*leaves(parse(BASE))]) + 3  # and three empty dicts
  bare = {line: key for line, (key, commented) in keys.items() if not commented}
  assert not bare


def test_the_check_of_comments_sees_a_bare_key():
  source = 'f(\n  a=dict(\n    b=1,  # why\n    c=(1,),\n  )\n)\n'
  assert commented_keys(source) == {3: ('b', True), 4: ('c', False)}


@pytest.mark.parametrize('path', RUNS, ids=lambda p: p.stem)
def test_every_run_is_legal_and_says_how_to_start_it(parse, path):
  settings = config.settings(parse(path))
  assert settings.run.num_steps > 0
  source = path.read_text()
  assert f'--config=configs/{path.name}' in source.split('"""')[1]


def another(value):
  """(argument, value): another value of the same type."""
  if isinstance(value, bool):
    return str(not value).lower(), not value
  if isinstance(value, int):
    return str(value + 1), value + 1
  if isinstance(value, float):
    return str(value / 2 + 0.25), value / 2 + 0.25
  if isinstance(value, tuple):
    return '(1,2,3)', (1, 2, 3)
  return 'other', 'other'


@pytest.mark.parametrize('path', [BASE, *RUNS], ids=lambda p: p.stem)
def test_every_key_is_heard_from_the_command_line(parse, path):
  keys = dict(leaves(parse(path)))
  assert len(keys) > 70
  wanted = {key: another(value) for key, value in keys.items()}
  arguments = [f'--config.{key}={text}' for key, (text, _) in wanted.items()]
  got = dict(leaves(parse(path, *arguments)))
  expected = {key: value for key, (_, value) in wanted.items()}
  assert typed(got) == typed(expected)


@pytest.mark.parametrize(
  'section, cls', [('algorithm', grpo.Config), ('verifier', math_answer.Config)]
)
def test_every_key_of_a_plugin_is_heard_though_no_file_has_it(
  parse, section, cls
):
  legal = {'kl_estimator': 'k1', 'aggregation': 'sequence_mean'}
  legal |= {
    'truncated': 'mask',
    'correction': 'truncated',
    'scale': 'none',
    'extract': 'boxed',
  }
  for key, default in defaults(cls).items():
    text, value = another(default)
    if key in legal:
      text = value = legal[key]
    settings = config.settings(
      parse(RUNS[0], f'--config.{section}.{key}={text}')
    )
    if section == 'algorithm':
      assert getattr(settings.algorithm_config, key) == value != default
    else:
      assert getattr(settings.verifier_config, key) == value != default


def test_the_flags_that_people_will_type(parse):
  path = FOLDER / 'arithmetic.py'
  settings = config.settings(
    parse(
      path,
      '--config.algorithm.clip_low=0.3',
      '--config.algorithm.kl_coef=1',  # an int where a float is meant
      '--config.evaluation.ks=1,2',
      '--config.evaluation.samples_per_prompt=2',
      '--config.prompts.train.sums.max_digits=1',
      '--config.prompts.train.sums.seed=5',  # stands in no file
      '--config.optimizer.learning_rate=1',
      '--config.learner.remat=true',
    )
  )
  assert settings.algorithm_config.clip_low == 0.3
  assert settings.algorithm_config.kl_coef == 1.0
  assert settings.evaluation.ks == (1, 2)
  assert settings.prompts.train['sums']['max_digits'] == 1
  assert settings.prompts.train['sums']['seed'] == 5
  assert settings.prompts.heldout['sums']['max_digits'] == 2
  assert typed({'rate': settings.optimizer.learning_rate}) == typed(
    {'rate': 1.0}
  )
  assert settings.learner.remat is True


@pytest.mark.parametrize(
  'argument, message',
  [
    ('num_step=3', 'Did you mean num_steps?'),
    ('learner.row_token=8', 'Did you mean learner.row_tokens?'),
    ('optimizer.clip_low=0.3', 'Did you mean algorithm.clip_low?'),
    ('algorithm.clip_lo=0.3', 'Did you mean algorithm.clip_low?'),
    ('algorithm.name=gpro', "Did you mean 'grpo'?"),
    ('verifier.extact=boxed', 'Did you mean verifier.extract?'),
  ],
)
def test_a_typo_on_the_command_line_is_refused(parse, argument, message):
  overridden = parse(FOLDER / 'arithmetic.py', f'--config.{argument}')
  with pytest.raises(ValueError, match=re.escape(message)):
    config.settings(overridden)


def test_a_typo_in_a_section_is_refused_by_the_flags_themselves(parse):
  with pytest.raises(KeyError, match='Did you mean "optimizer"'):
    parse(BASE, '--config.optimizr.b1=0.5')


@pytest.mark.parametrize('argument', ['num_steps=many', 'num_steps=1.5'])
def test_a_value_of_a_wrong_type_is_refused_by_the_flags(parse, argument):
  with pytest.raises(flags.IllegalFlagValueError, match='num_steps'):
    parse(BASE, f'--config.{argument}')
