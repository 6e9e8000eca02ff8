"""Builds the parts of a run from its settings; wires nothing in time.

What a run is made of and what is handed to whom; when things happen is
`train.py`'s business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from rl_jax import config as configs
from rl_jax import meshes
from rl_jax.algorithms import base as algorithms
from rl_jax.config import Settings
from rl_jax.generator.engine import Engine
from rl_jax.generator.programs import Limits
from rl_jax.generator.quantize import Packing, drift_by_layer
from rl_jax.generator.scheduler import Scheduler
from rl_jax.learner import optimizer, sft
from rl_jax.learner.learner import Learner
from rl_jax.metrics import Timeline, TokenLedger
from rl_jax.models import weights
from rl_jax.models.base import Model, Params
from rl_jax.prompts.stream import PromptStream, heldout_prompts
from rl_jax.prompts.tokenizer import Tokenizer, load_tokenizer
from rl_jax.rollout.buffer import GroupBuffer
from rl_jax.rollout.worker import Job, RolloutWorker
from rl_jax.sync.single_process import Sync
from rl_jax.types import Prompt, SamplingParams, TrainBatch
from rl_jax.verifiers.service import VerifierService

# Random numbers are keyed by (step, prompt id, ...): held-out prompts get ids
# that no training prompt has.
_HELDOUT_IDS = 2**30
_SELF_TEST_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Parts:
  """Everything that the loop drives."""

  settings: Settings
  plan: meshes.MeshPlan
  tokenizer: Tokenizer
  model: Model
  stream: PromptStream
  heldout: list[Prompt]
  heldout_fingerprint: str
  verifier: VerifierService
  schedulers: list[Scheduler]
  sync: Sync

  @property
  def sampling(self) -> SamplingParams:
    """How training samples."""
    return self.settings.sampling_params(self.tokenizer.stop_ids)

  def advantages(self, rewards: np.ndarray) -> np.ndarray:
    """[G] rewards of a group -> [G], by the config's algorithm."""
    s = self.settings
    return s.algorithm.advantages(rewards, s.algorithm_config)

  def drift(self, learner: Learner, params: Params, batch: TrainBatch) -> Any:
    """[L], see `drift_by_layer`; empty where matrices are not quantised."""
    config = self.settings.generator
    if config.weight_format == 'dtype':
      return np.zeros(0)
    some = next(learner.microbatches(batch))
    drift = functools.partial(
      drift_by_layer,
      self.model,
      packing=Packing(config.weight_format),
      dtype=config.dtype,
    )
    return np.asarray(jax.jit(drift)(params, batch=some))

  def rl_learner(self) -> Learner:
    return rl_learner(self.settings, self.model, self.plan)

  def sft_learner(self) -> Learner:
    build = optimizer.build(self.settings.sft, self.settings.sft.num_steps)
    return Learner(
      self.model,
      self.plan.training,
      self.settings.learner,
      build,
      sft.loss,
      temperature=1.0,
    )

  def sft_stream(self) -> PromptStream:
    """Draws rows to imitate, in an order of its own."""
    s = self.settings
    return PromptStream(
      s.prompts.train, s.prompts, self.tokenizer, seed=s.run.seed + 1
    )

  def initial_params(self, learner: Learner) -> Params:
    """From the model's source, or random, on the training mesh."""
    source = self.settings.model.source
    if source:
      return weights.load(source, self.model, learner.param_shardings)
    return learner.init_params(jax.random.key(self.settings.run.seed))

  def rollout_worker(
    self, buffer: GroupBuffer, timeline: Timeline, ledger: TokenLedger
  ) -> RolloutWorker:
    job = Job(self.stream.take, self.tokenizer.decode, self.verifier.submit)
    return RolloutWorker(
      self.schedulers,
      buffer,
      job,
      sampling=self.sampling,
      completions_per_prompt=self.settings.run.completions_per_prompt,
      timeline=timeline,
      ledger=ledger,
    )


def rl_learner(s: Settings, model: Model, plan: meshes.MeshPlan) -> Learner:
  return Learner(
    model,
    plan.training,
    s.learner,
    optimizer.build(s.optimizer, s.run.num_steps),
    algorithms.bind(s.algorithm, s.algorithm_config),
    temperature=s.sampling.temperature,
  )


def generation(
  s: Settings, tokenizer: Tokenizer
) -> tuple[Model, meshes.MeshPlan, list[Scheduler], Sync]:
  """The model, its meshes, an engine for each generation mesh, and the sync.

  Raises:
    ValueError: model, tokeniser, meshes and devices do not fit each other.
  """
  model = Model(_architecture(s, tokenizer))
  plan = meshes.MeshPlan.create(s.mesh, jax.devices())
  plan.check_params(model.specs())
  sampling = s.evaluation.sampling(s.sampling_params(tokenizer.stop_ids))
  limits = Limits(
    length=s.max_length,
    stop_ids=len(tokenizer.stop_ids),
    logit_biases=len(sampling.logit_bias) if sampling.adjusted else None,
  )
  schedulers = [
    Scheduler(
      Engine(
        model,
        mesh,
        s.generator,
        limits=limits,
        seed=s.run.seed,
      ),
      tokenizer.decode,
    )
    for mesh in plan.generation
  ]
  sync = Sync(
    model,
    plan.training,
    plan.generation,
    dtype=s.generator.dtype,
    unroll=s.generator.unroll_layers,
    packing=Packing(s.generator.weight_format),
  )
  return model, plan, schedulers, sync


@contextlib.contextmanager
def build(settings: Settings):
  """Yields the parts; ends the verifier's processes afterwards.

  Raises:
    ValueError: whatever in the config, data or devices does not fit.
  """
  s = settings
  tokenizer = load_tokenizer(s.model.tokenizer or s.model.source)
  model, plan, schedulers, sync = generation(s, tokenizer)
  plan.check_rows(s.learner.rows_per_microbatch)
  stream = PromptStream(s.prompts.train, s.prompts, tokenizer, seed=s.run.seed)
  if s.sft.num_steps:
    stream.check_solutions(s.learner.row_tokens)
  heldout, fingerprint = heldout_prompts(
    s.prompts.heldout, s.prompts, tokenizer, s.evaluation.num_prompts
  )
  heldout = [
    dataclasses.replace(p, prompt_id=_HELDOUT_IDS + p.prompt_id)
    for p in heldout
  ]
  with VerifierService(
    s.verifier,
    dataclasses.asdict(s.verifier_config),
    **dataclasses.asdict(s.service),
  ) as verifier:
    verifier.check_answers(stream.answers())
    verifier.check_answers((p.row, p.answer) for p in heldout)
    verifier.self_test([p.answer for p in heldout[:_SELF_TEST_ROWS]])
    yield Parts(
      s,
      plan,
      tokenizer,
      model,
      stream,
      heldout,
      fingerprint,
      verifier,
      schedulers,
      sync,
    )


def _architecture(s: Settings, tokenizer: Tokenizer):
  if not s.model.source:
    return configs.architecture(s.model, tokenizer.vocab_size)
  config = weights.read_config(s.model.source)
  if config.vocab_size < tokenizer.vocab_size:
    raise ValueError(
      f'the tokeniser has {tokenizer.vocab_size} tokens, the model '
      f'{s.model.source!r} only {config.vocab_size}; use its own tokeniser.'
    )
  return config
