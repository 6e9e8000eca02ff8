"""The whole config of a run, as typed and checked settings.

`resolve.settings` makes each section a dataclass of the stage that reads it;
here they are put together, and what concerns several sections is checked, all
before anything compiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rl_jax import evaluate, meshes, resolve
from rl_jax.algorithms import base as algorithms
from rl_jax.generator import engine
from rl_jax.learner import learner, optimizer, sft
from rl_jax.models import base as models
from rl_jax.prompts import stream
from rl_jax.types import SamplingParams
from rl_jax.verifiers.service import ServiceConfig


@dataclasses.dataclass(frozen=True)
class Run:
  """Keys at the top of the config; all counts are global."""

  seed: int = 0
  num_steps: int = 100  # learner steps
  prompts_per_step: int = 16
  completions_per_prompt: int = 8
  max_staleness: int = 0  # 0: synchronous


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Keys of `config.sampling`: how training samples; see SamplingParams.

  Its fields that change the policy's own distribution are not among them.
  """

  max_tokens: int = 64
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class ModelSource:
  """Keys of `config.model`."""

  source: str = ''  # GGUF, HF directory, hub name, 'package:NAME'; '': random
  tokenizer: str = ''  # as source, or 'chars:ALPHABET'; '': that of source
  # Sizes of a model that starts from random parameters.
  architecture: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Parity:
  """Keys of `config.parity`: the gate at every start of a run."""

  num_prompts: int = 4  # completed and scored by generator and learner
  max_abs: float = 0.0  # largest |log-prob difference|; 0: `_PARITY` has it
  mean_abs: float = 0.0  # mean |difference|; 0: `_PARITY` has it

  def __post_init__(self):
    for name in ('max_abs', 'mean_abs'):
      if not getattr(self, name) >= 0:  # also refuses nan
        raise ValueError(f'parity.{name}={getattr(self, name)}: must be >= 0.')


# (max, mean) |log-prob difference| by precision. In float32 what is larger is a
# bug; the others are a few times what SmolLM2 has (int8: mean 0.2).
_PARITY = {
  'float32': (1e-4, 1e-5),
  'bfloat16': (2.0, 0.02),
  'int8': (5.0, 0.5),
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Keys of `config.checkpoint`."""

  every_steps: int = 10  # learner steps between checkpoints
  keep: int = 2  # newest ones kept


@dataclasses.dataclass(frozen=True)
class Settings:
  """Everything that a run reads."""

  run: Run
  model: ModelSource
  mesh: meshes.Config
  prompts: stream.Config
  sampling: Sampling
  generator: engine.Config
  verifier: str  # name of the plugin
  verifier_config: Any
  service: ServiceConfig
  algorithm: ModuleType
  algorithm_config: Any
  learner: learner.Config
  optimizer: optimizer.Config
  sft: sft.Config
  evaluation: evaluate.Config
  parity: Parity
  checkpoint: Checkpoint

  @property
  def precision(self) -> str:
    """The coarsest numbers in which generator and learner compute."""
    g = self.generator
    if 'int8' in (g.weight_format, g.kv_format):
      return 'int8'
    exact = g.dtype == self.learner.compute_dtype == 'float32'
    return 'float32' if exact else 'bfloat16'

  @property
  def parity_bounds(self) -> tuple[float, float]:
    """(max, mean) |log-prob difference| with which a run starts."""
    most, mean = _PARITY[self.precision]
    return self.parity.max_abs or most, self.parity.mean_abs or mean

  @property
  def max_completion_tokens(self) -> int:
    return max(self.sampling.max_tokens, self.evaluation.max_tokens)

  @property
  def max_length(self) -> int:
    """Longest prompt plus completion, in tokens."""
    return self.prompts.max_prompt_tokens + self.max_completion_tokens

  def sampling_params(self, stop_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
      **dataclasses.asdict(self.sampling), stop_ids=stop_ids
    )


_SECTIONS: dict[str, type] = {
  'model': ModelSource,
  'mesh': meshes.Config,
  'prompts': stream.Config,
  'sampling': Sampling,
  'generator': engine.Config,
  'service': ServiceConfig,
  'learner': learner.Config,
  'optimizer': optimizer.Config,
  'sft': sft.Config,
  'evaluation': evaluate.Config,
  'parity': Parity,
  'checkpoint': Checkpoint,
}
_PLUGINS = ('algorithm', 'verifier')


def settings(config: Mapping[str, Any]) -> Settings:
  """Typed settings of a config (a dict or ml_collections.ConfigDict).

  Raises:
    ValueError: a key that is unknown, misplaced, retired or missing, a value
      of the wrong type or range, or sections that contradict each other.
  """
  sections = {k: v for k, v in config.items() if hasattr(v, 'items')}
  legal = [*_SECTIONS, *_PLUGINS]
  for name in sections:
    if name not in legal:
      raise ValueError(resolve.unknown_key(name, '', legal))
  for name in _PLUGINS:
    if not isinstance(sections.get(name, {}).get('name'), str):
      raise ValueError(f"{name}.name is missing, as in dict(name='...').")
  top = {k: v for k, v in config.items() if k not in sections}
  algorithm = resolve.plugin('algorithms', sections['algorithm']['name'])
  verifier = resolve.plugin('verifiers', sections['verifier']['name'])
  given = {'': top, **{name: dict(keys) for name, keys in sections.items()}}
  for name in _PLUGINS:
    del given[name]['name']
  classes = {
    '': Run,
    'algorithm': algorithm.Config,
    'verifier': verifier.Config,
    **_SECTIONS,
  }
  keys = {
    name: [field.name for field in dataclasses.fields(cls)]
    for name, cls in classes.items()
  }
  resolved = {
    name: resolve.settings(cls, given.get(name, {}), name, keys)
    for name, cls in classes.items()
  }
  result = Settings(
    run=resolved[''],
    verifier=sections['verifier']['name'],
    verifier_config=resolved['verifier'],
    algorithm=algorithm,
    algorithm_config=resolved['algorithm'],
    **{name: resolved[name] for name in _SECTIONS},
  )
  _check(result)
  if result.algorithm_config.correction == 'auto':
    exact = result.precision == 'float32'
    correction = 'none' if exact else 'truncated'
    resolved['algorithm'] = dataclasses.replace(
      result.algorithm_config, correction=correction
    )
    result = dataclasses.replace(result, algorithm_config=resolved['algorithm'])
  return result


def architecture(section: ModelSource, vocab_size: int) -> models.ModelConfig:
  """Sizes of a model that starts from random parameters."""
  keys = {'vocab_size': vocab_size, **section.architecture}
  sizes = resolve.settings(models.ModelConfig, keys, 'model.architecture')
  resolve.plugin('models', sizes.family)  # else an export finds out
  if sizes.vocab_size < vocab_size:
    raise ValueError(
      f'model.architecture.vocab_size={sizes.vocab_size}: the tokeniser has '
      f'{vocab_size} tokens; leave it out, or make it at least that.'
    )
  return sizes


def as_dict(config: Mapping[str, Any]) -> dict[str, Any]:
  """The whole config with the defaults of every section, JSON-able."""
  resolved = settings(config)
  sections = {
    name: dataclasses.asdict(getattr(resolved, name)) for name in _SECTIONS
  }
  return {
    **dataclasses.asdict(resolved.run),
    **sections,
    'algorithm': {
      'name': config['algorithm']['name'],
      **dataclasses.asdict(resolved.algorithm_config),
    },
    'verifier': {
      'name': resolved.verifier,
      **dataclasses.asdict(resolved.verifier_config),
    },
  }


def _check(s: Settings) -> None:
  for name, value, low in (
    ('num_steps', s.run.num_steps, 0),
    ('prompts_per_step', s.run.prompts_per_step, 1),
    ('max_staleness', s.run.max_staleness, 0),
    ('sft.num_steps', s.sft.num_steps, 0),
    ('sft.examples_per_step', s.sft.examples_per_step, 1),
    ('parity.num_prompts', s.parity.num_prompts, 1),
    ('checkpoint.every_steps', s.checkpoint.every_steps, 1),
    ('checkpoint.keep', s.checkpoint.keep, 1),
  ):
    if value < low:
      raise ValueError(f'{name}={value}: must be >= {low}.')
  if s.run.completions_per_prompt < 2:
    raise ValueError(
      f'completions_per_prompt={s.run.completions_per_prompt}: must be >= 2; '
      'an advantage is relative to the other completions of a prompt.'
    )
  if not 0 <= s.run.seed < 2**31:
    raise ValueError(f'seed={s.run.seed}: must be in [0, 2**31).')
  s.evaluation.sampling(s.sampling_params(()))
  if s.sampling.temperature == 0:
    raise ValueError(
      'sampling.temperature=0: greedy completions of a prompt are all the '
      'same and teach nothing; set it > 0 (evaluation may be greedy).'
    )
  needed = s.prompts.max_prompt_tokens + s.sampling.max_tokens
  if s.learner.row_tokens < needed:
    raise ValueError(
      f'learner.row_tokens={s.learner.row_tokens} < '
      f'prompts.max_prompt_tokens + sampling.max_tokens = {needed}: the '
      f'longest rollout would not fit; raise row_tokens to at least {needed}.'
    )
  if s.model.source and s.model.architecture:
    raise ValueError(
      f'model.architecture={dict(s.model.architecture)} beside '
      f'model.source={s.model.source!r}: sizes come from the source; leave '
      'architecture empty.'
    )
  if not s.model.source and not s.model.tokenizer:
    raise ValueError(
      "model.tokenizer='': a model without source needs one, as "
      "'chars:0123456789+='."
    )
  for where in ('train', 'heldout'):
    if not getattr(s.prompts, where):
      raise ValueError(
        f'prompts.{where} is empty: it needs at least one source, as '
        f"config.prompts.{where} = dict(sums=dict(name='arithmetic'))."
      )
  algorithms.check_plugin(s.algorithm, s.algorithm_config)
