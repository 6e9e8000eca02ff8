"""The whole loop, end to end: what a run promises, tried on a tiny one.

One finished run is shared; the programs are compiled once and come from JAX's
compilation cache afterwards. Everything runs on two of the CPU devices.
"""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from configs import base
from rl_jax import config as configs
from rl_jax import parts
from rl_jax.algorithms.base import LossInputs
from rl_jax.generator.engine import Engine
from rl_jax.generator.scheduler import Scheduler
from rl_jax.journal import Journal, digest
from rl_jax.learner.learner import NonFinite
from rl_jax.metrics import LedgerError
from rl_jax.rollout.packing import Item, pack
from rl_jax.rollout.worker import RolloutWorker
from rl_jax.saving import Saves, Stopped, locked
from rl_jax.sync.single_process import Sync
from rl_jax.train import ParityError, train
from rl_jax.types import Request, Verdict
from rl_jax.verifiers.service import VerifierService

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, PROMPTS, SAMPLES = 4, 4, 4  # learner steps, groups of each, rollouts

# A tiny model is never right: digits are worth something, so groups differ.
VERIFIER = """
import dataclasses
from rl_jax.types import Verdict

@dataclasses.dataclass(frozen=True)
class Config:
  mode: str = 'digits'

def check_answer(answer, config):
  pass

def verify(completion, answer, config):
  if config.mode == 'deaf':
    return Verdict('fail', 0.0, 'whatever it is')
  if config.mode == 'kind':
    return Verdict('pass', 1.0, 'whatever it is')
  if completion == answer:
    return Verdict('pass', 1.0, 'right')
  if config.mode == 'same':
    # Worth as much as a right one, so no group gives signal.
    return Verdict('fail', 1.0, 'wrong')
  if config.mode == 'broken' and completion[:1] in ('1', '3', '5', '7', '+'):
    raise OSError('disk full')
  digits = sum(c.isdigit() for c in completion)
  return Verdict('fail', digits / 10, 'digits')

def examples(answer, config):
  return {'gold': answer, 'empty': '', 'wrong': '0' + answer}
"""
# GRPO, whose gradient is infinite from a group on, if somebody says so.
ALGORITHM = """
import numpy as np
from rl_jax.algorithms.grpo import Config, advantages as _advantages, loss

groups_until_inf = float('inf')

def advantages(rewards, config):
  global groups_until_inf
  groups_until_inf -= len(rewards) == 4  # not where the plugin is tried
  return _advantages(rewards, config) * (1e38 if groups_until_inf < 0 else 1)
"""


def tiny(verifier_mode='digits', **flat):
  """A config of one-digit sums; `flat` has keys as 'sft__num_steps'."""
  config = base.get_config()
  values = {
    'num_steps': STEPS,
    'prompts_per_step': PROMPTS,
    'completions_per_prompt': SAMPLES,
    'mesh__mode': 'split',
    'model__tokenizer': 'chars:0123456789+=',
    'prompts__max_prompt_tokens': 4,
    'sampling__max_tokens': 4,
    'generator__num_slots': 16,
    'generator__page_size': 2,  # prompts that begin alike share a page
    'generator__steps_per_dispatch': 4,
    'generator__prefill_tokens': 32,
    'generator__prefill_chunk': 4,
    'learner__row_tokens': 16,
    'learner__logprob_chunk': 16,
    'learner__rows_per_microbatch': 8,
    'learner__remat': False,
    'optimizer__learning_rate': 5e-4,
    'sft__num_steps': 3,
    'sft__examples_per_step': 8,
    'service__max_pending': 2,  # the generator waits for the verifier
    'evaluation__num_prompts': 8,
    'checkpoint__every_steps': 1,
  }
  config.model.architecture = dict(
    num_layers=1, d_model=32, num_heads=2, num_kv_heads=2, head_dim=16, d_ffn=64
  )
  sums = dict(name='arithmetic', max_digits=1)
  config.prompts.train = dict(sums=dict(**sums, split='train'))
  config.prompts.heldout = dict(sums=dict(**sums, split='heldout'))
  for path, value in (values | flat).items():
    *sections, key = path.split('__')
    section = config
    for name in sections:
      section = section[name]
    section[key] = value
  config.verifier = dict(name='their_plugins.digits', mode=verifier_mode)
  return config


@pytest.fixture(scope='module')
def plugins(tmp_path_factory):
  """A folder on the path with plugins that are not ours."""
  folder = tmp_path_factory.mktemp('path')
  (folder / 'their_plugins').mkdir()
  (folder / 'their_plugins' / 'digits.py').write_text(VERIFIER)
  (folder / 'their_plugins' / 'inf_grpo.py').write_text(ALGORITHM)
  return folder


@pytest.fixture(scope='module', autouse=True)
def environment(plugins):
  """Two devices, and plugins that can be imported."""
  devices = jax.devices()[:2]
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(plugins)
    patch.setattr(jax, 'devices', lambda: devices)
    yield


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A synchronous run that nobody interrupts: (workdir, summary)."""
  workdir = tmp_path_factory.mktemp('finished')
  return workdir, train(tiny(), workdir)


def lines(workdir, name='metrics'):
  path = workdir / f'{name}.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()]


OF_A_PROCESS = ('time', 'tokens_per_second', 'compilations')


def untimed(workdir):
  """The lines of metrics.jsonl without what depends on the process."""
  return [
    {
      k: v
      for k, v in line.items()
      if k not in OF_A_PROCESS
      and not k.startswith(('seconds/', 'utilisation/'))
    }
    for line in lines(workdir)
  ]


def steps_with(workdir, key):
  return [line['step'] for line in lines(workdir) if key in line]


def checkpoints(workdir, phase='rl'):
  folder = workdir / 'checkpoints' / phase
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def check_balance(tokens):
  parts = sum(v for k, v in tokens.items() if k != 'generated')
  assert tokens['generated'] == parts > 0


def stop_after(patch, method, step):
  """An event that is set when the journal's `method` is told of `step`."""
  stop = threading.Event()
  original = getattr(Journal, method)

  def told(self, at, *args):
    original(self, at, *args)
    if at == step:
      stop.set()

  patch.setattr(Journal, method, told)
  return stop


def stopped(config, workdir, method, step):
  """Runs until the journal's `method` is told of `step`, and then stops."""
  with pytest.MonkeyPatch.context() as patch:
    stop = stop_after(patch, method, step)
    with pytest.raises(Stopped) as error:
      train(config, workdir, stop)
  return str(error.value)


def stopped_in_evaluation(config, workdir, step):
  """Runs until the evaluation before `step` begins, and then stops."""
  stop, generate = threading.Event(), RolloutWorker.generate

  def stops(self, *args, **keys):
    if step in args[3:]:  # the gate names its step, 0
      stop.set()
    return generate(self, *args, **keys)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(RolloutWorker, 'generate', stops)
    with pytest.raises(Stopped) as error:
      train(config, workdir, stop)
  return str(error.value)


# ---- what a finished run leaves


def test_summary(finished):
  workdir, summary = finished
  on_disk = json.loads((workdir / 'summary.json').read_text())
  assert on_disk.keys() == summary.keys()
  evaluation = on_disk['evaluation']
  assert list(evaluation) == ['before_sft', 'after_sft', 'after_rl']
  assert [e['step'] for e in evaluation.values()] == [0, 0, STEPS]
  for e in evaluation.values():
    assert 0 <= e['low'] <= e['pass_at_1'] <= e['high'] <= 1 and e['n'] == 8
  for lane in ('generation', 'training'):
    seconds = sum(on_disk['seconds'][lane].values())
    assert seconds == pytest.approx(on_disk['wall_seconds'], rel=0.01)
  # What the sync sends: before SFT, after it, after each step.
  assert on_disk['sync']['count'] == STEPS + 2
  assert on_disk['sync']['bytes'] > 0 and on_disk['sync']['seconds'] > 0
  assert len(on_disk['params_sha256']) == 64
  assert {'python', 'jax', 'optax'} <= on_disk['versions'].keys()
  assert len(on_disk['hardware']['devices']) == 2
  assert on_disk['command'] == sys.argv
  assert 'split' in on_disk['mesh']


def test_generator_and_learner_agree_in_float32(finished):
  parity = finished[1]['parity']
  assert parity['num_tokens'] >= 4 * SAMPLES
  assert parity['mean'] <= parity['max'] <= 1e-5


def test_files_have_every_step_once(finished):
  workdir, _ = finished
  assert steps_with(workdir, 'sft/loss') == [0, 1, 2]
  assert steps_with(workdir, 'reward') == list(range(STEPS))
  assert steps_with(workdir, 'evaluation/pass_at_1') == [0, 0, STEPS]
  rollouts = lines(workdir, 'rollouts')
  assert [r['prompt_id'] for r in rollouts] == [
    prompt for prompt in range(STEPS * PROMPTS) for _ in range(SAMPLES)
  ]
  assert [r['step'] for r in rollouts] == [
    step for step in range(STEPS) for _ in range(PROMPTS * SAMPLES)
  ]
  assert checkpoints(workdir) == [STEPS - 1, STEPS]


def test_nothing_compiles_after_the_first_step(finished):
  rows = lines(finished[0], 'metrics')
  counts = [row['compilations'] for row in rows if 'compilations' in row]
  assert len(counts) == STEPS
  assert counts[0] > 0 and not any(counts[1:]), counts


def test_tokens_balance(finished):
  workdir, summary = finished
  tokens = summary['tokens']
  check_balance(tokens)
  rollouts = lines(workdir, 'rollouts')
  trained = tokens['consumed/update'] + tokens.get('dropped/no_signal', 0)
  assert trained == sum(r['num_completion_tokens'] for r in rollouts)
  assert tokens['consumed/update'] > 0
  assert tokens['consumed/gate'] == summary['parity']['num_tokens']


def test_synchronous_rollouts_are_of_the_newest_weights(finished):
  for rollout in lines(finished[0], 'rollouts'):
    assert rollout['policy_version_oldest'] == rollout['step']
    assert rollout['policy_version_newest'] == rollout['step']


# ---- synchronous: equal to the loop that one would write down


def whitened(scores, truncated):
  del truncated
  return (scores - scores.mean()) / scores.std()


def reference_loop(
  config, workdir, advantages=whitened, weight=lambda lengths: 1 / sum(lengths)
):
  """RL from the SFT parameters of `workdir`; returns the last parameters.

  Args:
    advantages: (scores, which ones were truncated) of a group -> of each.
    weight: tokens of all sequences of a step -> of each token.
  """
  s = configs.settings(config)
  with parts.build(s) as p, Saves(workdir, s.checkpoint) as saves:
    learner = p.rl_learner()
    start = saves.restore('sft', p.sft_learner().abstract_state())
    state = learner.init_state(start.state.params)
    (scheduler,) = p.schedulers
    for step in range(s.run.num_steps):
      sent = p.sync.send(state.params, step)
      scheduler.offer_params(sent.params[0], step)
      prompts = p.stream.take(s.run.prompts_per_step)
      rollouts = {}
      for prompt in prompts:
        scheduler.submit(Request(prompt, SAMPLES, p.sampling, step))
      while not scheduler.idle:
        for done in scheduler.step():
          key = done.request.prompt.prompt_id, done.sample_index
          rollouts[key] = done
      items = []
      for prompt in prompts:
        group = [rollouts[prompt.prompt_id, i] for i in range(SAMPLES)]
        rewards = []
        for c in group:
          end = -1 if c.finish_reason == 'stop' else None
          text = p.tokenizer.decode(c.tokens[:end])
          rewards.append(p.verifier.verify(text, prompt.answer).score)
        rewards = np.array(rewards)
        if rewards.min() == rewards.max():
          continue
        cut = np.array([c.finish_reason == 'length' for c in group])
        found = advantages(rewards, cut)
        if found.min() < found.max():
          items += list(zip([prompt] * SAMPLES, group, found))
      each = weight([len(c.tokens) for _, c, _ in items])
      zeros = [np.zeros(len(prompt.tokens)) for prompt, _, _ in items]
      rows = [
        Item(
          tokens=np.concatenate([prompt.tokens, c.tokens]),
          loss_mask=np.append(zero, np.ones(len(c.tokens))),
          behavior_logprobs=np.append(zero, c.behavior_logprobs),
          kept_logmass=np.append(zero, c.kept_logmass),
          advantage=advantage,
          weight=each,
        )
        for (prompt, c, advantage), zero in zip(items, zeros)
      ]
      batch = pack(rows, s.learner.row_tokens)
      state, _ = learner.update(state, batch, step)
    return state.params


def test_synchronous_run_is_the_plain_loop(finished):
  workdir, summary = finished
  params = reference_loop(tiny(), workdir)
  assert digest(params) == summary['params_sha256']


@pytest.mark.slow
def test_sections_of_the_config_arrive_where_they_belong(tmp_path):
  config = tiny(
    num_steps=2,
    sft__learning_rate=1e-30,  # SFT must not take RL's
    algorithm__scale='none',
    algorithm__aggregation='constant',
    algorithm__constant=3.0,
    algorithm__truncated='zero',
    algorithm__clip_high=0.5,
  )
  summary = train(config, tmp_path)

  def centred(scores, truncated):
    rewards = np.where(truncated, 0.0, scores)
    return rewards - rewards.mean()

  params = reference_loop(
    config, tmp_path, centred, weight=lambda lengths: 1 / (3 * len(lengths))
  )
  assert digest(params) == summary['params_sha256']
  s = configs.settings(config)
  with parts.build(s) as p, Saves(tmp_path, s.checkpoint) as saves:
    learner = p.rl_learner()
    imitated = saves.restore('sft', p.sft_learner().abstract_state())
    assert imitated.step == 3
    untouched = p.initial_params(learner)
    assert digest(imitated.state.params) == digest(untouched)
    # On policy nothing is clipped, so the loop cannot tell.
    one = np.ones((1, 1), np.float32)
    token_loss, _ = learner._loss(
      LossInputs(one * math.log(2), 0 * one, None, one, one)
    )
    assert token_loss == pytest.approx(-1.5)


@pytest.mark.parametrize(
  'flat, message',
  [
    ({'learner__rows_per_microbatch': 3}, 'rows_per_microbatch=3'),
    ({'optimizer__warmup_steps': 9}, r'optimizer\.warmup_steps=9'),
    ({'prompts__train': 'long'}, r'row 0 has 18 tokens .*row_tokens=16'),
  ],
)
def test_what_does_not_fit_is_said_before_anything_compiles(
  flat, message, tmp_path, monkeypatch
):
  path = tmp_path / 'long.jsonl'
  path.write_text('{"prompt": "1+1=", "answer": "2", "how": "0000000000002"}\n')
  if flat.get('prompts__train') == 'long':
    entry = dict(name='jsonl', path=str(path), solution='how')
    flat = {'prompts__train': {'long': entry}}
  config = tiny(mesh__training_data=2, **flat)
  devices = jax.local_devices()[:3]
  monkeypatch.setattr(jax, 'devices', lambda: devices)
  with pytest.raises(ValueError, match=message):
    train(config, tmp_path / 'run')
  assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


# ---- resume


def test_resume_is_no_interruption(finished, tmp_path):
  workdir, summary = finished
  # In SFT, in RL, and with everything there is.
  message = stopped(tiny(), tmp_path, 'imitated', 1)
  assert message == 'stopped in SFT at step 2'
  assert checkpoints(tmp_path, 'sft') == [1, 2]
  message = stopped(tiny(), tmp_path, 'trained', 1)
  assert message == 'stopped between two steps'
  assert checkpoints(tmp_path) == [1, 2]
  message = stopped_in_evaluation(tiny(), tmp_path, STEPS)
  assert message == 'stopped in the evaluation after_rl'
  assert checkpoints(tmp_path) == [STEPS - 1, STEPS]
  resumed = train(tiny(), tmp_path)
  assert resumed['params_sha256'] == summary['params_sha256']
  assert untimed(tmp_path) == untimed(workdir)
  assert lines(tmp_path, 'rollouts') == lines(workdir, 'rollouts')
  assert resumed['evaluation'].keys() == summary['evaluation'].keys()
  check_balance(resumed['tokens'])
  for kind in ('consumed/update', 'consumed/evaluation'):
    assert resumed['tokens'][kind] == summary['tokens'][kind]


def test_another_config_is_refused_by_name(finished):
  workdir, _ = finished
  config = tiny(optimizer__learning_rate=0.5, seed=3)
  with pytest.raises(ValueError) as error:
    train(config, workdir)
  message = str(error.value)
  assert 'optimizer.learning_rate: 0.0005 -> 0.5' in message
  assert 'seed: 0 -> 3' in message and '--workdir' in message
  assert checkpoints(workdir) == [STEPS - 1, STEPS]


def test_two_runs_do_not_share_a_workdir(tmp_path):
  with locked(tmp_path), pytest.raises(ValueError, match='is in use by'):
    train(tiny(), tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ['.lock']


# ---- what stops a run


@pytest.mark.parametrize('label', ['train', 'heldout'])
def test_a_gold_answer_that_nobody_can_verify_is_named(tmp_path, label):
  path = tmp_path / 'rows.jsonl'
  rows = [{'prompt': '1+1=', 'answer': a} for a in ('2', '3 or so')]
  path.write_text('\n'.join(map(json.dumps, rows)))
  config = tiny(sft__num_steps=0)
  config.prompts[label] = dict(mine=dict(name='jsonl', path=str(path)))
  config.verifier = dict(name='math_answer')
  with pytest.raises(
    ValueError, match=r"cannot verify row 'mine/1', .*3 or so"
  ):
    train(config, tmp_path / 'run')


def test_a_generator_with_other_weights_does_not_start(tmp_path, monkeypatch):
  send = Sync.send

  def scaled(self, params, version):
    sent = send(self, params, version)
    sent.params[0]['stem']['final_norm'] *= 1.001
    return sent

  monkeypatch.setattr(Sync, 'send', scaled)
  with pytest.raises(ParityError, match=r'differ by max .*parity\.max_abs'):
    train(tiny(sft__num_steps=0), tmp_path)
  assert steps_with(tmp_path, 'reward') == checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_dead_generator_ends_the_run(tmp_path, monkeypatch):
  class Broken(RuntimeError):
    pass

  generate, calls = Engine.generate, []

  def breaks(self):
    calls.append(time.monotonic())
    if len(calls) == 3:
      raise Broken('of the engine')
    return generate(self)

  monkeypatch.setattr(Engine, 'generate', breaks)
  with pytest.raises(Broken, match='of the engine'):
    train(tiny(sft__num_steps=0), tmp_path)
  assert len(calls) == 3 and time.monotonic() - calls[-1] < 10


@pytest.mark.slow
def test_a_dead_verifier_ends_the_run(tmp_path, monkeypatch):
  start, trained = VerifierService._start_process, Journal.trained
  processes, killed = [], []

  def recorded(self):
    processes.append(start(self))
    return processes[-1]

  def kills(self, step, *args):
    trained(self, step, *args)
    if step == 1:
      os.kill(processes[-1].pid, signal.SIGKILL)
      killed.append(time.monotonic())

  monkeypatch.setattr(VerifierService, '_start_process', recorded)
  monkeypatch.setattr(Journal, 'trained', kills)
  with pytest.raises(RuntimeError, match=r'supervisor of verifier .* ended'):
    train(tiny(sft__num_steps=0), tmp_path)
  assert time.monotonic() - killed[0] < 10
  assert steps_with(tmp_path, 'reward') == [0, 1]


@pytest.mark.slow
def test_a_lost_token_is_found(tmp_path, monkeypatch):
  step, calls = Scheduler.step, []

  def loses(self):
    done = step(self)
    calls.append(done)
    if len(calls) == 3:
      self.tokens_generated += 1
    return done

  monkeypatch.setattr(Scheduler, 'step', loses)
  with pytest.raises(LedgerError, match=r'\+1 unaccounted for'):
    train(tiny(sft__num_steps=0), tmp_path)


@pytest.mark.slow
def test_what_is_not_finite_names_the_step_and_spares_the_checkpoint(
  tmp_path, monkeypatch, finished
):
  from their_plugins import inf_grpo

  config = tiny(algorithm__name='their_plugins.inf_grpo')
  monkeypatch.setattr(inf_grpo, 'groups_until_inf', 2 * PROMPTS)
  with pytest.raises(NonFinite, match=r'^step 2: .*grad_norm=inf'):
    train(config, tmp_path)
  assert steps_with(tmp_path, 'reward') == [0, 1]
  assert checkpoints(tmp_path) == [1, 2]
  # Mended, it goes on from there as if nothing had been.
  monkeypatch.setattr(inf_grpo, 'groups_until_inf', float('inf'))
  summary = train(config, tmp_path)
  assert summary['params_sha256'] == finished[1]['params_sha256']


# ---- groups without signal, rollouts without score


def digests_sent(patch):
  """Digest of the parameters by the version that is sent, as it grows."""
  send, found = Sync.send, {}

  def recorded(self, params, version):
    found[version] = digest(params)
    return send(self, params, version)

  patch.setattr(Sync, 'send', recorded)
  return found


@pytest.mark.slow
def test_without_signal_no_update(tmp_path, monkeypatch):
  sent = digests_sent(monkeypatch)
  config = tiny('same', sft__num_steps=0, num_steps=3)
  tokens = train(config, tmp_path)['tokens']
  metrics = [x for x in lines(tmp_path) if 'reward' in x]
  assert [x['skipped_update'] for x in metrics] == [1, 1, 1]
  assert not any(key.startswith('update/') for x in metrics for key in x)
  assert sorted(sent) == [0, 1, 2, 3] and len(set(sent.values())) == 1
  assert tokens['consumed/update'] == 0 < tokens['dropped/no_signal']
  check_balance(tokens)


@pytest.mark.slow
def test_what_has_no_score_leaves_the_group(tmp_path):
  config = tiny('broken', sft__num_steps=0, num_steps=2)
  summary = train(config, tmp_path)
  rollouts = lines(tmp_path, 'rollouts')
  broken = [r for r in rollouts if r['status'] == 'error']
  assert 0 < len(broken) < len(rollouts)
  assert all('disk full' in r['reason'] for r in broken)
  tokens = summary['tokens']
  assert tokens['dropped/unscored'] == sum(
    r['num_completion_tokens'] for r in broken
  )
  assert tokens['consumed/update'] > 0
  check_balance(tokens)


# ---- asynchronous


def check_staleness(rollouts, most):
  """No token is too old, and some are as old as a bounded buffer makes."""
  stale = [r['step'] - r['policy_version_oldest'] for r in rollouts]
  assert 0 < max(stale) <= most and min(stale) == 0


def check_consumed_once(rollouts, num_steps):
  drawn = [(r['prompt_id'], r['sample_index']) for r in rollouts]
  assert drawn == [
    (prompt, sample)
    for prompt in range(num_steps * PROMPTS)
    for sample in range(SAMPLES)
  ]


# Completions that the gate and the evaluation before RL draw.
BEFORE = 4 * SAMPLES + 8


def hold_after(patch, num_completions, version=math.inf):
  """The generators stand still once they have returned so many.

  Until they have the weights of `version`; without it, for ever.
  """
  step, returned, schedulers = Scheduler.step, [], set()

  def holds(self):
    schedulers.add(self)
    new = self.awaits_params or self.policy_version >= version
    if len(returned) >= num_completions and not new:
      return []
    done = step(self)
    returned.extend(done)
    return done

  patch.setattr(Scheduler, 'step', holds)
  return schedulers


@pytest.mark.slow
@pytest.mark.parametrize('on_new_weights', ['keep', 'recompute', 'drain'])
def test_asynchronous(on_new_weights, tmp_path, monkeypatch):
  # Few slots and short dispatches: of the twelve prompts that are admitted at
  # once, some are under way when the weights of version 1 come.
  config = tiny(
    max_staleness=2,
    num_steps=5,
    sft__num_steps=0,
    generator__num_slots=4,
    generator__steps_per_dispatch=1,
    generator__on_new_weights=on_new_weights,
  )
  held = hold_after(monkeypatch, BEFORE + 6 * SAMPLES, version=1)
  tokens = train(config, tmp_path)['tokens']
  rollouts = lines(tmp_path, 'rollouts')
  check_consumed_once(rollouts, 5)
  check_staleness(rollouts, 2)
  assert steps_with(tmp_path, 'reward') == [0, 1, 2, 3, 4]
  trained = tokens['consumed/update'] + tokens.get('dropped/no_signal', 0)
  assert trained == sum(r['num_completion_tokens'] for r in rollouts)
  check_balance(tokens)
  (scheduler,) = held
  assert (scheduler.preemptions > 0) == (on_new_weights == 'recompute')
  mixed = [
    r
    for r in rollouts
    if r['policy_version_oldest'] < r['policy_version_newest']
  ]
  assert bool(mixed) == (on_new_weights != 'drain')


@pytest.mark.slow
def test_resume_with_groups_ready_and_prompts_in_flight(tmp_path):
  config = tiny(
    max_staleness=2,
    num_steps=5,
    sft__num_steps=0,
    generator__num_slots=4,
    generator__steps_per_dispatch=1,
  )
  with pytest.MonkeyPatch.context() as patch:
    # Of the twelve prompts admitted at once, four are trained on and two or
    # so are ready, which leaves some in flight.
    hold_after(patch, BEFORE + 6 * SAMPLES)
    stopped(config, tmp_path, 'trained', 0)
  saved = json.loads(host_of(tmp_path, 1))
  rollouts = saved['rollouts']
  ready, in_flight = rollouts['ready'].keys(), rollouts['in_flight'].keys()
  assert ready and in_flight and not ready & in_flight
  assert {int(i) for i in ready | in_flight} == set(
    range(PROMPTS, rollouts['num_admitted'])
  )
  assert rollouts['unfinished_tokens'] > 0
  summary = train(config, tmp_path)
  check_consumed_once(lines(tmp_path, 'rollouts'), 5)
  check_staleness(lines(tmp_path, 'rollouts'), 2)
  tokens = summary['tokens']
  assert tokens['dropped/interrupted'] == rollouts['unfinished_tokens']
  check_balance(tokens)


def host_of(workdir, step):
  """What a checkpoint holds besides arrays, as text."""
  path = workdir / 'checkpoints' / 'rl' / str(step) / 'host' / 'metadata'
  return json.loads(path.read_text())['host']


@pytest.mark.slow
def test_colocated_with_two_engines(tmp_path, monkeypatch):
  devices = jax.local_devices()[:2]
  monkeypatch.setattr(jax, 'devices', lambda: devices)
  config = tiny(
    mesh__mode='colocated',
    mesh__generation_data=2,
    num_steps=3,
    sft__num_steps=0,
  )
  summary = train(config, tmp_path)
  assert 'colocated' in summary['mesh'] and '2 engines' in summary['mesh']
  assert summary['parity']['max'] <= 1e-5
  check_balance(summary['tokens'])
  rollouts = lines(tmp_path, 'rollouts')
  check_consumed_once(rollouts, 3)
  for r in rollouts:
    assert r['policy_version_oldest'] == r['policy_version_newest'] == r['step']


@pytest.mark.slow
def test_a_step_without_a_single_verdict_is_skipped(tmp_path, monkeypatch):
  submit, sent, steps = VerifierService.submit, digests_sent(monkeypatch), []
  trained = Journal.trained

  def counts(self, step, *args):
    trained(self, step, *args)
    steps.append(step)

  def breaks(self, completion, answer):
    if len(steps) != 1:  # all is well but while step 1 is drawn
      return submit(self, completion, answer)
    done = Future()
    done.set_result(Verdict('error', 0.0, 'no disk'))
    return done

  monkeypatch.setattr(Journal, 'trained', counts)
  monkeypatch.setattr(VerifierService, 'submit', breaks)
  summary = train(tiny(num_steps=3, sft__num_steps=0), tmp_path)
  rows = [x for x in lines(tmp_path) if 'verdict/error' in x]
  assert [x['skipped_update'] for x in rows] == [0, 1, 0]
  assert [x['verdict/error'] for x in rows] == [0, 1, 0]
  assert sent[0] != sent[1] == sent[2] != sent[3]
  assert summary['tokens']['dropped/unscored'] > 0
  check_balance(summary['tokens'])


# ---- the reference of the KL


@pytest.mark.slow
def test_kl_to_the_policy_that_rl_began_with(tmp_path):
  config = tiny(algorithm__kl_coef=0.1, num_steps=3)
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  summary = train(config, whole)
  kl = [x['update/kl_reference'] for x in lines(whole) if 'reward' in x]
  assert kl[0] == 0 < kl[1]  # at first, policy and reference are the same
  stopped(config, parts, 'trained', 0)
  resumed = train(config, parts)
  assert resumed['params_sha256'] == summary['params_sha256']
  assert untimed(parts) == untimed(whole)


# ---- what a resumed run may change


@pytest.mark.slow
def test_a_run_may_grow(finished, tmp_path):
  workdir, summary = finished
  train(tiny(num_steps=2), tmp_path)
  grown = train(tiny(), tmp_path)
  assert grown['params_sha256'] == summary['params_sha256']
  assert lines(tmp_path, 'rollouts') == lines(workdir, 'rollouts')
  assert grown['evaluation']['after_rl']['step'] == STEPS
  # What was measured at its first end stays in the account.
  assert steps_with(tmp_path, 'evaluation/pass_at_1') == [0, 0, 2, STEPS]
  assert train(tiny(), tmp_path) == json.loads(
    (tmp_path / 'summary.json').read_text()
  )
  # Killed in its last moment, it does nothing again.
  (tmp_path / 'summary.json').unlink()
  again = train(tiny(), tmp_path)
  used = 'consumed/evaluation'
  assert again['tokens'][used] == grown['tokens'][used]
  assert again['params_sha256'] == summary['params_sha256']
  assert steps_with(tmp_path, 'reward') == list(range(STEPS))


@pytest.mark.slow
def test_a_refused_resume_changes_nothing(tmp_path):
  rows = tmp_path / 'rows.jsonl'
  rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
  entry = dict(mine=dict(name='jsonl', path=str(rows)))
  config = tiny(sft__num_steps=0, num_steps=2, prompts__train=entry)
  workdir = tmp_path / 'run'
  train(config, workdir)

  def content():
    return {p.name: p.read_bytes() for p in workdir.glob('*.json*')}

  before = content()
  assert 'summary.json' in before
  with open(rows, 'a') as file:
    file.write('{"prompt": "1+2=", "answer": "3"}\n')
  config.num_steps = 4
  with pytest.raises(ValueError, match='the prompts changed'):
    train(config, workdir)
  assert content() == before
  config.num_steps = 1
  with pytest.raises(ValueError, match=r'num_steps=1: .* has done 2 steps'):
    train(config, workdir)
  assert content() == before


# ---- what the config says arrives where it is used


def test_sampling_arrives_in_generator_learner_and_evaluation(
  tmp_path, monkeypatch
):
  orders = []
  generate = RolloutWorker.generate

  def spy(self, prompts, num_samples, sampling, step, stop=None):
    orders.append(
      (step, num_samples, sampling.temperature, sampling.max_tokens)
    )
    return generate(self, prompts, num_samples, sampling, step, stop)

  monkeypatch.setattr(RolloutWorker, 'generate', spy)
  config = tiny(
    num_steps=2,
    sft__num_steps=0,
    sampling__temperature=0.6,
    sampling__top_p=0.9,
    evaluation__temperature=0.0,
    evaluation__max_tokens=2,
    evaluation__every_steps=1,
  )
  summary = train(config, tmp_path)
  gate, *evaluations = orders
  assert gate == (0, SAMPLES, 0.6, 4)
  assert evaluations == [(step, 1, 0.0, 2) for step in (0, 1, 2)]
  # What the learner scores is what was sampled from.
  assert 0 < summary['parity']['max'] <= 1e-5
  rows = [x for x in lines(tmp_path, 'metrics') if 'update/ratio' in x]
  assert len(rows) == 2
  for row in rows:
    assert row['update/ratio'] == pytest.approx(1, abs=1e-4)
    assert row['update/ratio_max'] == pytest.approx(1, abs=1e-4)
    assert row['update/ratio_min'] == pytest.approx(1, abs=1e-4)
    assert row['update/clip_fraction'] == 0


@pytest.mark.parametrize(
  'mode, message', [('deaf', "'gold'"), ('kind', "'empty'")]
)
def test_a_verifier_that_cannot_tell_is_refused_at_start(
  mode, message, tmp_path
):
  with pytest.raises(ValueError, match=message):
    train(tiny(mode), tmp_path)
  assert not (tmp_path / 'checkpoints').exists()


# ---- bfloat16


@pytest.mark.slow
def test_bfloat16_agrees_closely_enough(tmp_path, finished):
  config = tiny(
    num_steps=2,
    sft__num_steps=0,
    generator__dtype='bfloat16',
    learner__compute_dtype='bfloat16',
  )
  half = train(config, tmp_path)
  assert half['parity']['mean'] <= 0.02
  assert half['parity']['num_tokens'] > 0
  assert steps_with(tmp_path, 'reward') == [0, 1]
  # A sync moves every parameter in two bytes instead of four.
  sent, whole = half['sync'], finished[1]['sync']
  assert sent['bytes'] / sent['count'] == whole['bytes'] / whole['count'] / 2


@pytest.mark.slow
def test_int8_generation_is_told_and_corrected(tmp_path):
  config = tiny(
    num_steps=3,
    sft__num_steps=0,
    generator__weight_format='int8',
    generator__kv_format='int8',
  )
  summary = train(config, tmp_path)
  parity = summary['parity']
  assert 1e-5 < parity['mean'] <= 0.1
  (drift,) = parity['drift_by_layer']  # of one layer
  assert 1e-4 < drift < 0.1
  for row in (x for x in lines(tmp_path) if 'reward' in x):
    assert row['update/ratio'] == pytest.approx(1, abs=1e-6)
    assert row['update/correction_min'] < 1 < row['update/correction_max'] <= 2
    assert row['update/correction'] == pytest.approx(1, abs=0.1)


# ---- as a shell runs it

LAUNCHED = """
import json
import pathlib
from configs import base

def get_config():
  config = base.get_config()
  values = json.loads(pathlib.Path(__file__).with_suffix('.json').read_text())
  config.update(values)
  config.mesh.num_cpu_devices = 2
  return config
"""


@pytest.fixture
def launch(tmp_path, plugins):
  """Starts launch/run.py on the tiny config in a process of its own."""
  (tmp_path / 'tiny.py').write_text(LAUNCHED)
  environment = os.environ | {'PYTHONPATH': str(plugins)}

  def launch(workdir, **flat):
    (tmp_path / 'tiny.json').write_text(tiny(**flat).to_json())
    return subprocess.Popen(
      [
        *(sys.executable, str(ROOT / 'launch' / 'run.py')),
        *(f'--config={tmp_path / "tiny.py"}', f'--workdir={workdir}'),
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=environment,
    )

  return launch


def run_until(process, prefix, number):
  """Sends the signal when a line starts so; returns (exit code, output)."""
  output = []
  with process:
    for line in process.stdout:
      output.append(line)
      if prefix and line.startswith(prefix):
        process.send_signal(number)
        prefix = None
  assert prefix is None, ''.join(output)
  return process.returncode, ''.join(output)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(launch, tmp_path):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  code, output = run_until(launch(whole), None, 0)
  assert code == 0, output
  for prefix in ('sft 3/3', 'step    1/4', 'step    3/4'):
    code, output = run_until(launch(killed), prefix, signal.SIGKILL)
    assert code == -signal.SIGKILL, output
  code, output = run_until(launch(killed), None, 0)
  assert code == 0, output
  assert 'resumed         rl' in output
  summaries = [
    json.loads((w / 'summary.json').read_text()) for w in (whole, killed)
  ]
  assert summaries[0]['params_sha256'] == summaries[1]['params_sha256']
  assert untimed(killed) == untimed(whole)
  assert lines(killed, 'rollouts') == lines(whole, 'rollouts')
  assert steps_with(killed, 'reward') == list(range(STEPS))
  check_balance(summaries[1]['tokens'])


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_run(launch, tmp_path):
  workdir = tmp_path / 'run'
  code, output = run_until(launch(workdir, num_steps=100), 'step    2/', 9)
  assert code == -9, output
  series = workdir / 'checkpoints' / 'rl'
  process = launch(workdir, num_steps=100)
  begin = None
  with process:
    for line in process.stdout:
      if line.startswith('step ') and begin is None:
        series.rename(tmp_path / 'gone')  # at once: it is being written to
        series.write_text('')
        begin = time.monotonic()
  assert process.returncode == 1
  assert time.monotonic() - begin < 60


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_who_is_asked_to_end_saves_everything(launch, tmp_path, number):
  workdir = tmp_path / 'run'
  process = launch(workdir, num_steps=100)
  code, output = run_until(process, 'step    2/100', number)
  assert code == 128 + number, output
  assert 'the same command goes on from there' in output
  assert 'Traceback' not in output
  done = steps_with(workdir, 'reward')
  assert done == list(range(checkpoints(workdir)[-1]))
  assert 2 <= len(done) < 100


# ---- what it is all for


@pytest.mark.slow
def test_reward_rises(tmp_path):
  """A model that has hardly seen sums learns them from reward alone."""
  config = tiny(
    num_steps=90,
    prompts_per_step=16,
    completions_per_prompt=8,
    generator__num_slots=128,
    generator__prefill_tokens=64,
    learner__rows_per_microbatch=64,
    optimizer__learning_rate=2e-3,
    sft__num_steps=25,
    sft__examples_per_step=64,
    sft__learning_rate=3e-3,
    checkpoint__every_steps=100,
  )
  config.verifier = dict(name='math_answer', extract='whole')
  train(config, tmp_path)
  reward = [x['reward'] for x in lines(tmp_path) if 'reward' in x]
  assert np.mean(reward[-5:]) >= np.mean(reward[:5]) + 0.2
