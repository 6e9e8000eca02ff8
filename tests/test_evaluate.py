"""pass@k against counting, intervals against numbers worked by hand."""

import itertools
import math

import numpy as np
import pytest

from rl_jax import evaluate, resolve
from rl_jax.types import Group, Prompt, Rollout, SamplingParams, Verdict


def make_group(*outcomes):
  """A group of (status, score, finish reason, completion tokens, lenient)."""
  rollouts = [
    Rollout(
      sample_index=i,
      tokens=np.zeros(num_tokens + 1, np.int32),
      loss_mask=np.float32([0] + [1] * num_tokens),
      behavior_logprobs=np.zeros(num_tokens + 1, np.float32),
      kept_logmass=np.zeros(num_tokens + 1, np.float32),
      policy_versions=np.int32([-1] + [0] * num_tokens),
      finish_reason=finish,
      text='aaaa',
      verdict=Verdict(status, score, '', *lenient),
    )
    for i, (status, score, finish, num_tokens, *lenient) in enumerate(outcomes)
  ]
  return Group(Prompt(0, 'a/0', 'x', np.int32([0]), '1'), rollouts)


PASS = ('pass', 1.0, 'stop', 1)
FAIL = ('fail', 0.0, 'stop', 1)


@pytest.mark.parametrize(
  'every, due', [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4])]
)
def test_when_evaluation_is_due(every, due):
  config = evaluate.Config(every_steps=every)
  assert [step for step in range(6) if config.is_due(step)] == due


@pytest.mark.parametrize('n', [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
  for c, k in itertools.product(range(n + 1), range(1, n + 1)):
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    want = sum(map(any, draws)) / len(draws)
    assert evaluate.pass_at_k(c, n, k) == want


def test_pass_at_k_by_hand():
  assert evaluate.pass_at_k(1, 4, 4) == 1.0  # a bootstrap says 0.684
  assert evaluate.pass_at_k(1, 4, 2) == 0.5
  assert evaluate.pass_at_k(0, 4, 4) == 0.0
  # 1 - C(3999, 1000) / C(4000, 1000) = 1000 / 4000, with numbers of 900 digits
  assert evaluate.pass_at_k(1, 4000, 1000) == 0.25


def test_pass_at_k_refuses():
  with pytest.raises(ValueError, match=r'k=5.*draw more samples'):
    evaluate.pass_at_k(1, 4, 5)
  with pytest.raises(ValueError, match='k=0'):
    evaluate.pass_at_k(1, 4, 0)
  with pytest.raises(ValueError, match='num_correct=5'):
    evaluate.pass_at_k(5, 4, 1)


def test_wilson_by_hand():
  # z = 2, n = 4, mean 1/2: centre 1/2, half (1/2) * 2 * sqrt(1/16 + 1/16).
  low, high = evaluate.wilson(0.5, 4, z=2)
  assert low == pytest.approx(0.5 - math.sqrt(1 / 8), abs=1e-15)
  assert high == pytest.approx(0.5 + math.sqrt(1 / 8), abs=1e-15)
  # At 0 the upper end is (z^2 / n) / (1 + z^2 / n) = 1/2.
  assert evaluate.wilson(0.0, 4, z=2) == (0.0, pytest.approx(0.5, abs=1e-15))
  assert evaluate.wilson(1.0, 4, z=2) == (pytest.approx(0.5, abs=1e-15), 1.0)
  # Published: 10 of 20, 95%: 0.299 to 0.701.
  assert evaluate.wilson(0.5, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)


def test_wilson_holds_its_mean_and_narrows():
  for n, tenths in itertools.product((1, 3, 100, 10**6), range(11)):
    low, high = evaluate.wilson(tenths / 10, n)
    assert 0 <= low <= tenths / 10 <= high <= 1
    wide_low, wide_high = evaluate.wilson(tenths / 10, max(1, n // 2))
    assert high - low <= wide_high - wide_low
  with pytest.raises(ValueError, match='n=0'):
    evaluate.wilson(0.5, 0)
  with pytest.raises(ValueError, match=r'mean=1\.5'):
    evaluate.wilson(1.5, 3)


def test_summarise_by_hand():
  groups = [
    make_group(
      PASS, ('pass', 1.0, 'length', 9), ('timeout', 0.0, 'stop', 2), FAIL
    ),
    make_group(
      ('fail', 0.5, 'length', 9, True),
      ('error', 1.0, 'stop', 4),
      ('refused', 0.0, 'stop', 4),
      ('fail', 0.0, 'stop', 2),
    ),
  ]
  result = evaluate.summarise(groups, ks=(2, 4))
  assert (result.num_prompts, result.num_samples) == (2, 8)
  values = {k: p['value'] for k, p in result.pass_at.items()}
  # pass@2 of 2 right of 4: 1 - C(2, 2) / C(4, 2) = 5/6.
  assert values == {1: 0.25, 2: pytest.approx(5 / 12), 4: 0.5}
  assert (result.pass_at[1]['low'], result.pass_at[1]['high']) == (
    evaluate.wilson(0.25, 2)
  )
  assert result.truncation_rate == 2 / 8
  assert result.accepted_stop_rate == 1 / 2
  assert result.lenient_pass_at_1 == (2 + 1) / 8
  assert result.error_rate == 2 / 8
  assert result.mean_completion_tokens == (1 + 9 + 2 + 1 + 9 + 4 + 4 + 2) / 8
  assert result.mean_score == (1 + 1 + 0.5) / 8  # the error's 1.0 is none
  low, high = evaluate.wilson(0.5, 2)
  assert result.as_dict() == {
    'pass_at_1': 0.25,
    'low': result.pass_at[1]['low'],
    'high': result.pass_at[1]['high'],
    'n': 2,
    'pass_at_2': values[2],
    'pass_at_2_low': result.pass_at[2]['low'],
    'pass_at_2_high': result.pass_at[2]['high'],
    'pass_at_4': 0.5,
    'pass_at_4_low': low,
    'pass_at_4_high': high,
    'num_samples': 8,
    'truncation_rate': 0.25,
    'accepted_stop_rate': 0.5,
    'lenient_pass_at_1': 0.375,
    'error_rate': 0.25,
    'mean_completion_tokens': 4.0,
    'mean_score': 0.3125,
  }


def test_interval_counts_prompts_not_samples():
  once = evaluate.summarise([make_group(PASS), make_group(FAIL)], (1,))
  often = evaluate.summarise(
    [make_group(*[PASS] * 50), make_group(*[FAIL] * 50)], (1,)
  )
  assert once.pass_at == often.pass_at


def test_interval_covers_the_truth_for_fractional_estimates():
  """Prompts of Beta(2, 2) difficulty, 4 samples: covered >= 95% of the time."""
  rng = np.random.default_rng(0)
  covered = 0
  for _ in range(2000):
    right = rng.binomial(4, rng.beta(2, 2, size=40))
    low, high = evaluate.wilson(float(right.mean()) / 4, 40)
    covered += low <= 0.5 <= high
  assert covered / 2000 >= 0.95


def test_summarise_of_nothing():
  with pytest.raises(ValueError, match='at least one prompt'):
    evaluate.summarise([], (1,))
  with pytest.raises(ValueError, match='k=2'):
    evaluate.summarise([make_group(PASS)], (2,))
  result = evaluate.summarise([make_group(FAIL)], ())
  assert math.isnan(result.accepted_stop_rate)
  assert result.pass_at[1]['value'] == 0


@pytest.mark.parametrize(
  'section, message',
  [
    ({'ks': [1, 8], 'samples_per_prompt': 4}, 'pass@8 needs .* >= 8, .* is 4'),
    ({'ks': (0,)}, r'evaluation\.ks=\(0,\)'),
    ({'num_prompts': 0}, r'evaluation\.num_prompts=0'),
    ({'samples_per_prompt': 0}, r'evaluation\.samples_per_prompt=0'),
    ({'max_tokens': -1}, r'evaluation\.max_tokens=-1'),
    ({'every_steps': -1}, r'evaluation\.every_steps=-1'),
    ({'top_p': 0.0}, r'evaluation\.top_p=0\.0'),
    ({'temperature': 0, 'samples_per_prompt': 4}, 'are the same'),
    ({'num_prompt': 4}, 'Did you mean evaluation.num_prompts'),
  ],
)
def test_config_is_checked_up_front(section, message):
  with pytest.raises(ValueError, match=message):
    resolve.settings(evaluate.Config, section, 'evaluation')


def test_sampling_keeps_what_evaluation_does_not_set():
  training = SamplingParams(
    max_tokens=64, temperature=0.7, top_p=0.9, stop_ids=(2, 3)
  )
  assert evaluate.Config().sampling(training) == SamplingParams(
    max_tokens=64, stop_ids=(2, 3)
  )
  config = evaluate.Config(
    max_tokens=8, temperature=0.5, top_k=4, top_p=0.5, min_p=0.1
  )
  assert config.sampling(training) == SamplingParams(
    max_tokens=8,
    temperature=0.5,
    top_k=4,
    top_p=0.5,
    min_p=0.1,
    stop_ids=(2, 3),
  )
