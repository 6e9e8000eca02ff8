"""Problems are right, complete, and held out by themselves."""

import re

import pytest

from rl_jax.prompts import arithmetic
from rl_jax.prompts.arithmetic import Config, rows


def _prompts(**keys) -> set[str]:
  return {row.prompt for row in rows(Config(**keys))}


def test_answers_are_right():
  checked = {'+': lambda a, b: a + b, '-': lambda a, b: a - b}
  checked['*'] = lambda a, b: a * b
  all_rows = rows(Config(max_digits=1, operators='+-*', heldout_fraction=0.0))
  assert len(all_rows) == 300
  for row in all_rows:
    a, op, b = re.fullmatch(r'(\d)([-+*])(\d)=', row.prompt).groups()
    assert row.answer == row.solution == str(checked[op](int(a), int(b)))
  assert rows(Config(max_digits=1, operators='-', heldout_fraction=0.0))[
    3
  ] == arithmetic.base.Row('0-3=', '-3', '-3')


def test_operands_have_the_digits_asked_for():
  keys = dict(min_digits=2, max_digits=2, heldout_fraction=0.0)
  assert _prompts(**keys) == {
    f'{a}+{b}=' for a in range(10, 100) for b in range(10, 100)
  }
  with pytest.raises(ValueError, match='min_digits=3'):
    Config(min_digits=3, max_digits=2)


@pytest.mark.parametrize('seeds', [(0, 0), (0, 1)])
def test_splits_share_nothing_and_miss_nothing(seeds):
  train = _prompts(seed=seeds[0])
  heldout = _prompts(seed=seeds[1], split='heldout')
  assert not train & heldout
  assert train | heldout == {
    f'{a}+{b}=' for a in range(100) for b in range(100)
  }
  # 1000 expected of 10,000; 30 is the standard deviation
  assert 880 < len(heldout) < 1120


def test_splits_of_a_sampled_space_share_nothing():
  train = _prompts(max_digits=3, num_rows=20_000)
  heldout = _prompts(max_digits=3, num_rows=20_000, split='heldout', seed=1)
  assert len(train) == len(heldout) == 20_000
  assert not train & heldout


def test_split_is_the_same_on_every_machine():
  # Frozen values: a change here moves problems between published splits.
  heldout = [r.prompt for r in rows(Config(split='heldout'))][:3]
  assert heldout == ['0+3=', '0+5=', '0+14=']


@pytest.mark.parametrize('max_digits', [2, 4])
def test_num_rows_samples_by_seed(max_digits):
  def draw(seed):
    return rows(Config(max_digits=max_digits, num_rows=50, seed=seed))

  assert len({row.prompt for row in draw(0)}) == 50
  assert list(draw(0)) == list(draw(0))
  assert list(draw(0)) != list(draw(1))


@pytest.mark.parametrize(
  'keys, message',
  [
    ({'operators': '/'}, "operators='/'"),
    ({'operators': ''}, "operators=''"),
    ({'operators': '++'}, 'each once'),
    ({'max_digits': 0}, 'max_digits=0'),
    ({'num_rows': -1}, 'num_rows=-1'),
    ({'split': 'test'}, "split='test'"),
    ({'heldout_fraction': 1.0}, 'heldout_fraction=1.0'),
    ({'heldout_fraction': 0.0, 'split': 'heldout'}, 'no problems'),
    ({'num_rows': 9_999}, 'has 8992'),
    ({'max_digits': 3}, '1 to 450000'),
    ({'max_digits': 3, 'num_rows': 900_000}, '1 to 450000'),
  ],
)
def test_refuses(keys, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    rows(Config(**keys))
