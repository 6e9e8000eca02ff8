"""The compiled programs of the engine, one shape each.

`prefill` (chunks of prompts into pages), `first` (first tokens), `decode`
(several tokens of all slots), `verify` (as many of drafted ones as would have
been drawn) and `copy` (whole pages). They are functions of
their arguments only; the engine keeps the state and decides what runs.
`compile` builds them for devices that need not be here.

Letters: S slots, R chunks of a prefill, C tokens of a chunk, W pages of a row,
E logit biases, D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.generator.kv_layout import HeadsFirst, KVLayout, Pages
from rl_jax.generator.paged_attention import attend_pages, tpu_kernel
from rl_jax.generator.sampling import (
  Adjustment,
  Array,
  Counts,
  SlotSampling,
  count,
  most_likely,
  sample,
)
from rl_jax.models.base import Model
from rl_jax.types import Request

_LOWEST = {
  **dict.fromkeys(('num_pages', 'speculate', 'top_logprobs'), 0),
  'dispatches_ahead': -1,
}


@dataclasses.dataclass(frozen=True)
class Config:
  """Keys of `config.generator`."""

  num_slots: int = 64  # sequences decoded at once, per engine
  page_size: int = 16  # tokens of a KV page
  num_pages: int = 0  # pages of the pool, per engine; 0: all slots fit
  steps_per_dispatch: int = 8  # tokens decoded per slot in one dispatch
  prefill_tokens: int = 512  # prompt tokens of a prefill dispatch
  prefill_chunk: int = 32  # of them, that one prompt takes at a time
  dtype: str = 'float32'  # of weights and KV
  weight_format: str = 'dtype'  # of matrices: dtype | int8, see quantize.py
  kv_format: str = 'dtype'  # of KV: dtype | int8, see kv_layout.py
  attention: str = 'auto'  # auto | xla_loop | pallas_tpu
  unroll_layers: bool = True  # faster on CPU; False compiles faster
  prefix_cache: bool = True  # prompts that begin alike share pages
  speculate: int = 0  # drafted tokens of a slot that are verified at once
  top_logprobs: int = 0  # likeliest tokens that are told beside each drawn one
  # Dispatches that are sent before the results of an earlier one are read: the
  # host's work is hidden, and a slot that ends stays empty as long. -1: 1 on
  # accelerators; 0 on CPU, and with `speculate`, which needs the results.
  dispatches_ahead: int = -1
  order: str = 'fifo'  # of requests of a step: fifo | longest, see scheduler
  on_new_weights: str = 'keep'  # KV of running rollouts: keep|recompute|drain

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      low = _LOWEST.get(field.name, 1)
      if field.type == 'int' and value < low:
        raise ValueError(f'generator.{field.name}={value}: must be >= {low}.')
    if self.prefill_tokens % self.prefill_chunk:
      raise ValueError(
        f'generator.prefill_tokens={self.prefill_tokens}: must be a multiple '
        f'of prefill_chunk={self.prefill_chunk}; nearest legal: '
        f'{max(1, self.prefill_rows) * self.prefill_chunk}.'
      )
    if self.speculate and self.dispatches_ahead > 0:
      raise ValueError(
        f'generator.dispatches_ahead={self.dispatches_ahead} with speculate='
        f'{self.speculate}: drafts need the tokens before them; one of the two '
        'must be 0.'
      )
    legal = {
      'dtype': ('float32', 'bfloat16'),
      'weight_format': ('dtype', 'int8'),
      'kv_format': ('dtype', 'int8'),
      'attention': ('auto', 'xla_loop', 'pallas_tpu'),
      'order': ('fifo', 'longest'),
      'on_new_weights': ('keep', 'recompute', 'drain'),
    }
    for name, values in legal.items():
      if getattr(self, name) not in values:
        raise ValueError(
          f'generator.{name}={getattr(self, name)!r}: must be one of {values}.'
        )

  @property
  def prefill_rows(self) -> int:
    """Chunks of a prefill dispatch, and prompts that may wait for slots."""
    return self.prefill_tokens // self.prefill_chunk


class Limits(NamedTuple):
  """What the requests of an engine may ask for at most."""

  length: int  # tokens of prompt and completion
  stop_ids: int
  # Logit biases of a request. None: none, no penalties and no `min_tokens`,
  # and decoding does not spend time on counting tokens.
  logit_biases: int | None = None


class Moving(NamedTuple):
  """What decoding changes in a slot; see `Slots`."""

  last_token: Array  # [S] int32
  position: Array  # [S] int32
  active: Array  # [S] bool
  budget: Array  # [S] int32


class Slots(NamedTuple):
  """Host copy of the state of all slots; travels with each dispatch."""

  table: np.ndarray  # [S, W] int32
  last_token: np.ndarray  # [S] int32, drawn but not yet in the pages
  position: np.ndarray  # [S] int32, of last_token
  active: np.ndarray  # [S] bool
  budget: np.ndarray  # [S] int32, tokens that may still be drawn
  sampling: SlotSampling

  @classmethod
  def empty(cls, num_slots: int, width: int, limits: Limits) -> Slots:
    S = num_slots
    ints = lambda *shape: np.zeros((S, *shape), np.int32)  # noqa: E731
    floats = lambda *shape: np.zeros((S, *shape), np.float32)  # noqa: E731
    adjustment = None
    if (E := limits.logit_biases) is not None:
      adjustment = Adjustment(
        repetition=floats() + 1,
        presence=floats(),
        frequency=floats(),
        min_tokens=ints(),
        bias_ids=ints(E),
        biases=floats(E),
        history=ints(limits.length),
        num_prompt=ints(),
      )
    sampling = SlotSampling(
      temperature=floats(),
      top_k=ints(),
      top_p=floats() + 1,
      min_p=floats(),
      key_ids=ints(3),
      stop_ids=ints(limits.stop_ids) - 1,
      adjustment=adjustment,
    )
    return cls(ints(width), ints(), ints(), np.zeros(S, bool), ints(), sampling)

  @property
  def moving(self) -> Moving:
    return Moving(self.last_token, self.position, self.active, self.budget)

  def set_sampling(
    self, slot: int, request: Request, index: int, tokens: Sequence[int]
  ) -> None:
    """Of a slot whose prompt and completion so far are `tokens`."""
    given, mine = request.sampling, self.sampling
    mine.temperature[slot] = given.temperature
    mine.top_k[slot] = given.top_k
    mine.top_p[slot] = given.top_p
    mine.min_p[slot] = given.min_p
    mine.stop_ids[slot] = -1
    mine.stop_ids[slot, : len(given.stop_ids)] = given.stop_ids
    mine.key_ids[slot] = request.step, request.prompt.prompt_id, index
    if (a := mine.adjustment) is not None:
      a.repetition[slot] = given.repetition_penalty
      a.presence[slot] = given.presence_penalty
      a.frequency[slot] = given.frequency_penalty
      a.min_tokens[slot] = given.min_tokens
      a.biases[slot] = 0
      for i, (token, bias) in enumerate(given.logit_bias):
        a.bias_ids[slot, i], a.biases[slot, i] = token, bias
      a.history[slot, : len(tokens)] = tokens
      a.num_prompt[slot] = len(request.prompt.tokens)


class Programs:
  """The programs of one engine on one generation mesh.

  Args:
    num_pages: of the pool.
    width: most pages of a sequence.
  """

  def __init__(
    self,
    model: Model,
    mesh: Mesh,
    config: Config,
    *,
    num_pages: int,
    width: int,
    limits: Limits,
  ):
    self._model, self._config = model, config
    self._width, self._limits = width, limits
    dtype = 'int8' if config.kv_format == 'int8' else config.dtype
    self._kernel = None
    self._layout = KVLayout(dtype)
    if _backend(config, mesh) == 'pallas_tpu':
      self._layout = HeadsFirst(dtype, model.config.head_dim)
      self._kernel = tpu_kernel(mesh)
    self.caches = self._caches(mesh, num_pages)  # shapes and shardings
    self._replicated = NamedSharding(mesh, PartitionSpec())
    sharding = jax.tree.map(lambda x: x.sharding, self.caches)
    out = (sharding, self._replicated)
    self.prefill = jax.jit(
      self._prefill_program, donate_argnums=1, out_shardings=out
    )
    self.decode = jax.jit(
      self._decode_program,
      donate_argnums=1,
      out_shardings=(*out, self._replicated),
    )
    self.verify = jax.jit(
      self._verify_program, donate_argnums=1, out_shardings=out
    )
    self.copy = jax.jit(
      self._copy_program, donate_argnums=0, out_shardings=sharding
    )
    self.first = jax.jit(self._first_program)

  def new_caches(self) -> Any:
    """Empty pages."""
    return jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.caches
    )

  def compile(self, name: str, params: Any) -> jax.stages.Compiled:
    """`prefill` or `decode`, compiled from shapes and shardings of `params`.

    Nothing runs and no array is made: the mesh may be of a topology that is
    not here.
    """
    config = self._config
    R, C, S = config.prefill_rows, config.prefill_chunk, config.num_slots
    ints = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
    slots = Slots.empty(S, self._width, self._limits)
    rest = {
      'prefill': (ints(R, C), ints(R), ints(R), ints(R, self._width)),
      'decode': (slots, slots.moving, slots.active, np.int32(0)),
    }[name]
    program = getattr(self, name)
    return program.lower(params, self.caches, *self._described(rest)).compile()

  def _described(self, arguments: Any) -> Any:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=self._replicated
      ),
      arguments,
    )

  def _caches(self, mesh: Mesh, num_pages: int) -> Any:
    """(keys, values) of each layer, or stacked."""
    config, model = self._config, self._model.config
    depth = 0 if config.unroll_layers else model.num_layers
    pages = self._layout.pages(
      mesh,
      num_pages,
      config.page_size,
      model.num_kv_heads,
      model.head_dim,
      depth,
    )
    pair = (pages, pages)
    return pair if depth else (pair,) * model.num_layers

  def _prefill_program(self, params, caches, tokens, start, count, table):
    offsets = jnp.arange(tokens.shape[1])[None]
    valid = offsets < count[:, None]
    # Padding repeats the row's last position, which is always in the table.
    positions = start[:, None] + jnp.minimum(
      offsets, jnp.maximum(count, 1)[:, None] - 1
    )
    attend = attend_pages(table, positions, valid, self._layout, self._kernel)
    hidden, caches = self._model.hidden(
      params, tokens, positions, attend, caches
    )
    last = jnp.maximum(count, 1) - 1
    hidden_RD = jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0]
    return caches, hidden_RD

  def _copy_program(self, caches, source_S, target_S):
    return jax.tree.map(
      lambda pages: self._layout.copy(
        pages, source_S, target_S, stacked=not self._config.unroll_layers
      ),
      caches,
      is_leaf=lambda x: isinstance(x, Pages),
    )

  def _first_program(
    self, params, hidden_RD, row_S, position_S, sampling, seed
  ):
    hidden_SD = jnp.take(hidden_RD, row_S, axis=0)
    logits = self._model.logits(params, hidden_SD[:, None])[:, 0]
    seen = self._count(sampling, position_S)
    drawn = self._draw(logits, position_S, sampling, seed, seen)
    return pack(*(x[:, None] for x in drawn))

  def _decode_program(
    self, params, caches, slots: Slots, moved: Moving, known_S, seed
  ):
    """Goes on from `slots` where the host knows them, else from `moved`.

    Args:
      moved: of the last dispatch, which the host may not have read yet.
    """
    start = jax.tree.map(
      lambda host, device: jnp.where(known_S, host, device), slots.moving, moved
    )
    S, n = slots.active.shape[0], self._config.steps_per_dispatch
    sampling = slots.sampling
    slot_S = jnp.arange(S)

    def unfinished(carry):
      step, active = carry[0], carry[4]
      return (step < n) & jnp.any(active)

    def decode(carry):
      step, caches, last, position, active, budget, seen, out = carry
      attend = attend_pages(
        slots.table,
        position[:, None],
        active[:, None],
        self._layout,
        self._kernel,
      )
      hidden, caches = self._model.hidden(
        params, last[:, None], position[:, None], attend, caches
      )
      logits = self._model.logits(params, hidden)[:, 0]
      drawn = self._draw(logits, position + 1, sampling, seed, seen)
      token = drawn[0]
      if seen is not None:
        seen = seen._replace(drawn=seen.drawn.at[slot_S, token].add(active))
      *columns, counts = out
      columns = [
        column.at[:, step].set(x)
        for column, x in zip(columns, drawn, strict=True)
      ]
      out = (*columns, counts + active)
      last = jnp.where(active, token, last)
      position = position + active
      budget = budget - active
      stopped = jnp.any(token[:, None] == sampling.stop_ids, axis=-1)
      active = active & ~stopped & (budget > 0)
      return step + 1, caches, last, position, active, budget, seen, out

    top = (S, n, self._config.top_logprobs)
    out = (
      jnp.zeros((S, n), jnp.int32),
      jnp.zeros((S, n), jnp.float32),
      jnp.zeros((S, n), jnp.float32),
      jnp.zeros(top, jnp.int32),
      jnp.zeros(top, jnp.float32),
      jnp.zeros(S, jnp.int32),
    )
    carry = (
      jnp.int32(0),
      caches,
      *start,
      self._count(sampling, start.position + 1),
      out,
    )
    _, caches, *end, _, out = jax.lax.while_loop(unfinished, decode, carry)
    *columns, counts = out
    packed = jnp.concatenate([pack(*columns), counts[:, None]], axis=1)
    return caches, packed, Moving(*end)

  def _verify_program(self, params, caches, slots: Slots, draft_SN, seed):
    """As `decode`, for tokens that are guessed before: one pass for all.

    The sampler draws at each place of the draft as if it were right. Up to the
    first place where it is not, and there too, that is what `decode` draws,
    since what is drawn depends on the tokens before it and on its place only.

    Args:
      draft_SN: int32, -1 behind the end of a draft.
    """
    S, N = draft_SN.shape
    T = N + 1
    at_1T = jnp.arange(T)[None]
    position_S1 = jnp.asarray(slots.position)[:, None]
    active_S1 = jnp.asarray(slots.active)[:, None]
    is_draft_SN = draft_SN >= 0
    given_ST = jnp.concatenate(
      [slots.last_token[:, None], jnp.where(is_draft_SN, draft_SN, 0)], axis=1
    )
    length_S1 = 1 + jnp.sum(is_draft_SN, axis=1, keepdims=True)
    valid_ST = active_S1 & (at_1T < length_S1)
    # What is not valid stands where the last valid one does.
    position_ST = position_S1 + jnp.minimum(at_1T, length_S1 - 1)
    attend = attend_pages(
      slots.table, position_ST, valid_ST, self._layout, self._kernel
    )
    hidden, caches = self._model.hidden(
      params, given_ST, position_ST, attend, caches
    )
    logits = self._model.logits(params, hidden).reshape(S * T, -1)
    each = jax.tree.map(lambda x: jnp.repeat(x, T, axis=0), slots.sampling)
    drawn = self._draw(logits, jnp.ravel(position_ST) + 1, each, seed, None)
    drawn = [x.reshape(S, T, *x.shape[1:]) for x in drawn]
    token = drawn[0]
    right_SN = is_draft_SN & (token[:, :-1] == draft_SN)
    count_S = 1 + jnp.sum(jnp.cumprod(right_SN, axis=1), axis=1)
    stop_ids = slots.sampling.stop_ids[:, None]
    stopped_ST = jnp.any(token[..., None] == stop_ids, axis=-1)
    first_stop_S = jnp.argmax(stopped_ST, axis=1) + 1
    count_S = jnp.where(
      stopped_ST.any(axis=1), jnp.minimum(count_S, first_stop_S), count_S
    )
    count_S = jnp.minimum(count_S, slots.budget) * slots.active
    return caches, jnp.concatenate([pack(*drawn), count_S[:, None]], axis=1)

  def _draw(self, logits, positions, sampling, seed, seen):
    """Token, log-prob, kept log-mass, likeliest tokens and their log-probs."""
    number = self._config.top_logprobs
    return (
      *sample(logits, positions, sampling, seed, seen),
      *most_likely(logits, positions, sampling, seen, number),
    )

  def _count(self, sampling: SlotSampling, length_S: Any) -> Counts | None:
    if sampling.adjustment is None:
      return None
    vocab = self._model.config.vocab_size
    return count(sampling.adjustment, length_S, vocab)


def _backend(config: Config, mesh: Mesh) -> str:
  platform = mesh.devices.flat[0].platform
  fits = platform == 'tpu' and config.kv_format == 'dtype'
  if config.attention == 'auto':
    return 'pallas_tpu' if fits else 'xla_loop'
  if config.attention == 'pallas_tpu' and not fits:
    raise ValueError(
      f"generator.attention='pallas_tpu' on {platform} with "
      f'kv_format={config.kv_format!r}: it runs on TPU, with '
      "kv_format='dtype'; 'xla_loop' runs everywhere."
    )
  return config.attention


def pack(*columns: jax.Array) -> jax.Array:
  """[S, n] and [S, n, K] arrays as one to read: [S, all of it] int32."""
  return jnp.concatenate(
    [
      jax.lax.bitcast_convert_type(x, jnp.int32).reshape(x.shape[0], -1)
      for x in columns
    ],
    axis=1,
  )
