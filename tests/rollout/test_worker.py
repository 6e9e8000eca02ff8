"""The worker with fake generators that draw a fixed text, and late verdicts.

What a fake draws is a function of prompt and sample alone, so that every
group is known beforehand; samples end in another order than they began, and
verdicts come from other threads in another order again.
"""

import dataclasses
import random
import threading
import time
import traceback
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from rl_jax.metrics import Timeline, TokenLedger
from rl_jax.rollout.buffer import GroupBuffer
from rl_jax.rollout.worker import Job, RolloutWorker
from rl_jax.types import Completion, Prompt, SamplingParams, Verdict

STOP = 9
SAMPLING = SamplingParams(max_tokens=5, stop_ids=(STOP,))
SECONDS = 20.0  # a bound that only failures reach


def make_prompt(n):
  tokens = np.arange(1, 2 + n % 3, dtype=np.int32)
  return Prompt(n, f'sums/{n}', f'<{n}>', tokens, answer=n)


def drawn(prompt_id, sample_index, max_tokens=SAMPLING.max_tokens):
  """The completion of a sample: STOP ends it, if it is not cut before."""
  length = 1 + (5 * prompt_id + 3 * sample_index) % 7
  tokens = [(prompt_id + sample_index + i) % STOP for i in range(length - 1)]
  return [*tokens, STOP][:max_tokens]


def text_of(tokens):
  return ' '.join(map(str, tokens))


def comes_true(condition, seconds=SECONDS):
  end = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > end:
      return False
    time.sleep(0.001)  # lets the others run
  return True


@dataclasses.dataclass(eq=False)
class Sample:
  request: object
  index: int
  tokens: list = dataclasses.field(default_factory=list)
  versions: list = dataclasses.field(default_factory=list)


class FakeGenerator:
  """Draws a token for each of its slots a step; newest samples first.

  While `may_load` is not set, new weights wait, as when draining.
  """

  def __init__(self, num_slots=3, loses=(), before_step=lambda: None):
    self.tokens_generated = 0
    self.num_steps = 0
    self.requests = []
    self.may_load = threading.Event()
    self.may_load.set()
    self._num_slots, self._loses = num_slots, loses
    self._before_step = before_step
    self._samples = []
    self._version = -1
    self._offered = None

  @property
  def idle(self):
    return not self._samples and self._offered is None

  @property
  def awaits_params(self):
    return self._offered is not None

  @property
  def policy_version(self):
    return self._version

  @property
  def tokens_in_flight(self):
    return sum(len(s.tokens) for s in self._samples)

  def submit(self, request):
    self.requests.append(request)
    self._samples += [Sample(request, i) for i in range(request.num_samples)]

  def offer_params(self, params, policy_version):
    assert params == f'params {policy_version}'
    self._offered = policy_version
    self._load()

  def _load(self):
    if self._offered is not None and self.may_load.is_set():
      self._version, self._offered = self._offered, None

  def step(self):
    assert self._version >= 0
    self._before_step()
    self.num_steps += 1
    self._load()
    done = []
    for sample in self._samples[-self._num_slots :]:
      request = sample.request
      whole = drawn(
        request.prompt.prompt_id, sample.index, request.sampling.max_tokens
      )
      sample.tokens.append(whole[len(sample.tokens)])
      sample.versions.append(self._version)
      self.tokens_generated += 1
      if sample.tokens == whole:
        self._samples.remove(sample)
        if sample.index not in self._loses:
          done.append(completed(sample))
    return done


def completed(sample):
  tokens = np.array(sample.tokens, np.int32)
  return Completion(
    request=sample.request,
    sample_index=sample.index,
    tokens=tokens,
    behavior_logprobs=-0.1 * tokens.astype(np.float32),
    kept_logmass=-0.01 * tokens.astype(np.float32),
    policy_versions=np.array(sample.versions, np.int32),
    finish_reason='stop' if tokens[-1] == STOP else 'length',
  )


def judge(text, answer):
  status = ('pass', 'fail', 'error')[len(text) % 3]
  return Verdict(status, float(status == 'pass'), f'{answer}: {text}')


class FakeVerifier:
  """Resolves its futures in two threads, late and out of order."""

  def __init__(self, judge=judge):
    self._judge, self._random = judge, random.Random(0)
    self._changed = threading.Condition()
    self._open = []
    self._closed = False
    self._threads = [
      threading.Thread(target=self._run, daemon=True) for _ in range(2)
    ]

  def submit(self, text, answer):
    future = Future()
    with self._changed:
      self._open.append((future, text, answer))
      self._changed.notify_all()
    return future

  def __enter__(self):
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(self, *exc_info):
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    for thread in self._threads:
      thread.join()

  def _run(self):
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._open or self._closed)
        if not self._open:
          return
        i = self._random.randrange(len(self._open))
        future, text, answer = self._open.pop(i)
      try:
        verdict = self._judge(text, answer)
      except Exception as e:  # noqa: BLE001  the future's, as in a service
        future.set_exception(e)
      else:
        future.set_result(verdict)


class Stream:
  """Prompts 0, 1, ...; counts how often it is asked, also for none."""

  def __init__(self, num_drawn=0):
    self.num_drawn = num_drawn
    self.num_calls = 0

  def take(self, n):
    self.num_calls += 1
    first, self.num_drawn = self.num_drawn, self.num_drawn + n
    return [make_prompt(i) for i in range(first, self.num_drawn)]


class Run:
  """A worker and what stands around it; also the learner's side of it."""

  def __init__(
    self,
    verify,
    *generators,
    n=2,
    num_samples=3,
    max_staleness=0,
    num_steps=4,
    next_step=0,
    num_drawn=0,
    take=None,
    decode=text_of,
  ):
    self.generators = generators or (FakeGenerator(),)
    self.buffer = GroupBuffer(n, max_staleness, num_steps, next_step)
    self.stream = Stream(num_drawn)
    self.timeline = Timeline(('generation',))
    self.ledger = TokenLedger()
    self.num_steps = num_steps
    self.worker = RolloutWorker(
      self.generators,
      self.buffer,
      Job(take or self.stream.take, decode, verify),
      sampling=SAMPLING,
      completions_per_prompt=num_samples,
      timeline=self.timeline,
      ledger=self.ledger,
    )

  def load(self, version):
    params = [f'params {version}'] * len(self.generators)
    return self.worker.load_params(params, version)

  def learn(self, first_step=0):
    """Yields (step, groups); the weights of a step come after it."""
    assert self.load(first_step) == first_step
    self.worker.advance(first_step)
    for step in range(first_step, self.num_steps):
      groups = self.buffer.take(SECONDS)
      assert groups is not None
      yield step, groups
      assert self.load(step + 1) == step + 1
      self.worker.advance(step + 1)


def num_tokens(groups):
  return sum(group.num_completion_tokens for group in groups)


def check_group(group, prompt_id, num_samples, max_tokens=5):
  """Everything but the versions is known beforehand."""
  prompt = make_prompt(prompt_id)
  assert group.prompt.prompt_id == prompt_id
  assert [r.sample_index for r in group.rollouts] == [*range(num_samples)]
  head = [0] * len(prompt.tokens)
  for i, rollout in enumerate(group.rollouts):
    tokens = drawn(prompt_id, i, max_tokens)
    stopped = tokens[-1] == STOP
    logprobs = [*head, *(-0.1 * np.float32(tokens))]
    logmass = [*head, *(-0.01 * np.float32(tokens))]
    assert rollout.tokens.tolist() == [*prompt.tokens, *tokens]
    assert rollout.loss_mask.tolist() == head + [1] * len(tokens)
    np.testing.assert_array_equal(rollout.behavior_logprobs, logprobs)
    np.testing.assert_array_equal(rollout.kept_logmass, logmass)
    chosen = rollout.policy_versions >= 0
    np.testing.assert_array_equal(chosen, rollout.loss_mask > 0)
    assert (rollout.policy_versions[~chosen] == -1).all()
    assert rollout.finish_reason == ('stop' if stopped else 'length')
    assert rollout.text == text_of(tokens[:-1] if stopped else tokens)
    assert rollout.verdict == judge(rollout.text, prompt_id)
    assert rollout.tokens.dtype == rollout.policy_versions.dtype == np.int32
    assert rollout.loss_mask.dtype == np.float32
    assert rollout.behavior_logprobs.dtype == np.float32
    assert rollout.kept_logmass.dtype == np.float32


@pytest.mark.parametrize('max_staleness', [0, 1, 3])
@pytest.mark.parametrize('num_generators', [1, 2])
def test_groups_are_whole_in_order_and_fresh_enough(
  max_staleness, num_generators
):
  with FakeVerifier() as verifier:
    run = Run(
      verifier.submit,
      *(FakeGenerator() for _ in range(num_generators)),
      max_staleness=max_staleness,
      num_steps=8,
    )
    with run.worker:
      for step, groups in run.learn():
        for i, group in enumerate(groups):
          check_group(group, prompt_id=2 * step + i, num_samples=3)
          assert 0 <= step - group.oldest_version <= max_staleness
        run.ledger.consumed(num_tokens(groups))
      run.ledger.balance(0)
      run.worker.balance()
  assert run.stream.num_drawn == 16
  requests = [r for g in run.generators for r in g.requests]
  for request in requests:  # the step that the random numbers depend on
    assert request.step == request.prompt.prompt_id // 2
    assert request.sampling == SAMPLING
  for i, generator in enumerate(run.generators):
    shares = {r.prompt.prompt_id % num_generators for r in generator.requests}
    assert shares == {i}


def test_at_staleness_0_every_token_is_of_the_version_that_consumes_it():
  with FakeVerifier() as verifier:
    run = Run(verifier.submit, FakeGenerator(), FakeGenerator())
    with run.worker:
      for step, groups in run.learn():
        for rollout in (r for group in groups for r in group.rollouts):
          versions = rollout.policy_versions[rollout.loss_mask > 0]
          assert (versions == step).all()


def test_generate_answers_in_order_while_training_groups_go_on():
  greedy = dataclasses.replace(SAMPLING, temperature=0, max_tokens=4)
  asked = [31, 5, 5, 17, 2, 40]
  with FakeVerifier() as verifier:
    run = Run(verifier.submit, max_staleness=3, num_steps=4)
    with run.worker:
      run.load(0)
      run.worker.advance(0)  # eight groups to make meanwhile
      groups = run.worker.generate(
        [make_prompt(i) for i in asked], 2, greedy, step=7
      )
      assert len(groups) == 6
      for prompt_id, group in zip(asked, groups):
        check_group(group, prompt_id, num_samples=2, max_tokens=4)
      run.ledger.consumed(num_tokens(groups), 'evaluation')
      for step in range(4):
        taken = run.buffer.take(SECONDS)
        for i, group in enumerate(taken):
          check_group(group, 2 * step + i, num_samples=3)
        run.ledger.consumed(num_tokens(taken))
      run.worker.balance()
      assert run.worker.generate([], 2, greedy, step=8) == []
  orders = [r for r in run.generators[0].requests if r.sampling == greedy]
  assert [r.prompt.prompt_id for r in orders] == asked
  assert {(r.step, r.num_samples) for r in orders} == {(7, 2)}
  keys = [r.key for r in run.generators[0].requests]
  assert len(set(keys)) == len(keys) == 14


def test_errors_of_the_verifier_stay_in_the_group():
  def judge(text, answer):
    status = 'error' if len(text) % 2 else 'refused'
    return Verdict(status, 0.0, 'no interpreter')

  with FakeVerifier(judge) as verifier:
    run = Run(verifier.submit, num_samples=4)
    with run.worker:
      for _, groups in run.learn():
        verdicts = [r.verdict for group in groups for r in group.rollouts]
        assert len(verdicts) == 8
        assert {v.status for v in verdicts} <= {'error', 'refused'}
        assert {v.reason for v in verdicts} == {'no interpreter'}


# ---- failures


class Bomb:
  """Raises where it is put, once it is armed."""

  def __init__(self):
    self.armed = threading.Event()

  def strike(self):
    if self.armed.is_set():
      raise RuntimeError('boom')

  def before(self, function):
    def wrapped(*args):
      self.strike()
      return function(*args)

    return wrapped


PARTS = ('step', 'take', 'decode', 'verify', 'verdict')


def bombed_run(bomb, part, **keys):
  """A run that can fail in `part`, and its verifier."""
  verifier = FakeVerifier(bomb.before(judge) if part == 'verdict' else judge)
  stream = Stream()
  generator = FakeGenerator(
    before_step=bomb.strike if part == 'step' else lambda: None
  )
  run = Run(
    bomb.before(verifier.submit) if part == 'verify' else verifier.submit,
    generator,
    take=bomb.before(stream.take) if part == 'take' else stream.take,
    decode=bomb.before(text_of) if part == 'decode' else text_of,
    **keys,
  )
  return run, verifier


def fails_soon(call):
  begin = time.monotonic()
  with pytest.raises(RuntimeError, match='boom') as raised:
    call()
  assert time.monotonic() - begin < 2
  assert 'strike' in ''.join(traceback.format_exception(raised.value))


@pytest.mark.parametrize('part', PARTS)
def test_a_failure_reaches_take(part):
  bomb = Bomb()
  run, verifier = bombed_run(bomb, part)
  with verifier, run.worker:
    run.load(0)
    bomb.armed.set()
    run.worker.advance(0)
    fails_soon(run.buffer.take)
    fails_soon(lambda: run.load(1))  # and whatever is called later
    fails_soon(lambda: run.worker.generate([make_prompt(0)], 1, SAMPLING, 0))


@pytest.mark.parametrize('max_staleness', [0, 3])
def test_a_generate_that_is_stopped_drops_what_was_drawn(max_staleness):
  stop, prompts = threading.Event(), [make_prompt(i) for i in range(200)]

  def before_step():
    if generator.num_steps == 30:
      stop.set()

  generator = FakeGenerator(before_step=before_step)
  with FakeVerifier() as verifier:
    run = Run(verifier.submit, generator, max_staleness=max_staleness)
    with run.worker:
      run.load(0)
      run.worker.advance(0)
      groups = run.worker.generate(prompts, 2, SAMPLING, step=7, stop=stop)
      assert groups is None
      run.worker.balance()
      # The orders go on, into nothing; so does what is trained on.
      while (
        run.worker.snapshot(dict)['unfinished_tokens'] or generator._samples
      ):
        time.sleep(0.01)
      run.worker.balance()
      for step in range(max_staleness + 1):
        taken = run.buffer.take(SECONDS)
        for i, group in enumerate(taken):
          check_group(group, 2 * step + i, num_samples=3)
        run.ledger.consumed(num_tokens(taken))
      run.worker.balance()
  assert run.ledger.as_dict()['dropped/interrupted'] > 0


@pytest.mark.parametrize('part', PARTS)
def test_a_failure_reaches_a_waiting_generate(part):
  bomb = Bomb()
  run, verifier = bombed_run(bomb, part, max_staleness=3)
  with verifier, run.worker:
    run.load(0)
    prompts = [make_prompt(i) for i in range(50)]
    bomb.armed.set()
    if part == 'take':
      run.worker.advance(0)
    fails_soon(lambda: run.worker.generate(prompts, 3, SAMPLING, 0))
    fails_soon(run.buffer.take)


@pytest.mark.parametrize('part', PARTS)
def test_a_failure_reaches_a_waiting_load_params(part):
  bomb = Bomb()
  run, verifier = bombed_run(bomb, part, max_staleness=3, num_steps=99)
  with verifier, run.worker:
    run.load(0)
    run.generators[0].may_load.clear()  # so that `load` waits for the failure
    bomb.armed.set()
    run.worker.advance(0)
    fails_soon(lambda: run.load(1))
    fails_soon(run.buffer.take)


def test_a_cancelled_verdict_is_a_failure():
  future = Future()
  run = Run(lambda text, answer: future)
  with run.worker:
    run.load(0)
    run.worker.advance(0)
    future.cancel()
    with pytest.raises(CancelledError):
      run.buffer.take(SECONDS)


def test_a_tree_too_few_is_a_failure():
  run = Run(None, FakeGenerator(), FakeGenerator())
  with run.worker, pytest.raises(ValueError, match='zip'):
    run.worker.load_params(['params 0'], 0)


def test_completions_that_never_come_are_named():
  with FakeVerifier() as verifier:
    run = Run(verifier.submit, FakeGenerator(), FakeGenerator(loses=(1,)))
    with run.worker:
      run.load(0)
      run.worker.advance(0)
      with pytest.raises(
        RuntimeError,
        match=r'generator 1 is idle, but returned 2 of 3 completions of '
        r'prompt 1 \(sums/1\)',
      ):
        run.buffer.take(SECONDS)


def test_late_verdicts_are_no_missing_completions():
  held = []

  def verify(text, answer):
    held.append((Future(), text, answer))
    return held[-1][0]

  run = Run(verify)
  with run.worker:
    run.load(0)
    run.worker.advance(0)
    assert comes_true(lambda: len(held) == 6)
    assert run.worker.generate([], 1, SAMPLING, 0) == []
    assert run.load(1) == 1  # wakes the worker, which has nothing to do
    for future, text, answer in reversed(held):
      future.set_result(judge(text, answer))
    for i, group in enumerate(run.buffer.take(SECONDS)):
      check_group(group, i, num_samples=3)


# ---- weights


def test_weights_are_acknowledged_when_all_generators_have_them():
  with FakeVerifier() as verifier:
    quick, slow = FakeGenerator(), FakeGenerator()
    run = Run(verifier.submit, quick, slow, max_staleness=3)
    with run.worker:
      run.load(0)
      slow.may_load.clear()
      versions = []
      thread = threading.Thread(
        target=lambda: versions.append(run.load(1)), daemon=True
      )
      thread.start()
      assert comes_true(lambda: slow.awaits_params)
      begin = slow.num_steps
      assert comes_true(lambda: slow.num_steps > begin + 20)
      assert (quick.policy_version, slow.policy_version) == (1, 0)
      assert thread.is_alive() and not versions
      slow.may_load.set()
      thread.join(SECONDS)
      assert versions == [1]
      assert (quick.policy_version, slow.policy_version) == (1, 1)


def test_tokens_bear_the_version_that_drew_them_across_a_swap():
  half_way = threading.Event()

  def before_step():
    if generator.num_steps == 2 and not half_way.is_set():
      half_way.set()
      assert may_go_on.wait(SECONDS)

  may_go_on = threading.Event()
  generator = FakeGenerator(before_step=before_step)
  with FakeVerifier() as verifier:
    run = Run(
      verifier.submit,
      generator,
      n=1,
      num_samples=1,
      max_staleness=1,
      num_drawn=3,
      num_steps=3,
    )
    with run.worker:
      run.load(0)
      run.worker.advance(0)
      assert half_way.wait(SECONDS)
      thread = threading.Thread(target=run.load, args=(1,), daemon=True)
      thread.start()
      assert comes_true(lambda: run.worker._weights is not None)
      may_go_on.set()
      thread.join(SECONDS)
      groups = [run.buffer.take(SECONDS)[0] for _ in range(2)]
  # Prompt 3 draws 2 tokens; prompt 4 would draw 7, and is cut at 5: three
  # steps of the old weights, which had begun when the new ones came.
  versions = [g.rollouts[0].policy_versions.tolist() for g in groups]
  assert versions == [[-1, 0, 0], [-1, -1, 0, 0, 0, 1, 1]]


class AfterFirstLook(threading.Condition):
  """Keeps the worker where it has looked for weights once, and found none."""

  def __init__(self):
    super().__init__()
    self.looked = threading.Event()
    self.may_go_on = lambda: True

  def __exit__(self, *exc_info):
    super().__exit__(*exc_info)
    mine = threading.current_thread().name == 'rollout-worker'
    if mine and not self.looked.is_set():
      self.looked.set()
      assert comes_true(self.may_go_on)


def test_weights_that_come_between_two_looks_are_taken():
  run = Run(None)
  wake = run.worker._wake = AfterFirstLook()
  wake.may_go_on = lambda: run.worker._weights is not None
  with run.worker:
    assert wake.looked.wait(SECONDS)
    assert run.load(0) == 0


# ---- account


class Auditor:
  """Checks the account of a run wherever it is called, and in a thread."""

  def __init__(self):
    self.entry = threading.RLock()  # from a result to its entry in the ledger
    self.num_taken = 0
    self.num_in_flight = 0  # checks that saw unfinished tokens
    self.failures = []
    self.done = threading.Event()
    self.run = None

  def check(self):
    run = self.run
    with self.entry:
      run.worker.balance()
      state = run.worker.snapshot(
        lambda: {'drawn': run.stream.num_drawn, **run.ledger.state()}
      )
      ready, flying = state['ready'], state['in_flight']
      assert not ready.keys() & flying.keys()
      assert sorted(ready.keys() | flying.keys()) == list(
        range(self.num_taken, state['num_admitted'])
      )
      assert state['drawn'] == state['num_admitted']
      assert state['generated'] == (
        sum(state['consumed'].values())
        + num_tokens(ready.values())
        + state['unfinished_tokens']
      )
      assert all(prompt.prompt_id == i for i, prompt in flying.items())
      self.num_in_flight += bool(flying and state['unfinished_tokens'])

  def watch(self):
    try:
      while not self.done.is_set():
        self.check()
    except BaseException as e:  # noqa: BLE001  raised by the test
      self.failures.append(e)

  def judge(self, text, answer):
    self.check()
    return judge(text, answer)


def test_the_account_holds_at_every_instant():
  """Checked before every step, at every verdict, and all the time between."""
  auditor = Auditor()
  with FakeVerifier(auditor.judge) as verifier:
    run = auditor.run = Run(
      verifier.submit,
      FakeGenerator(before_step=auditor.check),
      FakeGenerator(before_step=auditor.check),
      n=4,
      max_staleness=2,
      num_steps=20,
    )
    with run.worker:
      watcher = threading.Thread(target=auditor.watch)
      watcher.start()
      try:
        run.load(0)
        run.worker.advance(0)
        for step in range(20):
          groups = None
          while groups is None:
            with auditor.entry:
              groups = run.buffer.take(0)
              if groups is not None:
                auditor.num_taken += len(groups)
                run.ledger.consumed(num_tokens(groups))
            time.sleep(0)  # the lock is not fair
          run.load(step + 1)
          run.worker.advance(step + 1)
      finally:
        auditor.done.set()
        watcher.join()
      if auditor.failures:
        raise auditor.failures[0]
      run.ledger.balance(0)
  assert auditor.num_taken == 80
  assert auditor.num_in_flight > 100


def test_what_a_snapshot_has_is_run_again():
  held = {}

  def verify(text, answer):
    future = Future()
    held.setdefault(answer, []).append((future, text))
    return future

  run = Run(verify, max_staleness=1)
  with run.worker:
    run.load(0)
    run.worker.advance(0)  # prompts 0 to 3
    assert comes_true(lambda: sum(map(len, held.values())) == 12)
    for prompt_id in (2, 0):
      for future, text in held[prompt_id]:
        future.set_result(judge(text, prompt_id))
    saved = run.worker.snapshot(lambda: {'drawn': run.stream.num_drawn})
  unfinished = sum(len(drawn(p, i)) for p in (1, 3) for i in range(3))
  assert sorted(saved['ready']) == [0, 2]
  assert {i: p.prompt_id for i, p in saved['in_flight'].items()} == {1: 1, 3: 3}
  assert saved['num_admitted'] == saved['drawn'] == 4
  assert saved['unfinished_tokens'] == unfinished

  with FakeVerifier() as verifier:
    again = Run(verifier.submit, max_staleness=1, num_drawn=saved['drawn'])
    again.buffer.restore(saved['num_admitted'], saved['ready'])
    again.ledger.generated(run.ledger.state()['generated'])
    again.ledger.dropped(saved['unfinished_tokens'], 'interrupted')
    with again.worker:
      again.worker.balance()
      again.worker.restart(saved['in_flight'])
      for step, groups in again.learn():
        for i, group in enumerate(groups):
          check_group(group, 2 * step + i, num_samples=3)
        again.ledger.consumed(num_tokens(groups))
      again.worker.balance()
      again.ledger.balance(0)
  submitted = [r.prompt.prompt_id for r in again.generators[0].requests]
  assert submitted == [1, 3, 4, 5, 6, 7]
  assert [r.step for r in again.generators[0].requests] == [0, 1, 2, 2, 3, 3]


def test_a_snapshot_leaves_evaluations_out():
  held = []

  def verify(text, answer):
    held.append((Future(), text, answer))
    return held[-1][0]

  run = Run(verify)
  with run.worker:
    run.load(0)
    prompts = [make_prompt(8), make_prompt(9)]
    thread = threading.Thread(
      target=run.worker.generate, args=(prompts, 1, SAMPLING, 0), daemon=True
    )
    thread.start()
    assert comes_true(lambda: len(held) == 2)
    saved = run.worker.snapshot(dict)
    assert saved['ready'] == saved['in_flight'] == {}
    assert saved['num_admitted'] == 0
    for future, text, answer in held:
      future.set_result(judge(text, answer))
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_slow_consumer_stops_the_producer_and_loses_nothing():
  with FakeVerifier() as verifier:
    run = Run(verifier.submit, max_staleness=3, num_steps=8)
    with run.worker:
      run.load(0)
      run.worker.advance(0)
      consumed = []
      for step in range(8):
        bound = min(2 * (step + 4), 16)
        assert comes_true(
          lambda: len(run.buffer.ready()) + len(consumed) == bound  # noqa: B023
        )
        assert run.buffer.num_admitted == run.stream.num_drawn == bound
        assert run.generators[0].idle
        consumed += run.buffer.take(0)
        run.load(step + 1)
        run.worker.advance(step + 1)
  assert [g.prompt.prompt_id for g in consumed] == list(range(16))


# ---- the thread


def is_running():
  return any(t.name == 'rollout-worker' for t in threading.enumerate())


def test_leaving_ends_the_thread_without_weights():
  run = Run(None)
  with run.worker:
    assert is_running()
  assert not is_running()


def test_leaving_ends_the_thread_at_work_and_idle():
  with FakeVerifier() as verifier:
    for idle in (False, True):
      run = Run(verifier.submit, max_staleness=3, num_steps=99, n=20)
      with pytest.raises(KeyError):  # of the learner
        with run.worker:
          run.load(0)
          run.worker.advance(0)
          if idle:
            assert comes_true(lambda: len(run.buffer.ready()) == 80)  # noqa: B023
          raise KeyError
      assert not is_running()
      with pytest.raises(RuntimeError, match='was ended'):
        run.load(1)
      with pytest.raises(RuntimeError, match='was ended'):
        run.worker.generate([make_prompt(0)], 1, SAMPLING, 0)


def test_leaving_ends_the_thread_after_a_failure():
  bomb = Bomb()
  run, verifier = bombed_run(bomb, 'step')
  bomb.armed.set()
  with verifier, run.worker:
    run.load(0)
    run.worker.advance(0)
    fails_soon(run.buffer.take)
  assert not is_running()


def test_an_idle_worker_does_not_run_round():
  window = threading.Event()  # never set: 0.2 s in which nothing is to happen
  with FakeVerifier() as verifier:
    run = Run(verifier.submit)

    def rests():
      before = run.stream.num_calls, run.generators[0].num_steps
      window.wait(0.2)
      return (run.stream.num_calls, run.generators[0].num_steps) == before

    with run.worker:
      assert comes_true(lambda: run.stream.num_calls > 0)
      assert rests()  # without weights
      run.load(0)
      assert comes_true(rests, seconds=2)  # without room
      run.worker.advance(0)
      assert comes_true(lambda: len(run.buffer.ready()) == 2)
      assert comes_true(rests, seconds=2)  # with all done
      assert run.stream.num_calls < 100
      spent = run.timeline.seconds()['generation']
      assert spent['idle'] > 0.5 > spent['generate'] > 0
