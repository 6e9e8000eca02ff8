"""The state of generation: which pages and slots there are, and whose.

Verbs, as JetStream has them: `start` and `prefill` put a prompt's keys and
values into pages and draw the first token of each of its samples, `insert`
gives a sample a slot, `generate` decodes several tokens of all slots in one
dispatch, `free` takes a slot back; `load_params` may be called between any
two of them. Which verb runs when is the scheduler's business; running out of
pages raises OutOfPages and changes nothing.

The samples of a prompt share its full pages, and so do prompts of the same
policy version that begin alike (pages.py); only the last, partial page is
copied: `insert` notes the copy, and all that are noted run in one dispatch
before anything else touches the pages. Every program (programs.py) has one
shape, so nothing compiles after the first use of each verb. Slot state lives on
the host and travels with each dispatch; tokens, log-probs and counts come back
in one array. With `generator.dispatches_ahead` that array is read when later
dispatches have been sent; what decoding changes in a slot then stays on the
device from one to the next, but where the host filled or freed the slot.

Letters: S slots, R chunks of a prefill, C tokens of a chunk, W pages of a row,
D model.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.generator.pages import OutOfPages, PagePool
from rl_jax.generator.programs import Config, Limits, Programs, Slots
from rl_jax.models.base import Model, Params
from rl_jax.types import Request


class Drawn(NamedTuple):
  """One drawn token."""

  token: int
  logprob: float
  kept_logmass: float
  policy_version: int  # of the weights that drew it
  likeliest: list[tuple[int, float]]  # tokens and log-probs: `top_logprobs`


class _Sent(NamedTuple):
  """A decode dispatch whose results have not been read."""

  packed: jax.Array
  fills: dict[int, int]  # of the slots that were active as the host knew
  policy_version: int


@dataclasses.dataclass(eq=False)
class Prefix:
  """A prompt on its way into, or in, the pages. Made by `Engine.start`."""

  request: Request
  tokens: np.ndarray  # [T] int32: the prompt, or prompt + resumed completion
  sample_indices: list[int]  # samples still to be inserted
  pages: list[int]
  done: int  # tokens whose keys and values are in the pages
  policy_version: int  # of what is in the pages
  first: dict[int, Drawn] = dataclasses.field(default_factory=dict)

  @property
  def complete(self) -> bool:
    return self.done == len(self.tokens)


class Engine:
  """One engine on one generation mesh.

  Args:
    model: the learner's own model.
    mesh: axes (data=1, tensor).
    config: sizes.
    limits: of requests.
    seed: of the run.
  """

  def __init__(
    self,
    model: Model,
    mesh: Mesh,
    config: Config,
    *,
    limits: Limits,
    seed: int,
  ):
    self.config, self.limits = config, limits
    self.vocab_size = model.config.vocab_size
    self.policy_version = -1
    self.mesh = mesh
    self._seed = np.int32(seed)
    self._params: Params | None = None
    self._width = -(-limits.length // config.page_size)
    smallest = 2 * self._width + 1
    full = (config.num_slots + config.prefill_rows) * self._width + 1
    self.num_pages = config.num_pages or full
    if self.num_pages < smallest:
      raise ValueError(
        f'generator.num_pages={config.num_pages}: sequences of '
        f'{limits.length} tokens on pages of {config.page_size} need at '
        f'least {smallest}; {full} never preempts, and is what 0 means.'
      )
    self.pool = PagePool(self.num_pages, config.page_size)
    self.tokens_prefilled = self.tokens_matched = 0
    self._slots = Slots.empty(config.num_slots, self._width, limits)
    self._pages: list[list[int]] = [[] for _ in range(config.num_slots)]
    self._versions = [-1] * config.num_slots  # of what is in a slot's pages
    self._noted: list[tuple[int, int]] = []  # page copies: source, target
    self._ahead = _dispatches_ahead(config, mesh, limits)
    self._sent: collections.deque[_Sent] = collections.deque()
    self._moved = jax.device_put(  # of the last dispatch; nothing is yet
      self._slots.moving, NamedSharding(mesh, PartitionSpec())
    )
    self._known = np.ones(config.num_slots, bool)  # the host's is the newest
    self._fills = [0] * config.num_slots  # times that a slot changed hands
    self.seconds_waited = 0.0  # for the results of decode dispatches
    self._programs = Programs(
      model,
      mesh,
      config,
      num_pages=self.num_pages,
      width=self._width,
      limits=limits,
    )
    self._caches = self._programs.new_caches()

  # ---- weights

  def load_params(self, params: Params, policy_version: int) -> int:
    """Takes new weights for the next dispatch; returns their version."""
    self._params, self.policy_version = params, policy_version
    self.pool.forget()
    return self.policy_version

  # ---- prompts

  def start(
    self, request: Request, tokens: np.ndarray, sample_indices: Sequence[int]
  ) -> Prefix:
    """Takes pages for a prompt; OutOfPages if they are not to be had.

    Its beginning may be in pages already (`generator.prefix_cache`).
    """
    size = self.config.page_size
    known = self.pool.match(tokens) if self.config.prefix_cache else []
    try:
      new = self.pool.allocate(-(-len(tokens) // size) - len(known))
    except OutOfPages:
      self.pool.release(known)
      raise
    done = len(known) * size
    self.tokens_matched += done
    return Prefix(
      request,
      tokens,
      list(sample_indices),
      known + new,
      done,
      self.policy_version,
    )

  def prefill(self, prefixes: Sequence[Prefix]) -> None:
    """Up to `prefill_tokens` of the prefixes' tokens, the first ones' first.

    A prefix takes as many of the dispatch's chunks as it needs: its earlier
    ones are in the pages when its later ones attend. Those that become
    complete get the first token of each of their samples.
    """
    R, C = self.config.prefill_rows, self.config.prefill_chunk
    assert prefixes
    self._copy_noted()
    tokens = np.zeros((R, C), np.int32)
    start, count = np.zeros(R, np.int32), np.zeros(R, np.int32)
    table = np.zeros((R, self._width), np.int32)
    last: dict[int, Prefix] = {}  # row of a complete prefix's last token
    r = 0
    for prefix in prefixes:
      while r < R and not prefix.complete:
        part = prefix.tokens[prefix.done : prefix.done + C]
        tokens[r, : len(part)] = part
        start[r], count[r] = prefix.done, len(part)
        table[r, : len(prefix.pages)] = prefix.pages
        prefix.done += len(part)
        self.tokens_prefilled += len(part)
        if prefix.complete:
          last[r] = prefix
        r += 1
    self._caches, hidden_RD = self._programs.prefill(
      self._params, self._caches, tokens, start, count, table
    )
    for prefix in last.values():
      self._remember(prefix.tokens, prefix.pages, prefix.policy_version)
    self._draw_first(hidden_RD, last)

  def drop(self, prefix: Prefix) -> None:
    """Gives the prefix's own hold on its pages back."""
    self.pool.release(prefix.pages)
    prefix.pages = []

  # ---- slots

  def insert(self, prefix: Prefix, assignment: dict[int, int]) -> None:
    """Gives samples a slot: {sample index: free slot}.

    The prefix's full pages are shared, its last partial page is copied.
    """
    size = self.config.page_size
    assert prefix.pages, 'the prefix was dropped'
    num_full = len(prefix.tokens) // size
    partial = num_full < len(prefix.pages)
    own = self.pool.allocate(len(assignment)) if partial else []
    for i, (index, slot) in enumerate(assignment.items()):
      assert not self._slots.active[slot], slot
      shared = prefix.pages[:num_full]
      self.pool.share(shared)
      self._set_pages(slot, shared + own[i : i + 1])
      self._versions[slot] = prefix.policy_version
      self._fill_slot(prefix, index, slot)
      prefix.sample_indices.remove(index)
    self._noted += [(prefix.pages[num_full], page) for page in own]

  def reserve(self, slot: int) -> None:
    """Pages for the tokens of the next dispatch, or OutOfPages."""
    fill = self._fills[slot]
    unread = sum(sent.fills.get(slot) == fill for sent in self._sent)
    ahead = self.config.steps_per_dispatch * (unread + 1)
    ahead = max(ahead, self.config.speculate + 1)
    steps = min(ahead, int(self._slots.budget[slot]))
    length = int(self._slots.position[slot]) + steps
    missing = -(-length // self.config.page_size) - len(self._pages[slot])
    if missing > 0:
      pages = self.pool.allocate(missing)
      self._set_pages(slot, self._pages[slot] + pages)

  def generate(
    self, drafts: dict[int, list[int]] | None = None
  ) -> dict[int, list[Drawn]]:
    """Decodes up to `steps_per_dispatch` tokens of each slot.

    Args:
      drafts: of slots, at most `speculate` tokens that may come next. Each
        slot then draws a token, and as many before it as its draft guessed.

    Returns:
      The tokens drawn by each slot that was active and not freed since; with
      `dispatches_ahead` those of an earlier call, or none yet. A slot that
      drew a stop token or spent its budget is not active any more; `free` it.
    """
    self._copy_noted()
    active = np.flatnonzero(self._slots.active).tolist()
    # Copies, since the host goes on to write to its own.
    slots = jax.tree.map(np.copy, self._slots)
    if drafts is None:
      self._caches, packed, self._moved = self._programs.decode(
        self._params,
        self._caches,
        slots,
        self._moved,
        self._known.copy(),
        self._seed,
      )
    else:
      draft_SN = np.full(
        (self.config.num_slots, self.config.speculate), -1, np.int32
      )
      for slot, tokens in drafts.items():
        # The last token of a budget is drawn, not guessed.
        tokens = tokens[: int(self._slots.budget[slot]) - 1]
        draft_SN[slot, : len(tokens)] = tokens
      self._caches, packed = self._programs.verify(
        self._params, self._caches, slots, draft_SN, self._seed
      )
    self._known[:] = self._ahead == 0
    fills = {slot: self._fills[slot] for slot in active}
    self._sent.append(_Sent(packed, fills, self.policy_version))
    return self._read() if len(self._sent) > self._ahead else {}

  def _read(self) -> dict[int, list[Drawn]]:
    """Waits for the oldest dispatch, and takes its tokens."""
    sent = self._sent.popleft()
    begun = time.monotonic()
    packed = np.asarray(sent.packed)
    self.seconds_waited += time.monotonic() - begun
    mine = [s for s, fill in sent.fills.items() if self._fills[s] == fill]
    counts = packed[mine, -1]
    rows = self._unpack(packed[mine, :-1], counts, sent.policy_version)
    drawn = {slot: row for slot, row in zip(mine, rows, strict=True) if row}
    for slot, tokens in drawn.items():
      self._advance(slot, tokens)
    return drawn

  def free(self, slot: int, tokens: np.ndarray | None = None) -> None:
    """Returns the slot's pages; the slot may be filled again.

    Args:
      slot: that was filled.
      tokens: prompt and completion, by which the pages will be known; None
        if they are not worth it.
    """
    self._copy_noted()  # or its pages could be the target of two copies
    if tokens is not None:
      written = tokens[: self._slots.position[slot]]
      self._remember(written, self._pages[slot], self._versions[slot])
    self.pool.release(self._pages[slot])
    self._set_pages(slot, [])
    self._slots.active[slot] = False
    self._changed_hands(slot)

  def is_active(self, slot: int) -> bool:
    """As far as results have been read."""
    return bool(self._slots.active[slot])

  def _copy_noted(self) -> None:
    """Sources that were given back since still hold what they held: only
    `prefill` and `generate` write pages, and both call this first."""
    S = self.config.num_slots
    while self._noted:
      pairs = np.zeros((2, S), np.int32)  # (0, 0) copies trash onto itself
      part, self._noted = self._noted[:S], self._noted[S:]
      pairs[:, : len(part)] = np.transpose(part)
      self._caches = self._programs.copy(self._caches, *pairs)

  # ---- host state

  def _remember(
    self, tokens: np.ndarray, pages: list[int], policy_version: int
  ) -> None:
    if self.config.prefix_cache and policy_version == self.policy_version:
      self.pool.remember(tokens, pages)

  def _set_pages(self, slot: int, pages: list[int]) -> None:
    self._pages[slot] = pages
    self._slots.table[slot] = 0
    self._slots.table[slot, : len(pages)] = pages

  def _fill_slot(self, prefix: Prefix, index: int, slot: int) -> None:
    slots, request = self._slots, prefix.request
    drawn = len(prefix.tokens) - len(request.prompt.tokens) + 1
    slots.last_token[slot] = prefix.first[index].token
    slots.position[slot] = len(prefix.tokens)
    slots.budget[slot] = request.sampling.max_tokens - drawn
    slots.active[slot] = True
    tokens = [*prefix.tokens.tolist(), prefix.first[index].token]
    slots.set_sampling(slot, request, index, tokens)
    self._changed_hands(slot)

  def _changed_hands(self, slot: int) -> None:
    """The host's state of it is the newest; what is unread, another's."""
    self._known[slot] = True
    self._fills[slot] += 1

  def _advance(self, slot: int, drawn: list[Drawn]) -> None:
    slots = self._slots
    if (adjustment := slots.sampling.adjustment) is not None:
      length = int(slots.position[slot]) + 1
      adjustment.history[slot, length : length + len(drawn)] = [
        x.token for x in drawn
      ]
    slots.position[slot] += len(drawn)
    slots.budget[slot] -= len(drawn)
    slots.last_token[slot] = drawn[-1].token
    stopped = (slots.sampling.stop_ids[slot] == drawn[-1].token).any()
    slots.active[slot] = slots.budget[slot] > 0 and not stopped

  def _draw_first(
    self, hidden_RD: jax.Array, complete: dict[int, Prefix]
  ) -> None:
    """First tokens of all samples of complete prefixes, S at a time."""
    S = self.config.num_slots
    wanted = [(r, p, i) for r, p in complete.items() for i in p.sample_indices]
    for begin in range(0, len(wanted), S):
      part = wanted[begin : begin + S]
      state = Slots.empty(S, self._width, self.limits)
      row = np.zeros(S, np.int32)
      for s, (r, prefix, index) in enumerate(part):
        row[s] = r
        state.position[s] = len(prefix.tokens)
        state.set_sampling(s, prefix.request, index, prefix.tokens.tolist())
      packed = np.asarray(
        self._programs.first(
          self._params,
          hidden_RD,
          row,
          state.position,
          state.sampling,
          self._seed,
        )
      )
      ones = np.ones(len(part), np.int32)
      rows = self._unpack(packed[: len(part)], ones, self.policy_version)
      for (_, prefix, index), (first,) in zip(part, rows, strict=True):
        prefix.first[index] = first

  def _unpack(
    self, packed: np.ndarray, counts: np.ndarray, policy_version: int
  ) -> list[list[Drawn]]:
    """The first `counts` tokens of each row of a `pack`ed array."""
    K = self.config.top_logprobs
    n = packed.shape[1] // (3 + 2 * K)
    parts = np.split(packed, [n, 2 * n, 3 * n, (3 + K) * n], axis=1)
    tokens, logprobs, masses, ids, tops = (
      part if i in (0, 3) else np.ascontiguousarray(part).view(np.float32)
      for i, part in enumerate(parts)
    )
    ids, tops = (x.reshape(len(x), n, K).tolist() for x in (ids, tops))
    rows = zip(
      *(tokens.tolist(), logprobs.tolist(), masses.tolist(), ids, tops),
      counts.tolist(),
      strict=True,
    )
    return [
      [
        Drawn(token, logprob, mass, policy_version, list(zip(*top)))
        for token, logprob, mass, *top in zip(
          *(column[:count] for column in columns), strict=True
        )
      ]
      for *columns, count in rows
    ]


def _dispatches_ahead(config: Config, mesh: Mesh, limits: Limits) -> int:
  if limits.logit_biases is not None:  # penalties need the tokens drawn
    if config.dispatches_ahead > 0:
      raise ValueError(
        f'generator.dispatches_ahead={config.dispatches_ahead}: with penalties,'
        ' min_tokens or logit_bias it must be 0 (or -1).'
      )
    return 0
  if config.dispatches_ahead >= 0:
    return config.dispatches_ahead
  on_cpu = mesh.devices.flat[0].platform == 'cpu'
  return 0 if on_cpu or config.speculate else 1
