"""The loop.

   prompts --> rollout --> verify --> advantages --> update --> sync
      ^                                                           |
      +----------------- policy version + 1 <---------------------+

Synchronous training is this loop with max_staleness=0: the rollout worker's
thread fills a buffer that admits only what can be consumed in time; this
thread takes whole groups out of it. `parts.py` builds what is driven here,
`journal.py` keeps the account, `saving.py` what resume needs.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_jax import config as configs
from rl_jax import evaluate, parts, supervised
from rl_jax.algorithms import base as algorithms
from rl_jax.journal import Journal, check_config, finished, summary_text
from rl_jax.learner.learner import TrainState
from rl_jax.parts import Parts
from rl_jax.rollout.buffer import GroupBuffer
from rl_jax.rollout.packing import Item, pack
from rl_jax.rollout.worker import RolloutWorker
from rl_jax.saving import Saves, Stopped, locked, rollouts_to_json
from rl_jax.types import Group, Rollout, TrainBatch

_POLL_SECONDS = 0.5  # how soon a waiting loop sees that it is to stop


class ParityError(RuntimeError):
  """Generator and learner disagree about the same tokens."""


def train(
  config: Mapping[str, Any],
  workdir: pathlib.Path,
  stop: threading.Event | None = None,
) -> dict[str, Any]:
  """Runs a config to its end, from where `workdir` was left.

  Args:
    config: as `configs/base.py` has it.
    workdir: holds everything of the run; a run that was killed is resumed.
    stop: set it (a signal handler may) to save and end the run.

  Returns:
    What `summary.json` holds.

  Raises:
    ValueError: the config, the data or the devices do not fit.
    ParityError: generator and learner disagree at the start.
    NonFinite: a loss or a gradient was not finite; names the step.
    Stopped: `stop` was set, and everything is saved.
  """
  begun = time.monotonic()
  stop = stop or threading.Event()
  # Act 1: all that can be wrong with config, data and devices is said here.
  s = configs.settings(config)
  whole_config = configs.as_dict(config)
  check_config(workdir, whole_config)
  if summary := finished(workdir, whole_config):
    print(summary_text(summary, workdir))
    print('\nThis run has ended before; raise num_steps to go on with it.')
    return summary
  with (
    locked(workdir),
    parts.build(s) as p,
    Saves(workdir, s.checkpoint) as saves,
  ):
    # Act 2: what an earlier run of this workdir has left.
    learner, imitator = p.rl_learner(), p.sft_learner()
    anchored = s.algorithm_config.kl_coef > 0
    saved = saves.restore('rl', learner.abstract_state())
    saved_sft = None
    if saved is None or anchored:
      saved_sft = saves.restore('sft', imitator.abstract_state())
    newest = saved or saved_sft
    account = newest.host['journal'] if newest else None
    step = saved.step if saved else 0
    if step > s.run.num_steps:
      raise ValueError(
        f'num_steps={s.run.num_steps}: {workdir} has done {step} steps; raise '
        'num_steps, or name another --workdir.'
      )
    if saved:
      p.stream.set_state(saved.host['stream'])
    buffer = GroupBuffer(
      s.run.prompts_per_step, s.run.max_staleness, s.run.num_steps, step
    )
    with (
      Journal(workdir, whole_config, account, p.heldout_fingerprint) as journal,
      p.rollout_worker(buffer, journal.timeline, journal.ledger) as worker,
    ):
      journal.timeline.add('build', time.monotonic() - begun)
      journal.say(f'devices         {p.plan.describe()}')
      if newest:
        journal.say(f'resumed         {"rl" if saved else "sft"} {newest.step}')
      if saved:
        buffer.restore(saved.host['rollouts']['num_admitted'], saved.ready)
        worker.restart(saved.in_flight)
        lost = saved.host['rollouts']['unfinished_tokens']
        journal.ledger.dropped(lost, 'interrupted')
      # Act 3: where RL starts from.
      if saved is None or anchored:
        if newest is None and s.sft.num_steps:
          _sync(p, p.initial_params(learner), 0, worker, journal)
          _evaluate(p, 'before_sft', 0, worker, journal, stop)
        start = supervised.run(p, imitator, saved_sft, saves, journal, stop)
        if anchored:
          learner.set_reference(start)
        state = saved.state if saved else learner.init_state(start)
      else:
        state = saved.state
      # Act 4: the generators get the weights, and must agree with the learner.
      _sync(p, state.params, step, worker, journal)
      _gate(p, learner, state, worker, journal, stop)
      # Act 5: the loop. Whoever waits in it raises Stopped when asked to.
      try:
        if step == 0:
          name = 'after_sft' if s.sft.num_steps else 'before_rl'
          _evaluate(p, name, step, worker, journal, stop)
        while step < s.run.num_steps:
          if s.evaluation.is_due(step):
            _evaluate(p, f'step_{step}', step, worker, journal, stop)
          worker.advance(step)
          groups = _take(buffer, stop, journal)
          selection = algorithms.select(
            groups, p.advantages, s.algorithm_config
          )
          metrics: dict[str, float] = {}
          if selection.scored:
            with journal.training('update'):
              batch = _batch(selection, s)
              state, metrics = learner.update(state, batch, step)
          _sync(p, state.params, step + 1, worker, journal)
          journal.trained(step, s.run.num_steps, groups, selection, metrics)
          worker.balance()
          step += 1
          # The last one waits for its evaluation.
          if saves.is_due(step) and step < s.run.num_steps:
            _save(p, saves, step, state, worker, journal)
        _evaluate(p, 'after_rl', step, worker, journal, stop)
      except Stopped:
        _save(p, saves, step, state, worker, journal, wait=True)
        raise
      # Act 6: what came of it.
      _save(p, saves, step, state, worker, journal, wait=True)
      return journal.summarise(state.params, p.plan.describe())


def _take(
  buffer: GroupBuffer, stop: threading.Event, journal: Journal
) -> list[Group]:
  """The groups of the next step."""
  with journal.training('wait'):
    while not stop.is_set():
      groups = buffer.take(_POLL_SECONDS)
      if groups is not None:
        return groups
  raise Stopped('stopped between two steps')


def _batch(selection: algorithms.Selection, s: configs.Settings) -> TrainBatch:
  """Rollouts with their advantages and global weights, packed."""
  lengths = [x.rollout.num_completion_tokens for x in selection.scored]
  weights = algorithms.token_weights(lengths, s.algorithm_config)
  return pack(
    [
      _item(x.rollout, x.advantage, float(weight))
      for x, weight in zip(selection.scored, weights, strict=True)
    ],
    s.learner.row_tokens,
  )


def _item(rollout: Rollout, advantage: float, weight: float) -> Item:
  return Item(
    rollout.tokens,
    rollout.loss_mask,
    rollout.behavior_logprobs,
    rollout.kept_logmass,
    advantage,
    weight,
  )


def _sync(
  p: Parts,
  params: Any,
  version: int,
  worker: RolloutWorker,
  journal: Journal,
) -> None:
  """Gives the generators the parameters of `version`."""
  with journal.training('sync'):
    sent = p.sync.send(params, version)
    acknowledged = worker.load_params(sent.params, version)
  assert acknowledged == version, (acknowledged, version)
  journal.synced(sent)


def _gate(
  p: Parts,
  learner: Any,
  state: TrainState,
  worker: RolloutWorker,
  journal: Journal,
  stop: threading.Event,
) -> None:
  """Refuses to start where generator and learner disagree on real prompts."""
  gate = p.settings.parity
  with journal.training('gate'):
    groups = worker.generate(
      p.heldout[: gate.num_prompts],
      p.settings.run.completions_per_prompt,
      p.sampling,
      step=0,
      stop=stop,
    )
    if groups is None:
      raise Stopped('stopped in the parity gate')
    rollouts = [r for g in groups for r in g.rollouts]
    batch = pack(
      [_item(r, advantage=0.0, weight=0.0) for r in rollouts],
      p.settings.learner.row_tokens,
    )
    ours = learner.logprobs(state.params, batch)
    layers = p.drift(learner, state.params, batch)
  mask = batch.loss_mask > 0
  difference = np.abs(ours - batch.behavior_logprobs)[mask]
  journal.gated(difference, layers, groups)
  most, mean = p.settings.parity_bounds
  if not (difference.max() <= most and difference.mean() <= mean):
    raise ParityError(
      f'generator and learner differ by max {difference.max():.2e}, mean '
      f'{difference.mean():.2e} in log-prob; in {p.settings.precision} '
      f'parity.max_abs={most} and parity.mean_abs={mean}. Training would be '
      'off policy without knowing. In float32 this is a bug; in other numbers '
      'a model may need more than is usual.'
    )


def _evaluate(
  p: Parts,
  name: str,
  step: int,
  worker: RolloutWorker,
  journal: Journal,
  stop: threading.Event,
) -> None:
  """Held-out pass@k by the same path as training; once for a step."""
  if journal.has_evaluated(name, step):
    return
  config = p.settings.evaluation
  with journal.training('evaluate'):
    groups = worker.generate(
      p.heldout,
      config.samples_per_prompt,
      config.sampling(p.sampling),
      step,
      stop,
    )
  if groups is None:
    raise Stopped(f'stopped in the evaluation {name}')
  result = evaluate.summarise(groups, config.ks)
  journal.evaluated(name, step, result, groups)


def _save(
  p: Parts,
  saves: Saves,
  step: int,
  state: TrainState,
  worker: RolloutWorker,
  journal: Journal,
  wait: bool = False,
) -> None:
  with journal.training('checkpoint'):
    snapshot = worker.snapshot(
      lambda: {'stream': p.stream.get_state(), 'journal': journal.state()}
    )
    host = {
      'stream': snapshot['stream'],
      'journal': snapshot['journal'],
      'rollouts': rollouts_to_json(snapshot),
    }
    saves.save('rl', step, state, host, wait=wait)
