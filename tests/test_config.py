"""The whole config: types, ranges, and sections that contradict each other."""

import copy
import dataclasses
import json

import pytest
from ml_collections import ConfigDict

from rl_jax import config, evaluate, resolve
from rl_jax.algorithms import grpo, rloo
from rl_jax.prompts import arithmetic, reasoning_gym
from rl_jax.types import SamplingParams
from rl_jax.verifiers import math_answer

MINIMAL = {
  'model': {'tokenizer': 'chars:0123456789+='},
  'prompts': {
    'train': {'sums': {'name': 'arithmetic'}},
    'heldout': {'sums': {'name': 'arithmetic', 'split': 'heldout'}},
  },
  'algorithm': {'name': 'grpo'},
  'verifier': {'name': 'math_answer'},
}


def changed(changes):
  """MINIMAL with {'section.key': value}; a value of ... deletes the key."""
  result = copy.deepcopy(MINIMAL)
  for path, value in changes.items():
    *sections, key = path.split('.')
    place = result
    for section in sections:
      place = place.setdefault(section, {})
    if value is ...:
      del place[key]
    else:
      place[key] = value
  return result


def test_a_minimal_config_has_every_default():
  settings = config.settings(MINIMAL)
  for name, cls in config._SECTIONS.items():
    if name not in ('model', 'prompts'):
      assert getattr(settings, name) == cls(), name
  assert settings.run == config.Run()
  assert settings.algorithm is grpo
  assert settings.algorithm_config == grpo.Config(correction='none')
  assert settings.verifier == 'math_answer'
  assert settings.verifier_config == math_answer.Config()


def test_a_config_dict_is_as_good_as_a_dict():
  assert config.settings(ConfigDict(MINIMAL)) == config.settings(MINIMAL)
  assert config.as_dict(ConfigDict(MINIMAL)) == config.as_dict(MINIMAL)


def test_values_arrive_where_they_belong():
  settings = config.settings(
    changed(
      {
        'num_steps': 7,
        'algorithm.name': 'rloo',
        'algorithm.kl_coef': 1,
        'verifier.extract': 'boxed',
        'sampling.top_p': 0.9,
        'sft.learning_rate': 0.5,
        'evaluation.ks': [1, 2],
        'evaluation.samples_per_prompt': 2,
      }
    )
  )
  assert settings.run.num_steps == 7
  assert settings.algorithm is rloo
  assert settings.algorithm_config == rloo.Config(
    kl_coef=1.0, correction='none'
  )
  assert settings.verifier_config == math_answer.Config(extract='boxed')
  assert settings.sft.learning_rate == 0.5
  assert settings.optimizer.learning_rate == 1e-4
  assert settings.evaluation.ks == (1, 2)
  assert settings.sampling_params((2,)) == SamplingParams(
    max_tokens=64, top_p=0.9, stop_ids=(2,)
  )


@pytest.mark.parametrize(
  'evaluated, completion, length', [(0, 64, 192), (10, 64, 192), (99, 99, 227)]
)
def test_lengths_hold_the_longest_of_training_and_evaluation(
  evaluated, completion, length
):
  settings = config.settings(changed({'evaluation.max_tokens': evaluated}))
  assert settings.max_completion_tokens == completion
  assert settings.max_length == length


def test_training_cannot_sample_from_anything_but_the_policy():
  """Evaluation has every parameter; the tokeniser knows the stop ids."""
  defaults = lambda cls: {f.name: f.default for f in dataclasses.fields(cls)}  # noqa: E731
  params = defaults(SamplingParams)
  del params['stop_ids'], params['max_tokens']
  assert defaults(evaluate.Config).items() >= params.items()
  for name in (
    *('stop_strings', 'min_tokens', 'logit_bias', 'repetition_penalty'),
    *('presence_penalty', 'frequency_penalty'),
  ):
    del params[name]
  assert defaults(config.Sampling) == {'max_tokens': 64, **params}


def test_a_random_model_has_a_row_for_every_token():
  sizes = config.ModelSource(architecture={'vocab_size': 9})
  assert config.architecture(sizes, 9).vocab_size == 9
  with pytest.raises(ValueError, match=r'vocab_size=9: .* has 10 tokens'):
    config.architecture(sizes, 10)
  other = dataclasses.replace(sizes, architecture={'family': 'lama'})
  with pytest.raises(ValueError, match=r"no 'lama'\. Did you mean 'llama'"):
    config.architecture(other, 10)


@pytest.mark.parametrize(
  'name, value',
  [
    ('min_tokens', 65),
    ('repetition_penalty', 0.0),
    ('logit_bias', ((-1, 1.0),)),
    ('stop_strings', ('',)),
  ],
)
def test_evaluation_names_its_own_keys(name, value):
  with pytest.raises(ValueError, match=f'evaluation.{name}=.*must be'):
    config.settings(changed({f'evaluation.{name}': value}))


@pytest.mark.parametrize(
  'cls',
  [
    *(config.Run, *config._SECTIONS.values()),
    *(grpo.Config, rloo.Config, math_answer.Config),
    *(arithmetic.Config, reasoning_gym.Config),
  ],
)
def test_none_is_nobodys_default(cls):
  """A flag cannot override it: it has no type."""
  for field in dataclasses.fields(cls):
    assert field.default is not None, field.name


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'num_step': 3}, r'^num_step is not a key\. Did you mean num_steps\?'),
    ({'learner.row_token': 3}, r'Did you mean learner\.row_tokens\?'),
    ({'optimizr': {'b1': 0.9}}, r'^optimizr .*Did you mean optimizer\?'),
    ({'environment': {'x': 1}}, r'^environment is not a key.*Legal: algorithm'),
    ({'algorithm.clip': 0.1}, r'algorithm\.clip is not a key\. Did you mean'),
    ({'verifier.extrat': 'x'}, r'Did you mean verifier\.extract\?'),
    # A key in the wrong section, of a plugin that no file lists (rllm#447).
    ({'optimizer.scale': 'none'}, r'Did you mean algorithm\.scale\?'),
    ({'algorithm.extract': 'x'}, r'Did you mean verifier\.extract\?'),
    (
      {'row_tokens': 8},
      r'^row_tokens is not.*Did you mean learner\.row_tokens',
    ),
    ({'generator.max_staleness': 1}, r'Did you mean max_staleness\?'),
    ({'sampling.stop_ids': (1,)}, r'sampling\.stop_ids is not a key'),
    ({'algorithm.name': 'gpro'}, "Did you mean 'grpo'"),
    ({'verifier.name': 'service'}, "'service' is no plugin"),
    ({'verifier.name': '.mine'}, r"there is no '\.mine'\. Legal: math_answer"),
    ({'algorithm.name': ''}, r"there is no ''\. Legal: grpo"),
    ({'algorithm.name': ...}, r'algorithm\.name is missing'),
    ({'algorithm': ...}, r'algorithm\.name is missing'),
    ({'verifier': ...}, r'verifier\.name is missing'),
    ({'verifier.name': 3}, r'verifier\.name is missing'),
    ({'num_steps': 3.5}, r'^num_steps=3\.5: must be int'),
    ({'learner.remat': 1}, r'learner\.remat=1: must be bool'),
    ({'optimizer.eps': None}, r'optimizer\.eps=None: must be float'),
    # Only plugins have a name.
    ({'optimizer.name': 'sgd'}, r'optimizer\.name is not a key'),
    ({'name': 'x'}, r'^name is not a key'),
    ({'model.architecture': 3}, r'model\.architecture=3: must be Mapping'),
  ],
)
def test_keys_and_types(changes, message):
  with pytest.raises(ValueError, match=message):
    config.settings(changed(changes))


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'num_steps': -1}, r'^num_steps=-1: must be >= 0'),
    ({'seed': -1}, r'^seed=-1: must be in \[0, 2\*\*31\)'),
    ({'seed': 2**31}, r'^seed=2147483648: must be in'),
    ({'prompts_per_step': 0}, r'^prompts_per_step=0: must be >= 1'),
    ({'max_staleness': -1}, r'^max_staleness=-1: must be >= 0'),
    ({'sft.num_steps': -1}, r'^sft\.num_steps=-1: must be >= 0'),
    ({'sft.examples_per_step': 0}, r'^sft\.examples_per_step=0: must be >= 1'),
    ({'parity.num_prompts': 0}, r'^parity\.num_prompts=0: must be >= 1'),
    ({'checkpoint.every_steps': 0}, r'^checkpoint\.every_steps=0: must be >='),
    ({'checkpoint.keep': 0}, r'^checkpoint\.keep=0: must be >= 1'),
    ({'completions_per_prompt': 1}, r'completions_per_prompt=1: must be >= 2'),
    ({'sampling.temperature': 0}, r'sampling\.temperature=0.*teach nothing'),
    ({'sampling.temperature': -1}, r'sampling\.temperature=-1\.0: must be'),
    ({'sampling.top_p': 1.5}, r'sampling\.top_p=1\.5: must be in'),
    ({'sampling.max_tokens': 0}, r'sampling\.max_tokens=0: must be >= 1'),
    ({'evaluation.ks': (4,)}, r'pass@4 needs evaluation\.samples_per_prompt'),
    ({'generator.dtype': 'int8'}, r"generator\.dtype='int8': must be one of"),
    ({'generator.num_slots': 0}, r'generator\.num_slots=0: must be >= 1'),
    ({'learner.logprob_chunk': 100}, r'must divide.*nearest legal: 128'),
    ({'optimizer.decay': 'cos'}, r"optimizer\.decay='cos'"),
    ({'algorithm.truncated': 'drop'}, r"algorithm\.truncated='drop'"),
    ({'verifier.extract': 'first'}, r"verifier\.extract='first'"),
    ({'service.num_workers': 0}, r'service\.num_workers=0: must be positive'),
    ({'prompts.template': 'Q:'}, r"template='Q:'.*must contain \{prompt\}"),
    # Sections that contradict each other.
    (
      {'learner.row_tokens': 128, 'sampling.max_tokens': 100},
      r'learner\.row_tokens=128 < .* = 228.*raise row_tokens to at least 228',
    ),
    (
      {'model.source': 'x.gguf', 'model.architecture': {'num_layers': 2}},
      r"model\.architecture=.*num_layers.* beside model\.source='x\.gguf'",
    ),
    ({'model.tokenizer': ''}, r"model\.tokenizer='': a model without source"),
    ({'prompts.train': {}}, r'prompts\.train is empty: .* at least one source'),
    ({'prompts.heldout': ...}, r'prompts\.heldout is empty'),
    (
      {'prompts.train': {'name': 'jsonl', 'path': 'x'}},
      r"prompts\.train\.name='jsonl': every source needs a label",
    ),
    ({'parity.max_abs': float('nan')}, r'parity\.max_abs=nan: must be >= 0'),
    ({'parity.mean_abs': -1}, r'parity\.mean_abs=-1\.0: must be >= 0'),
    ({'algorithm.kl_coef': float('nan')}, r'algorithm\.kl_coef=nan >= 0'),
    ({'algorithm.constant': float('nan')}, r'constant=nan must be > 0'),
    ({'algorithm.clip_high': float('nan')}, r'clip_high=nan > 0'),
    ({'mesh.num_cpu_devices': -1}, r'mesh\.num_cpu_devices=-1: must be >= 0'),
    ({'mesh.num_cpu_devices': 10**5}, r'num_cpu_devices=100000: .* 1024'),
  ],
)
def test_ranges_and_contradictions(changes, message):
  with pytest.raises(ValueError, match=message):
    config.settings(changed(changes))


@pytest.mark.parametrize(
  'changes',
  [
    {'learner.row_tokens': 192, 'learner.logprob_chunk': 64},  # 128 + 64
    {'completions_per_prompt': 2, 'num_steps': 0},
    {'evaluation.temperature': 0},  # greedy evaluation
    {'model.source': 'x.gguf', 'model.tokenizer': ''},
  ],
)
def test_the_edge_of_what_is_legal(changes):
  config.settings(changed(changes))


@pytest.mark.parametrize(
  ('changes', 'precision', 'bounds', 'correction'),
  [
    ({}, 'float32', (1e-4, 1e-5), 'none'),
    ({'generator.dtype': 'bfloat16'}, 'bfloat16', (2.0, 0.02), 'truncated'),
    (
      {'learner.compute_dtype': 'bfloat16'},
      'bfloat16',
      (2.0, 0.02),
      'truncated',
    ),
    ({'generator.weight_format': 'int8'}, 'int8', (5.0, 0.5), 'truncated'),
    ({'generator.kv_format': 'int8'}, 'int8', (5.0, 0.5), 'truncated'),
    (
      {'generator.kv_format': 'int8', 'parity.mean_abs': 0.1},
      *('int8', (5.0, 0.1), 'truncated'),
    ),
    (
      {'generator.kv_format': 'int8', 'algorithm.correction': 'none'},
      *('int8', (5.0, 0.5), 'none'),
    ),
    (
      {'algorithm.correction': 'truncated'},
      *('float32', (1e-4, 1e-5), 'truncated'),
    ),
  ],
)
def test_precision_decides_bounds_and_correction(
  changes, precision, bounds, correction
):
  whole = changed(changes)
  s = config.settings(whole)
  assert (s.precision, s.parity_bounds) == (precision, bounds)
  assert s.algorithm_config.correction == correction
  assert config.as_dict(whole)['algorithm']['correction'] == correction


def test_architecture_is_checked_as_a_section():
  def build(**sizes):
    return config.architecture(config.ModelSource(architecture=sizes), 12)

  assert (build(num_layers=3).num_layers, build().vocab_size) == (3, 12)
  with pytest.raises(
    ValueError, match=r'Did you mean model\.architecture\.num_layers'
  ):
    build(num_layer=3)
  with pytest.raises(ValueError, match=r'architecture\.d_model=1\.5: must be'):
    build(d_model=1.5)


def test_as_dict_has_every_key_and_is_json():
  whole = config.as_dict(MINIMAL)
  assert json.loads(json.dumps(whole))['evaluation']['ks'] == [1]
  expected = {f.name for f in dataclasses.fields(config.Run)}
  assert set(whole) == expected | {
    *config._SECTIONS,
    *('algorithm', 'verifier'),
  }
  for name, cls in config._SECTIONS.items():
    assert set(whole[name]) == {f.name for f in dataclasses.fields(cls)}
  for name, cls in (
    ('algorithm', grpo.Config),
    ('verifier', math_answer.Config),
  ):
    fields = {f.name for f in dataclasses.fields(cls)}
    assert set(whole[name]) == {'name'} | fields
  # It is itself a config, of the same settings.
  assert config.settings(whole) == config.settings(MINIMAL)
  assert config.as_dict(whole) == whole


def test_a_missing_key_of_a_plugin_is_named():
  @dataclasses.dataclass(frozen=True)
  class Config:
    tau: float

  with pytest.raises(
    ValueError, match=r'missing tau.*--config\.algorithm\.tau'
  ):
    resolve.settings(Config, {}, 'algorithm')


def test_a_plugin_that_breaks_the_contract_is_refused_with_the_config(
  monkeypatch,
):
  monkeypatch.setattr(grpo, 'loss', lambda inputs, config: (0.0, {}))
  with pytest.raises(ValueError, match='loss has shape'):
    config.settings(MINIMAL)
