"""Checks of the records, and that the examples in their docstrings are true."""

import dataclasses
import re

import numpy as np
import pytest

from rl_jax import types
from rl_jax.rollout.packing import Item, pack
from rl_jax.types import (
  Completion,
  Group,
  Prompt,
  Request,
  Rollout,
  SamplingParams,
  TrainBatch,
  Verdict,
)


def example_call(record):
  """The record that its docstring's example constructs."""
  text = record.__doc__.split('Example:')[1]
  return eval(text.strip(), {**vars(types), 'np': np})


def example_arrays(record):
  """The arrays that its docstring lists, as {name: nested lists}."""
  lines = re.findall(r'^ +(\w+) += (\[.*\])', record.__doc__, re.MULTILINE)
  return {name: eval(value, {}) for name, value in lines}


def make_rollout(versions, sample_index=0, verdict=('pass', 1.0)):
  mask = np.float32([v >= 0 for v in versions])
  return Rollout(
    sample_index=sample_index,
    tokens=np.zeros(len(versions), np.int32),
    loss_mask=mask,
    behavior_logprobs=mask * 0,
    kept_logmass=mask * 0,
    policy_versions=np.int32(versions),
    finish_reason='stop',
    text='',
    verdict=Verdict(*verdict, reason=''),
  )


PROMPT = Prompt(0, 'a/0', 'x', np.int32([1]), '1')


def test_the_example_of_a_prompt():
  prompt = example_call(Prompt)
  assert (prompt.prompt_id, prompt.row) == (7, 'arithmetic/123')
  assert len(prompt.tokens) == len(prompt.text)  # of a tokeniser of characters
  assert eval(prompt.text.rstrip('=')) == int(prompt.answer)


def test_the_example_of_a_verdict():
  assert example_call(Verdict) == Verdict('pass', 1.0, 'exact: 3')


def test_the_example_of_a_rollout():
  arrays = example_arrays(Rollout)
  names = {f.name for f in dataclasses.fields(Rollout)}
  assert set(arrays) == names - {
    *('sample_index', 'finish_reason', 'text', 'verdict')
  }
  rollout = dataclasses.replace(
    make_rollout([0]), **{k: np.array(v) for k, v in arrays.items()}
  )
  assert rollout.num_completion_tokens == 3
  assert {len(v) for v in arrays.values()} == {5}
  outside = rollout.loss_mask == 0
  assert (rollout.policy_versions[outside] == -1).all()
  assert (rollout.policy_versions[~outside] >= 0).all()
  assert (rollout.behavior_logprobs[outside] == 0).all()
  assert Group(PROMPT, [rollout]).oldest_version == 4
  assert Group(PROMPT, [rollout] * 2).num_completion_tokens == 6


def test_the_example_of_a_train_batch():
  weight = 1 / 3  # token mean of three loss tokens

  def item(tokens, mask):
    zeros = np.zeros(len(tokens), np.float32)
    mask = np.float32(mask)
    return Item(np.int32(tokens), mask, zeros, zeros, 1.0, weight)

  batch = pack([item([5, 6, 7], [0, 1, 1]), item([8, 9], [0, 1])], row_tokens=6)
  arrays = example_arrays(TrainBatch)
  assert set(arrays) == {
    *('tokens', 'segment_ids', 'positions', 'loss_mask', 'loss_weights')
  }
  for name, value in arrays.items():
    got = getattr(batch, name)
    np.testing.assert_array_equal(got, np.array(value, got.dtype), name)


def test_the_example_of_a_completion():
  assert "tokens=[7, 8, 2], ..., finish='stop'" in Completion.__doc__
  request = Request(PROMPT, 1, SamplingParams(max_tokens=3, stop_ids=(2,)), 0)
  tokens = np.int32([7, 8, 2])  # the stop token is one of them
  floats = np.zeros(3, np.float32)
  completion = Completion(request, 0, tokens, floats, floats, tokens, 'stop')
  assert completion.tokens[-1] in completion.request.sampling.stop_ids


@pytest.mark.parametrize(
  'keys, message',
  [
    ({'max_tokens': 0}, r'sampling\.max_tokens=0: must be >= 1'),
    ({'temperature': -0.1}, r'sampling\.temperature=-0\.1: must be >= 0'),
    ({'temperature': float('nan')}, r'sampling\.temperature=nan'),
    ({'top_k': -1}, r'sampling\.top_k=-1: must be >= 0'),
    ({'top_p': 0.0}, r'sampling\.top_p=0\.0: must be in \(0, 1\]'),
    ({'top_p': 1.01}, r'sampling\.top_p=1\.01: must be in \(0, 1\]'),
    ({'top_p': float('nan')}, r'sampling\.top_p=nan'),
    ({'min_p': -0.1}, r'sampling\.min_p=-0\.1: must be in \[0, 1\)'),
    ({'min_p': 1.0}, r'sampling\.min_p=1\.0: must be in \[0, 1\)'),
    ({'stop_ids': (2, -1)}, r'sampling\.stop_ids=\(2, -1\)'),
    ({'stop_strings': ('a', '')}, r"stop_strings=\('a', ''\): must be a tuple"),
    ({'stop_strings': 'abc'}, r"stop_strings='abc': must be a tuple"),
    ({'min_tokens': 2}, r'min_tokens=2: must be from 0 to max_tokens=1'),
    ({'min_tokens': -1}, r'min_tokens=-1: must be from 0'),
    ({'repetition_penalty': 0}, r'repetition_penalty=0: must be > 0'),
    ({'repetition_penalty': float('nan')}, r'repetition_penalty=nan'),
    ({'presence_penalty': float('inf')}, r'presence_penalty=inf: must be fin'),
    ({'frequency_penalty': float('nan')}, r'frequency_penalty=nan'),
    ({'logit_bias': ((-1, 1.0),)}, r'logit_bias=.*pairs of a token id'),
    ({'logit_bias': ((1, float('nan')),)}, r'logit_bias=.*finite number'),
    ({'logit_bias': ((1, 1.0), (1, 2.0))}, r'logit_bias=.*each once'),
    ({'logit_bias': (3,)}, r'logit_bias=\(3,\): must be pairs'),
  ],
)
def test_sampling_refuses(keys, message):
  with pytest.raises(ValueError, match=message):
    SamplingParams(**{'max_tokens': 1, **keys})


def test_sampling_takes_its_limits():
  SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0)
  SamplingParams(max_tokens=1, top_p=1e-9, min_p=0.999, stop_ids=(0,))


@pytest.mark.parametrize(
  'keys',
  [
    {'min_tokens': 1},
    {'repetition_penalty': 1.1},
    {'presence_penalty': -0.5},
    {'frequency_penalty': 0.1},
    {'logit_bias': ((0, 0.5),)},
  ],
  ids=str,
)
def test_sampling_knows_whether_it_adjusts_logits(keys):
  assert SamplingParams(max_tokens=1, **keys).adjusted
  assert not SamplingParams(max_tokens=1, top_k=3, stop_ids=(1,)).adjusted


def _spell(tokens):
  return ''.join('abcdefgh'[t] for t in tokens)


@pytest.mark.parametrize(
  'tokens, keys, text',
  [
    ([0, 1, 2], {'stop_strings': ('bc',)}, 'a'),
    ([0, 1, 2], {'stop_strings': ('d',)}, None),
    ([0, 1, 2, 3], {'stop_strings': ('d', 'cd', 'cde')}, 'ab'),  # the first
    # The third token may be the last, so a string may end with it.
    ([0, 1, 2], {'stop_strings': ('ab', 'bc'), 'min_tokens': 3}, 'a'),
    ([0, 1, 0], {'stop_strings': ('ab',), 'min_tokens': 3}, None),
    ([0, 1, 0, 1], {'stop_strings': ('ab',), 'min_tokens': 3}, 'ab'),
  ],
)
def test_text_before_a_stop_string(tokens, keys, text):
  sampling = SamplingParams(max_tokens=8, **keys)
  assert types.text_before_stop(tokens, sampling, _spell) == text


@pytest.mark.parametrize(
  'tokens, finish, text',
  [
    ([0, 1, 7], 'stop', 'ab'),  # by the stop token
    ([0, 3, 4], 'stop', 'a'),  # by the stop string
    ([0, 1, 2], 'length', 'abc'),
    ([0, 7], 'length', 'ah'),
    ([], 'abort', ''),
  ],
)
def test_the_text_of_a_completion(tokens, finish, text):
  sampling = SamplingParams(max_tokens=3, stop_ids=(7,), stop_strings=('de',))
  floats = np.zeros(len(tokens), np.float32)
  completion = Completion(
    Request(PROMPT, 1, sampling, 0),
    *(0, np.int32(tokens), floats, floats, np.int32(tokens), finish),
  )
  assert completion.text(_spell) == text


@pytest.mark.parametrize(
  'keys, truncated',
  [
    ({}, False),
    ({'temperature': 0.5, 'stop_ids': (1,)}, False),
    ({'top_k': 1}, True),
    ({'top_p': 0.99}, True),
    ({'min_p': 0.01}, True),
  ],
)
def test_sampling_knows_whether_it_cuts_the_distribution(keys, truncated):
  assert SamplingParams(max_tokens=1, **keys).truncated == truncated


@pytest.mark.parametrize('score', [-0.1, 1.1, float('nan'), float('inf')])
def test_a_verdict_refuses_a_score(score):
  with pytest.raises(ValueError, match=r'must be a number in \[0, 1\]'):
    Verdict('pass', score, '')


def test_a_verdict_refuses_a_status():
  with pytest.raises(ValueError, match=r"self.status='passed'.*'pass', 'fail'"):
    Verdict('passed', 1.0, '')  # pyright: ignore[reportArgumentType]


def test_only_a_fail_can_be_a_lenient_pass():
  assert Verdict('fail', 0.0, '', lenient_pass=True).score == 0
  with pytest.raises(ValueError, match='lenient_pass=True'):
    Verdict('error', 0.0, '', lenient_pass=True)


def test_errors_and_refusals_do_not_judge():
  scored = {s: Verdict(s, 0.0, '').scored for s in types.STATUSES}
  assert scored == {
    **{'pass': True, 'fail': True, 'timeout': True},
    **{'error': False, 'refused': False},
  }


def test_oldest_version_is_of_the_chosen_tokens():
  rollouts = [make_rollout([-1, 5, 6]), make_rollout([-1, -1, 4, 9])]
  assert Group(PROMPT, rollouts).oldest_version == 4
  assert type(Group(PROMPT, rollouts).oldest_version) is int


def test_an_empty_completion_has_no_version():
  group = Group(PROMPT, [make_rollout([-1, -1]), make_rollout([-1, 3])])
  assert group.oldest_version == 3
  assert group.num_completion_tokens == 1
  assert group.rollouts[0].num_completion_tokens == 0


@pytest.mark.parametrize(
  'record',
  [
    *(Prompt, SamplingParams, Request, Completion),
    *(Verdict, Rollout, Group, TrainBatch),
  ],
)
def test_records_are_frozen(record):
  assert record.__dataclass_params__.frozen
