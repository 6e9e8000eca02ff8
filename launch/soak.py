"""Random traffic against one engine: `python launch/soak.py --minutes=20`.

A small random model; more demand than there are slots and pages (110%), mixed
lengths, samples, temperatures and stops, requests that begin alike, aborts,
and new weights in each of the three ways. Once a minute the engine is drained,
and then no page and no token may be missing; a request that waits for long, or
memory that grows, ends the soak too. A line a minute, exit code 1 on a fault.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SLOTS, LENGTH, PAGE, VOCAB = 16, 96, 8, 64
PATIENCE = 3000  # steps of the scheduler that a request may take


def engine_of(seed: int):
  """A scheduler and two trees of weights for it."""
  import jax

  from rl_jax import meshes
  from rl_jax.generator.engine import Engine
  from rl_jax.generator.programs import Config, Limits
  from rl_jax.generator.quantize import Packing
  from rl_jax.generator.scheduler import Scheduler
  from rl_jax.models import base
  from rl_jax.sync.single_process import Sync

  model = base.Model(base.ModelConfig(vocab_size=VOCAB))
  plan = meshes.MeshPlan.create(meshes.Config(), jax.devices()[:1])
  width = -(-LENGTH // PAGE)
  config = Config(
    num_slots=SLOTS,
    page_size=PAGE,
    num_pages=int((SLOTS + 8) * width / 2.2),  # sequences are half as long
    steps_per_dispatch=4,
    prefill_tokens=64,
    prefill_chunk=8,
    speculate=2,
  )
  engine = Engine(
    model,
    plan.generation[0],
    config,
    limits=Limits(LENGTH, stop_ids=2),
    seed=seed,
  )
  sync = Sync(
    model,
    plan.training,
    plan.generation,
    dtype='float32',
    unroll=True,
    packing=Packing(),
  )
  trees = [
    sync.send(model.init(jax.random.key(i)), i).params[0] for i in range(2)
  ]
  return Scheduler(engine), trees


class Soak:
  """Traffic, and the account of it."""

  def __init__(self, seed: int):
    self.rng = np.random.default_rng(seed)
    self.scheduler, self.trees = engine_of(seed)
    self.version = 0
    self.scheduler.offer_params(self.trees[0], 0)
    self.steps = self.requests = self.aborted = self.longest = 0
    self.returned = 0  # tokens
    self.open: dict[int, tuple[int, int]] = {}  # key -> (samples, since)
    self.beginnings = self.rng.integers(0, VOCAB, (4, 24))

  def submit(self) -> None:
    from rl_jax.types import Prompt, Request, SamplingParams

    rng, key = self.rng, self.requests
    own = rng.integers(0, VOCAB, rng.integers(1, 40))
    begin = self.beginnings[rng.integers(4)][: rng.integers(0, 25)]
    tokens = np.concatenate([begin, own]).astype(np.int32)
    sampling = SamplingParams(
      max_tokens=int(rng.integers(1, LENGTH - len(tokens) + 1)),
      temperature=float(rng.choice([0.0, 0.3, 1.0])),
      stop_ids=tuple(rng.integers(0, VOCAB, rng.integers(0, 3)).tolist()),
    )
    samples = int(rng.integers(1, 9))
    prompt = Prompt(key, f'soak/{key % 50}', '', tokens, None)
    request = Request(prompt, samples, sampling, key % 3)
    self.scheduler.submit(dataclasses.replace(request, key=key))
    self.open[key] = (samples, self.steps)
    self.requests += 1

  def step(self) -> None:
    rng, scheduler = self.rng, self.scheduler
    while sum(n for n, _ in self.open.values()) < 2 * SLOTS:
      self.submit()
    if rng.random() < 0.02:
      key = int(rng.choice(list(self.open)))
      self.take(scheduler.abort(key))
      self.aborted += 1
    if rng.random() < 0.02:
      self.version += 1
      policy = str(rng.choice(['keep', 'recompute', 'drain']))
      engine = scheduler.engine
      engine.config = dataclasses.replace(engine.config, on_new_weights=policy)
      scheduler.offer_params(self.trees[self.version % 2], self.version)
    self.advance()

  def advance(self) -> None:
    self.take(self.scheduler.step())
    self.steps += 1
    for key, (_, since) in self.open.items():
      if self.steps - since > PATIENCE:
        raise SystemExit(f'request {key} waits since step {since}')

  def take(self, done) -> None:
    for c in done:
      left, since = self.open[c.request.key]
      self.returned += len(c.tokens)
      self.longest = max(self.longest, self.steps - since)
      self.open[c.request.key] = (left - 1, since)
      if left == 1:
        del self.open[c.request.key]

  def drain(self) -> None:
    while not self.scheduler.idle:
      self.advance()
    pool = self.scheduler.engine.pool
    faults = {
      'requests that never ended': len(self.open),
      'pages lost': self.scheduler.engine.num_pages - 1 - pool.num_free,
      'tokens lost': self.scheduler.tokens_generated - self.returned,
    }
    if any(faults.values()):
      raise SystemExit(f'{faults}')


def resident() -> int:
  """Bytes of this process in memory."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith('VmRSS'):
      return int(line.split()[1]) * 1024
  raise OSError('/proc/self/status says no VmRSS')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--minutes', type=float, default=20.0)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  soak, begin, memory = Soak(args.seed), time.monotonic(), []
  while (passed := time.monotonic() - begin) < 60 * args.minutes:
    until = passed + min(60.0, 60 * args.minutes / 4)
    while time.monotonic() - begin < until:
      soak.step()
    soak.drain()
    memory.append(resident())
    print(
      json.dumps(
        dict(
          minutes=round((time.monotonic() - begin) / 60, 2),
          steps=soak.steps,
          requests=soak.requests,
          aborted=soak.aborted,
          versions=soak.version,
          tokens=soak.returned,
          preemptions=soak.scheduler.preemptions,
          tokens_matched=soak.scheduler.engine.tokens_matched,
          tokens_guessed=soak.scheduler.tokens_guessed,
          longest_wait_steps=soak.longest,
          resident_mib=memory[-1] >> 20,
        )
      ),
      flush=True,
    )
  # The first quarter fills caches of JAX and of the allocator.
  settled = memory[len(memory) // 4]
  if memory[-1] > 1.05 * settled:
    raise SystemExit(f'memory grew from {settled} to {memory[-1]} bytes')


if __name__ == '__main__':
  main()
