"""Questions of reasoning-gym: numeric, reproducible, split by themselves."""

import re
import sys

import pytest

from rl_jax.prompts import reasoning_gym
from rl_jax.prompts.reasoning_gym import Config, rows


@pytest.mark.parametrize('task', reasoning_gym.TASKS)
def test_every_task_gives_numbers(task):
  found = rows(Config(task, size=10))
  assert found
  assert all(re.fullmatch(r'-?\d+(\.\d+)?', row.answer) for row in found)
  assert list(rows(Config(task, size=10))) == list(found)


def test_gold_answers_are_right():
  for row in rows(Config('chain_sum', size=50)):
    expression = re.search(r'problem: ([\d+ -]+) =', row.prompt).group(1)
    terms = re.findall(r'[+-]?\d+', expression.replace(' ', ''))
    assert int(row.answer) == sum(map(int, terms))


def test_splits_share_no_question_whatever_the_seed():
  # One-digit sums of two: a space of 200, so 1000 draws meet most of them.
  small = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1}
  train = {r.prompt for r in rows(Config(size=1000, params=small))}
  heldout = {
    r.prompt
    for r in rows(Config(size=1000, params=small, split='heldout', seed=1))
  }
  assert len(train) > 100 and len(heldout) > 5
  assert not train & heldout


def test_each_question_once():
  small = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1}
  found = [r.prompt for r in rows(Config(size=1000, params=small))]
  assert len(found) == len(set(found))


def test_params_reach_the_task():
  found = rows(Config(size=20, params={'min_terms': 3, 'max_terms': 3}))
  terms = [len(re.findall(r'\d+', row.prompt)) for row in found]
  assert set(terms) == {3}


@pytest.mark.parametrize(
  'keys, message',
  [
    ({'task': 'gdc'}, r"task='gdc'.*gcd"),
    ({'size': 0}, 'size=0'),
    ({'split': 'test'}, "split='test'"),
    ({'params': {'terms': 3}}, r'params\.terms.*max_terms'),
    ({'params': {'min_terms': 0}}, 'min_terms must be positive'),
    ({'params': {'min_terms': 'x'}}, 'refuses'),
  ],
)
def test_refuses(keys, message):
  with pytest.raises(ValueError, match=message):
    rows(Config(**keys))


def test_says_how_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'reasoning_gym', None)
  with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[reaso"):
    rows(Config())
