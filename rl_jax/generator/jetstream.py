"""Our engine behind JetStream's interface, for its orchestrator and server.

For `google-jetstream==0.2.2`, whose `server_lib.run` then serves it over gRPC:

  engine = JetStreamEngine(Engine(...), params, tokenizer, sampling)
  server = serve(engine, port=9000)

JetStream prefills and generates in two threads and hands prefixes from one to
the other; here a prefix is a handle, what it stands for stays in the engine's
pages, and a lock keeps the threads apart. What 0.2.2 lacks: requests have no
sampling of their own, so `sampling` is everybody's; a first token comes with
the second; a request gets up to a dispatch more tokens than it asked for; a
slot is emptied when it is filled again.

It imports seqio, hence TensorFlow, for tokenisers that we do not use: where
seqio is not installed (`pip install --no-deps google-jetstream==0.2.2 grpcio
prometheus-client shortuuid tiktoken`) an empty module stands in for it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import logging
import sys
import threading
import types
from collections import deque
from typing import Any

import jax
import numpy as np

from rl_jax.generator.engine import Engine, Prefix
from rl_jax.generator.pages import OutOfPages
from rl_jax.types import Prompt, Request, SamplingParams


def _stand_in(name: str, **attributes: Any) -> None:
  module = types.ModuleType(name)
  vars(module).update(attributes)
  sys.modules[name] = module


if importlib.util.find_spec('seqio') is None:
  _vocabularies = {'SentencePieceVocabulary': object, 'Vocabulary': object}
  _stand_in('seqio')
  _stand_in('seqio.vocabularies', **_vocabularies)
if not hasattr(jax, 'tree_map'):  # gone from jax; 0.2.2 calls it
  jax.tree_map = jax.tree_util.tree_map  # pyright: ignore

from jetstream.core import config_lib, server_lib  # noqa: E402  # pyright: ignore
from jetstream.engine import (  # noqa: E402  # pyright: ignore
  engine_api,
  tokenizer_api,
  tokenizer_pb2,
)

# JetStream has everybody, JAX too, log what each step does.
logging.getLogger().setLevel(logging.WARNING)

_NO_BOS = -1  # JetStream puts a bos before token ids; this one is taken off
_POLL_SECONDS = 0.1
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Handle:
  """A prefix in the engine's pages. No pytree: JetStream deletes those."""

  prefix: Prefix


class JetStreamEngine(engine_api.Engine):
  """One `Engine` as JetStream has it.

  Args:
    engine: with pages for all slots (`num_pages=0`) and at least four prompts
      (`prefill_rows`), since JetStream holds that many between its threads.
    params: as `Engine.load_params` takes them.
    tokenizer: of the model, a `prompts.tokenizer.Tokenizer`.
    sampling: of every request; `max_tokens` is what fits.
  """

  def __init__(
    self,
    engine: Engine,
    params: Any,
    tokenizer: Any,
    sampling: SamplingParams,
  ):
    if engine.config.prefill_rows < 4 or engine.config.num_pages:
      raise ValueError(
        f'generator.num_pages={engine.config.num_pages} and prefill_tokens / '
        f'prefill_chunk = {engine.config.prefill_rows}: JetStream needs '
        'num_pages=0 and four prompts at once.'
      )
    self._engine, self._tokenizer, self._sampling = engine, tokenizer, sampling
    engine.load_params(params, 0)
    S = engine.config.num_slots
    self._lock = threading.Condition()
    self._ids = itertools.count()
    # Drawn, and not handed out yet, of each slot; how many were.
    self._drawn: list[deque[int]] = [deque() for _ in range(S)]
    self._sent = np.zeros(S, np.int32)
    self._filled: set[int] = set()

  # ---- verbs

  def prefill(
    self, *, params, existing_prefix=None, padded_tokens, true_length
  ):
    del params, existing_prefix
    tokens = np.asarray(padded_tokens, np.int32)[:true_length]
    tokens = tokens[tokens != _NO_BOS]
    if not len(tokens):  # an error here would kill the server
      tokens = np.array([self._tokenizer.pad_id], np.int32)
    prompt = Prompt(next(self._ids), 'jetstream', '', tokens, None)
    sampling = dataclasses.replace(
      self._sampling, max_tokens=self._engine.limits.length - len(tokens)
    )
    request = Request(prompt, 1, sampling, step=0)
    with self._lock:
      while True:
        try:
          prefix = self._engine.start(request, tokens, [0])
          break
        except OutOfPages:  # until a slot is emptied
          self._lock.wait(_POLL_SECONDS)
      while not prefix.complete:
        self._engine.prefill([prefix])
    return _Handle(prefix)

  def insert(self, prefix, decode_state, slot):
    handle: _Handle = prefix
    with self._lock:
      if slot in self._filled:
        self._engine.free(slot)
      self._engine.insert(handle.prefix, {0: slot})
      self._engine.drop(handle.prefix)
      self._filled.add(slot)
      self._drawn[slot] = deque([handle.prefix.first[0].token])
      request, first = handle.prefix.request, handle.prefix.first[0].token
      if first in self._sampling.stop_ids or request.sampling.max_tokens == 1:
        self._engine.free(slot)
        self._filled.discard(slot)
      self._sent[slot] = 0
      self._lock.notify_all()
    return decode_state

  def generate(self, params, decode_state):
    """Columns: n tokens, n times whether they are some, tokens before them."""
    del params
    n, S = self._engine.config.steps_per_dispatch, len(self._drawn)
    with self._lock:
      active = [s for s in sorted(self._filled) if self._engine.is_active(s)]
      for slot in active:
        self._engine.reserve(slot)
      for slot, drawn in (self._engine.generate() if active else {}).items():
        self._drawn[slot] += [x.token for x in drawn]
      data = np.zeros((S, 2 * n + 1), np.int32)
      for slot, waiting in enumerate(self._drawn):
        count = min(n, len(waiting))
        data[slot, :count] = [waiting.popleft() for _ in range(count)]
        data[slot, n : n + count] = 1
        data[slot, -1] = self._sent[slot]
        self._sent[slot] += count
    tokens = engine_api.ResultTokens(
      data, (0, n), (n, 2 * n), (2 * n, 2 * n + 1), 1
    )
    return decode_state, tokens

  def init_decode_state(self, *args, **kwargs):
    del args, kwargs  # the engine has it

  def load_params(self, *args, **kwargs):
    del args, kwargs  # the engine has them

  # ---- what JetStream asks

  def get_tokenizer(self):
    return tokenizer_pb2.TokenizerParameters()  # pyright: ignore

  def build_tokenizer(self, metadata):
    del metadata
    return _JetStreamTokenizer(self._tokenizer)

  def get_prefix_destination_sharding(self):
    return None  # prefixes stay where they are

  @property
  def max_concurrent_decodes(self) -> int:
    return self._engine.config.num_slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    """A power of two from 16 on, as JetStream pads to."""
    return 1 << ((self._engine.limits.length - 1).bit_length() - 1)

  @property
  def mesh(self):
    return self._engine.mesh

  @property
  def colocated_cpus(self):
    return None


class _JetStreamTokenizer(tokenizer_api.Tokenizer):
  """Ours; a prompt that is too long loses its beginning, and that is told.

  JetStream has no way to refuse one: an error here would end the server.
  """

  def __init__(self, tokenizer: Any):
    self._tokenizer = tokenizer

  def encode(self, s: str, **kwargs: Any):
    size = kwargs['max_prefill_length']
    tokens = self._tokenizer.encode(s)
    if len(tokens) > size:
      _log.warning(
        'a prompt of %d tokens loses its first %d: %d is the most.',
        len(tokens),
        len(tokens) - size,
        size,
      )
      tokens = tokens[-size:]
    return np.pad(tokens, (0, size - len(tokens))), len(tokens)

  def decode(self, token_ids: list[int], **kwargs: Any) -> str:
    del kwargs
    return self._tokenizer.decode(token_ids)

  @property
  def pad_id(self) -> int:
    return self._tokenizer.pad_id

  @property
  def eos_id(self) -> int:
    return self._tokenizer.stop_ids[0]

  @property
  def bos_id(self) -> int:
    if not self._tokenizer.add_bos:
      return _NO_BOS
    return self._tokenizer.encode('')[0]

  @property
  def stop_tokens(self) -> set[int]:
    return set(self._tokenizer.stop_ids)


def serve(engine: JetStreamEngine, port: int) -> Any:
  """JetStream's gRPC server with this engine; `stop()` ends it."""

  class Config(config_lib.ServerConfig):
    interleaved_slices = ('cpu=1',)  # counts devices, of whatever kind
    interleaved_engine_create_fns = (lambda devices: engine,)

  return server_lib.run(
    port, Config, jax.devices()[:1], threads=64, jax_padding=False
  )
