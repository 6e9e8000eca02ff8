"""The supervised phase: a short SFT before RL, where the config asks for it.

Imitates the rows' own solutions with the learner's update; saves and resumes
as RL does.
"""

from __future__ import annotations

import threading

import numpy as np

from rl_jax.algorithms import base as algorithms
from rl_jax.journal import Journal
from rl_jax.learner import sft
from rl_jax.learner.learner import Learner
from rl_jax.models.base import Params
from rl_jax.parts import Parts
from rl_jax.prompts.stream import PromptStream
from rl_jax.rollout.packing import Item, pack
from rl_jax.saving import Saved, Saves, Stopped
from rl_jax.types import Prompt, TrainBatch


def run(
  p: Parts,
  learner: Learner,
  saved: Saved | None,
  saves: Saves,
  journal: Journal,
  stop: threading.Event,
) -> Params:
  """Parameters after the supervised phase, on the training mesh.

  Raises:
    Stopped: `stop` was set, and everything is saved.
  """
  config = p.settings.sft
  stream = p.sft_stream()
  step = 0
  if saved is None:
    state = learner.init_state(p.initial_params(learner))
  else:
    step, state = saved.step, saved.state
    stream.set_state(saved.host['stream'])
  while step < config.num_steps:
    prompts = stream.take(config.examples_per_step)
    batch = _batch(p, stream, prompts)
    with journal.training('sft'):
      state, metrics = learner.update(state, batch, step)
    journal.imitated(step, config.num_steps, metrics)
    step += 1
    stopping = stop.is_set()
    if saves.is_due(step) or step == config.num_steps or stopping:
      host = {'journal': journal.state(), 'stream': stream.get_state()}
      with journal.training('checkpoint'):
        saves.save('sft', step, state, host, wait=stopping)
    if stopping:
      raise Stopped(f'stopped in SFT at step {step}')
  return state.params


def _batch(p: Parts, stream: PromptStream, prompts: list[Prompt]) -> TrainBatch:
  items = [sft.example(x.tokens, stream.solution(x)) for x in prompts]
  weight = algorithms.token_weights(
    [int(mask.sum()) for _, mask in items], algorithms.Config()
  )
  zeros = [np.zeros(len(tokens), np.float32) for tokens, _ in items]
  return pack(
    [
      Item(tokens, mask, zero, zero, advantage=0.0, weight=float(w))
      for (tokens, mask), zero, w in zip(items, zeros, weight, strict=True)
    ],
    p.settings.learner.row_tokens,
  )
