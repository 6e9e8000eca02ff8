"""Aggregation, KL, groups without signal: hand-computed numbers."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import base, grpo, rloo
from rl_jax.types import Group, Prompt, Rollout, Verdict

PROMPT = Prompt(0, 'rows/0', '1+2=', np.array([3, 12], np.int32), '3')


def _rollout(index, score=1.0, status=None, tokens=3, finish='stop'):
  zeros = np.zeros(2 + tokens, np.float32)
  mask = zeros.copy()
  mask[2:] = 1
  status = status or ('pass' if score else 'fail')
  return Rollout(
    sample_index=index,
    tokens=np.arange(2 + tokens, dtype=np.int32),
    loss_mask=mask,
    behavior_logprobs=zeros,
    kept_logmass=zeros,
    policy_versions=np.where(mask > 0, 4, -1),
    finish_reason=finish,
    text='3',
    verdict=Verdict(status, score, ''),
  )


def _group(scores, **changes):
  """Rollouts of these scores; None is an error of the infrastructure."""
  return Group(
    PROMPT,
    [
      _rollout(i, 0.0, 'error', **changes)
      if score is None
      else _rollout(i, score, **changes)
      for i, score in enumerate(scores)
    ],
  )


def _select(groups, advantages=None, **keys):
  config = grpo.Config(scale='none', **keys)
  if advantages is None:
    advantages = lambda r: grpo.advantages(r, config)  # noqa: E731
  return base.select(groups, advantages, config)


def _found(selection):
  """Sample index -> advantage, of selections of one group."""
  return {s.rollout.sample_index: s.advantage for s in selection.scored}


def _counts(selection):
  return {k: len(v) for k, v in selection.excluded.items() if v}


# ---- selection


def test_a_rollout_that_was_not_judged_leaves_statistics_and_loss():
  # Of [1, 0, error, 0] three count: mean 1/3, not 1/4.
  selection = _select([_group([1.0, 0.0, None, 0.0])])
  assert _found(selection) == pytest.approx({0: 2 / 3, 1: -1 / 3, 3: -1 / 3})
  assert _counts(selection) == {'unscored': 1}
  assert selection.num_groups == 1


@pytest.mark.parametrize('status', ['error', 'refused'])
def test_statuses_that_are_no_judgement_leave(status):
  group = Group(
    PROMPT, [_rollout(0, 1.0), _rollout(1, 0.0), _rollout(2, 0.0, status)]
  )
  assert _found(_select([group])) == pytest.approx({0: 0.5, 1: -0.5})


def test_a_timeout_of_the_completion_counts_as_wrong():
  group = Group(PROMPT, [_rollout(0, 1.0), _rollout(1, 0.0, 'timeout')])
  assert _found(_select([group])) == pytest.approx({0: 0.5, 1: -0.5})


def test_reward_zero_is_a_reward():
  selection = _select([_group([0.0, 0.5])])
  assert _found(selection) == pytest.approx({0: -0.25, 1: 0.25})


@pytest.mark.parametrize(
  'scores',
  [
    [0.0] * 8,
    [1.0] * 8,
    [0.1] * 8,  # its mean is not 0.1 in float32, nor is 0.7's
    [0.7] * 16,
    [float(np.float32(0.1))] * 8,
    [0.1] * 7 + [None],
  ],
)
@pytest.mark.parametrize('algorithm', [grpo, rloo])
def test_constant_groups_are_flagged_whatever_the_rounding(scores, algorithm):
  config = algorithm.Config()
  selection = base.select(
    [_group(scores)], lambda r: algorithm.advantages(r, config), config
  )
  assert selection.scored == []
  assert selection.num_groups == 0
  assert len(selection.excluded['no_signal']) == sum(
    s is not None for s in scores
  )


@pytest.mark.parametrize('scores', [[1.0], [1.0, None], [None, None], []])
def test_groups_with_fewer_than_two_judged_give_no_signal(scores):
  selection = _select([_group(scores)])
  assert selection.scored == []
  assert selection.num_groups == 0
  lost = sum(len(v) for v in selection.excluded.values())
  assert lost == len(scores)


def test_groups_do_not_see_each_other():
  # The first group lost a rollout and the last has other rewards.
  groups = [_group([1.0, None, 0.0, 0.0]), _group([1.0, 0.0]), _group([0.3, 0])]
  selection = _select(groups)
  found = [s.advantage for s in selection.scored]
  expected = [2 / 3, -1 / 3, -1 / 3, 0.5, -0.5, 0.15, -0.15]
  np.testing.assert_allclose(found, expected, rtol=1e-14)
  assert selection.num_groups == 3


def test_constant_groups_leave_the_denominator():
  informative = _group([1.0, 0.0])
  selection = _select([informative] + [_group([1.0, 1.0])] * 3)
  lengths = [s.rollout.num_completion_tokens for s in selection.scored]
  np.testing.assert_allclose(
    base.token_weights(lengths, base.Config()), [1 / 6, 1 / 6]
  )


def _cut_group():
  """Scores 1, 1, 0; the first was cut, though its answer is right."""
  return Group(
    PROMPT,
    [_rollout(0, 1.0, finish='length'), _rollout(1, 1.0), _rollout(2, 0.0)],
  )


@pytest.mark.parametrize(
  ('truncated', 'expected', 'num_excluded'),
  [
    ('keep', {0: 1 / 3, 1: 1 / 3, 2: -2 / 3}, 0),
    ('zero', {0: -1 / 3, 1: 2 / 3, 2: -1 / 3}, 0),
    ('mask', {1: 1 / 3, 2: -2 / 3}, 1),  # counts for the mean
  ],
)
def test_what_becomes_of_truncated_completions(
  truncated, expected, num_excluded
):
  selection = _select([_cut_group()], truncated=truncated)
  assert _found(selection) == pytest.approx(expected)
  assert len(selection.excluded['truncated']) == num_excluded


@pytest.mark.parametrize('scores', [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
def test_signal_needs_unequal_scores_and_unequal_rewards(scores):
  """A rule about length gives a group of equal verdicts no signal."""
  cut = _rollout(0, scores[0], finish='length')
  rest = [_rollout(i, s) for i, s in enumerate(scores[1:], start=1)]
  selection = _select([Group(PROMPT, [cut, *rest])], truncated='zero')
  assert not selection.scored
  assert len(selection.excluded['no_signal']) == 3


def test_truncation_is_what_the_engine_says_not_the_last_token():
  # 'stop' with any last token is whole; 'length' is cut though it may end
  # with a stop id.
  assert base.reward(_rollout(0), base.Config(truncated='zero')) == 1.0
  cut = _rollout(0, finish='length')
  assert base.reward(cut, base.Config(truncated='zero')) == 0.0
  assert base.reward(cut, base.Config(truncated='keep')) == 1.0
  assert base.reward(cut, base.Config(truncated='mask')) == 1.0


def test_masked_rows_leave_numerator_and_denominator():
  group = Group(
    PROMPT,
    [
      _rollout(0, 1.0, tokens=2),
      _rollout(1, 0.0, tokens=4),
      _rollout(2, 1.0, tokens=9, finish='length'),
      _rollout(3, 0.0, tokens=9, finish='length'),
    ],
  )
  selection = _select([group], truncated='mask')
  lengths = [s.rollout.num_completion_tokens for s in selection.scored]
  assert lengths == [2, 4]
  weights = base.token_weights(lengths, base.Config())
  np.testing.assert_allclose(weights, [1 / 6, 1 / 6])


def test_a_completion_without_tokens_leaves_the_loss_only():
  group = Group(PROMPT, [_rollout(0, 1.0, tokens=0), _rollout(1, 0.0)])
  selection = _select([group])
  assert _found(selection) == pytest.approx({1: -0.5})
  assert _counts(selection) == {'empty': 1}


def test_every_rollout_is_scored_or_excluded_with_one_reason():
  groups = [_group([1.0, None, 0.0]), _group([1.0, 1.0]), _cut_group()]
  selection = _select(groups, truncated='mask')
  excluded = sum(len(v) for v in selection.excluded.values())
  assert len(selection.scored) + excluded == 8
  assert set(selection.excluded) == set(base.EXCLUSIONS)


# ---- aggregation


@pytest.mark.parametrize(
  ('aggregation', 'expected'),
  [
    ('token_mean', [1 / 8, 1 / 8, 1 / 8]),
    ('sequence_mean', [1 / 6, 1 / 3, 1 / 15]),  # 1/(2*3), 1/(1*3), 1/(5*3)
    ('constant', [1 / 30, 1 / 30, 1 / 30]),  # 1/(10*3)
  ],
)
def test_weights_of_sequences_of_2_1_and_5_tokens(aggregation, expected):
  config = base.Config(aggregation=aggregation, constant=10.0)
  weights = base.token_weights([2, 1, 5], config)
  np.testing.assert_allclose(weights, expected, rtol=1e-15)


@pytest.mark.parametrize('aggregation', base.AGGREGATIONS)
def test_an_empty_sequence_leaves_every_count(aggregation):
  config = base.Config(aggregation=aggregation, constant=10.0)
  weights = base.token_weights([2, 0, 5], config)
  np.testing.assert_array_equal(
    weights[[0, 2]], base.token_weights([2, 5], config)
  )
  assert np.isfinite(weights).all()


@pytest.mark.parametrize('aggregation', base.AGGREGATIONS)
@pytest.mark.parametrize('lengths', [[], [0], [0, 0]])
def test_nothing_to_weigh_is_finite(aggregation, lengths):
  config = base.Config(aggregation=aggregation)
  weights = base.token_weights(lengths, config)
  assert weights.shape == (len(lengths),)
  assert np.isfinite(weights).all()


def test_aggregations_of_ragged_losses_against_their_names():
  losses = [np.array([1.0, 3.0]), np.array([5.0]), np.arange(5.0)]
  expected = {
    'token_mean': (4 + 5 + 10) / 8,
    'sequence_mean': (2 + 5 + 2) / 3,
    'constant': (4 + 5 + 10) / 4 / 3,
  }
  for aggregation, value in expected.items():
    config = base.Config(aggregation=aggregation, constant=4.0)
    weights = base.token_weights([len(x) for x in losses], config)
    total = sum(w * x.sum() for w, x in zip(weights, losses))
    assert total == pytest.approx(value, rel=1e-14)


# ---- KL


def _inputs(logprobs, reference, mask=None, behavior=None):
  logprobs = jnp.asarray(logprobs, jnp.float32)
  fill = lambda x, default: (  # noqa: E731
    default if x is None else jnp.asarray(x, jnp.float32)
  )
  return base.LossInputs(
    logprobs=logprobs,
    behavior_logprobs=fill(behavior, logprobs),
    reference_logprobs=jnp.asarray(reference, jnp.float32),
    advantages=jnp.zeros_like(logprobs),
    loss_mask=fill(mask, jnp.ones_like(logprobs)),
  )


@pytest.mark.parametrize(
  ('estimator', 'expected'),
  [
    # pi = 1/2, reference = 1/4: log_r = log(1/2) = -0.693147
    ('k1', [0.693147, -0.693147]),
    ('k2', [0.240227, 0.240227]),
    ('k3', [0.193147, 0.306853]),  # 1/2 - 1 + 0.693147; 2 - 1 - 0.693147
  ],
)
def test_kl_estimators_against_their_formulas(estimator, expected):
  inputs = _inputs([np.log([1 / 2, 1 / 4])], [np.log([1 / 4, 1 / 2])])
  found = base.kl(inputs, base.Config(kl_estimator=estimator))
  np.testing.assert_allclose(found, [expected], rtol=1e-5)


@pytest.mark.parametrize('estimator', ['k2', 'k3'])
def test_kl_of_a_token_is_never_negative_and_zero_only_if_equal(estimator):
  config = base.Config(kl_estimator=estimator)
  rng = np.random.default_rng(0)
  logprobs, reference = -rng.exponential(2.0, (2, 1, 1000))
  found = np.asarray(base.kl(_inputs(logprobs, reference), config))
  assert (found > 0).all()
  np.testing.assert_array_equal(base.kl(_inputs(logprobs, logprobs), config), 0)
  # expm1 keeps small ones from drowning in rounding: d^2 / 2.
  small = base.kl(_inputs([[-1.0]], [[-1.0 - 2.0**-10]]), config)
  np.testing.assert_allclose(small, 2.0**-21, rtol=1e-2)


@pytest.mark.parametrize('estimator', ['k1', 'k3'])
def test_the_mean_over_samples_is_the_kl_to_the_reference(estimator):
  rng = np.random.default_rng(0)
  pi, reference = rng.dirichlet(np.ones(6), 2)
  exact = np.sum(pi * np.log(pi / reference))  # KL(pi || reference)
  other = np.sum(reference * np.log(reference / pi))
  assert abs(exact - other) > 0.1  # or the direction would not be tested
  drawn = rng.choice(6, (1, 200_000), p=pi)
  inputs = _inputs(np.log(pi)[drawn], np.log(reference)[drawn])
  tokens = base.kl(inputs, base.Config(kl_estimator=estimator))
  standard_error = float(tokens.std()) / 200_000**0.5
  assert abs(float(tokens.mean()) - exact) < 4 * standard_error + 1e-4


def test_kl_ignores_what_the_mask_hides():
  inputs = _inputs([[-1.0, np.nan]], [[-2.0, 3.0]], mask=[[1, 0]])

  def total(logprobs):
    return base.kl(inputs._replace(logprobs=logprobs), base.Config()).sum()

  value, gradient = jax.value_and_grad(total)(inputs.logprobs)
  np.testing.assert_allclose(value, np.exp(-1.0), rtol=1e-6)
  np.testing.assert_allclose(gradient, [[1 - np.exp(-1.0), 0]], rtol=1e-6)


def test_kl_is_added_to_what_is_minimised():
  inputs = _inputs([[-1.0]], [[-2.0]])
  algorithm: Any = types.SimpleNamespace(
    loss=lambda inputs, config: (jnp.ones((1, 1)), {})
  )
  loss, metrics = base.bind(algorithm, base.Config(kl_coef=0.5))(inputs)
  np.testing.assert_allclose(loss, 1 + 0.5 * np.exp(-1.0), rtol=1e-6)
  np.testing.assert_allclose(metrics['kl_reference'], np.exp(-1.0), rtol=1e-6)
  loss, metrics = base.bind(algorithm, base.Config())(inputs)
  assert (loss == 1).all()
  assert metrics == {}


@pytest.mark.parametrize('gap', [1e4, -1e4])
def test_far_log_ratios_stay_finite(gap):
  inputs = _inputs([[0.0]], [[gap]], behavior=[[gap]])
  assert abs(float(base.log_ratio(inputs)[0, 0])) == base.MAX_LOG_RATIO
  for estimator in base.KL_ESTIMATORS:
    found = base.kl(inputs, base.Config(kl_estimator=estimator))
    assert np.isfinite(found).all()


# ---- a generator in other numbers


def test_a_drift_of_the_generator_is_weighed_and_not_clipped():
  """Ratios 1/2, 1, 3/2 and 4 to the generator; GRPO clips at 1.2."""
  ratios = np.array([[0.5, 1.0, 1.5, 4.0]])
  inputs = _inputs([[-1.0] * 4], [[-1.0] * 4], behavior=-1 - np.log(ratios))
  inputs = inputs._replace(advantages=jnp.ones((1, 4)))

  def gradient(**keys):
    loss = base.bind(grpo, grpo.Config(**keys))

    def total(logprobs):
      token_loss, metrics = loss(inputs._replace(logprobs=logprobs))
      return token_loss.sum(), metrics

    return jax.grad(total, has_aux=True)(inputs.logprobs)

  plain, metrics = gradient(correction='none')
  np.testing.assert_allclose(plain, [[-0.5, -1, 0, 0]], rtol=1e-5)
  assert 'correction' not in metrics
  corrected, metrics = gradient(correction='truncated')
  np.testing.assert_allclose(corrected, [[-0.5, -1, -1.5, -2]], rtol=1e-5)
  np.testing.assert_allclose(metrics['correction'], [[0.5, 1, 1.5, 2]], 1e-5)
  np.testing.assert_allclose(metrics['ratio'], np.ones((1, 4)), rtol=1e-6)
  # The plugin's ratio says nothing of the drift; these do, before the cap.
  np.testing.assert_allclose(metrics['learner_over_behavior'], ratios, 1e-5)
  np.testing.assert_allclose(metrics['correction_capped'], [[0, 0, 0, 1]])
  k3 = ratios - 1 - np.log(ratios)
  np.testing.assert_allclose(metrics['kl_behavior'], k3, atol=1e-5)
  capped, _ = gradient(correction='truncated', correction_cap=1.25)
  np.testing.assert_allclose(capped, [[-0.5, -1, -1.25, -1.25]], rtol=1e-5)


# ---- settings


@pytest.mark.parametrize(
  ('keys', 'message'),
  [
    ({'aggregation': 'mean'}, "aggregation='mean'.*token_mean.*constant"),
    ({'kl_estimator': 'k4'}, "kl_estimator='k4'.*k1.*k2.*k3"),
    ({'truncated': 'drop'}, "truncated='drop'.*keep.*zero.*mask"),
    ({'constant': 0.0}, 'constant=0.0 must be > 0'),
    ({'kl_coef': -0.1}, 'kl_coef=-0.1 >= 0'),
    ({'correction': 'tis'}, "correction='tis'.*auto.*none.*truncated"),
    ({'correction_cap': 0.5}, 'correction_cap=0.5: must be >= 1'),
  ],
)
def test_illegal_settings_say_what_is_legal(keys, message):
  with pytest.raises(ValueError, match=message):
    base.Config(**keys)
