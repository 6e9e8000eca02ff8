"""The update: micro-batches -> summed gradient -> optax -> new parameters.

Master parameters are float32 on the training mesh; the forward pass runs in
`compute_dtype`. Token weights already hold the global normaliser, so
gradients of micro-batches are summed, never averaged, and the result does not
depend on how a batch is cut or sharded. Each part of the mesh axis `data` sums
its own gradients, and the parts are added once a step. All batches have one
shape: rows of `row_tokens`, `rows_per_microbatch` at a time, so nothing
recompiles.

Letters: B rows, T tokens, P parts of the mesh axis `data`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax import meshes
from rl_jax.algorithms.base import Loss, LossInputs
from rl_jax.learner.logprobs import token_logprobs
from rl_jax.models.base import Model, Params
from rl_jax.types import TrainBatch


@dataclasses.dataclass(frozen=True)
class Config:
  """Keys of `config.learner`."""

  row_tokens: int = 512  # length of a packed row
  rows_per_microbatch: int = 4  # over the whole training mesh
  logprob_chunk: int = 128  # tokens of a row whose logits exist at once
  compute_dtype: str = 'float32'  # of the forward and backward pass
  remat: bool = True  # recompute blocks in the backward pass: less memory

  def __post_init__(self):
    for name in ('row_tokens', 'rows_per_microbatch', 'logprob_chunk'):
      if getattr(self, name) < 1:
        raise ValueError(f'learner.{name}={getattr(self, name)}: must be >= 1.')
    if self.row_tokens % self.logprob_chunk:
      legal = [
        n for n in range(1, self.row_tokens + 1) if self.row_tokens % n == 0
      ]
      nearest = min(legal, key=lambda n: abs(n - self.logprob_chunk))
      raise ValueError(
        f'learner.logprob_chunk={self.logprob_chunk} must divide '
        f'learner.row_tokens={self.row_tokens}; nearest legal: {nearest}.'
      )
    if self.compute_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        f'learner.compute_dtype={self.compute_dtype!r}: must be float32 or '
        'bfloat16.'
      )


_Micro = Any  # a TrainBatch of jax arrays
_PARTS = 'parts'  # name of the axis that maps over them


class TrainState(NamedTuple):
  """What an update changes, all of it on the training mesh."""

  params: Params  # float32
  opt_state: Any


class NonFinite(Exception):
  """The loss or the gradient is not finite; the message names the step."""


class Learner:
  """Updates parameters of `model` by `loss` on `mesh`.

  Args:
    temperature: of the sampling distribution, in every log-prob.
  """

  def __init__(
    self,
    model: Model,
    mesh: Mesh,
    config: Config,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    *,
    temperature: float,
  ):
    self.config, self.mesh = config, mesh
    self._model, self._optimizer, self._loss = model, optimizer, loss
    self._temperature = temperature
    self._reference: Params | None = None
    self._zeros: Callable[[], Any] | None = None
    specs = model.specs()
    self.param_shardings = meshes.shardings(mesh, specs, meshes.TRAINING_RULES)
    self._state_shardings = self._shardings()
    replicated = meshes.replicated(mesh)
    self._sum_shardings = meshes.stacked(
      (self.param_shardings, replicated, replicated), 'data'
    )
    self._accumulate = jax.jit(
      self._accumulate_program,
      donate_argnums=2,
      out_shardings=self._sum_shardings,
    )
    self._apply = jax.jit(
      self._apply_program,
      donate_argnums=0,
      out_shardings=(self._state_shardings, replicated),
    )
    self._score = jax.jit(self._score_program)

  # ---- state

  def init_params(self, key: jax.Array) -> Params:
    """Random parameters, created where they will live."""
    return jax.jit(self._model.init, out_shardings=self.param_shardings)(key)

  def init_state(self, params: Params) -> TrainState:
    """Fresh optimiser state around `params`, which it takes over."""
    init = jax.jit(
      self._optimizer.init, out_shardings=self._state_shardings.opt_state
    )
    return TrainState(params, init(params))

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of a state, for restoring one."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      self._abstract(),
      self._state_shardings,
    )

  def set_reference(self, params: Params) -> None:
    """Anchors the KL at a copy of `params`; before the first update."""
    self._reference = jax.tree.map(jnp.copy, params)

  # ---- work

  def update(
    self, state: TrainState, batch: TrainBatch, step: int
  ) -> tuple[TrainState, dict[str, float]]:
    """One optimiser step; `state` is given up.

    Raises:
      NonFinite: naming the step; `state` must not be used any more.
    """
    sums = None
    for micro in self.microbatches(batch):
      if sums is None:
        sums = self._zero_sums(state.params, micro)
      sums = self._accumulate(state.params, self._reference, sums, micro)
    state, metrics = self._apply(state, sums)
    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
    if not (np.isfinite(values['loss']) and np.isfinite(values['grad_norm'])):
      raise NonFinite(
        f'step {step}: loss={values["loss"]}, '
        f'grad_norm={values["grad_norm"]}. Look at the rollouts of this step '
        "and at the algorithm's loss, or lower optimizer.learning_rate."
      )
    return state, values

  def logprobs(self, params: Params, batch: TrainBatch) -> np.ndarray:
    """Log-probs of the batch's loss tokens, [B, T] float32.

    As the loss sees them: at the sampling temperature, less the mass that
    truncated sampling kept, so that they compare to behavior log-probs.
    """
    parts = [
      jax.device_get(self._score(params, micro))
      for micro in self.microbatches(batch)
    ]
    return np.concatenate(parts)[: len(batch.tokens)]

  # ---- programs

  def _accumulate_program(self, params, reference, sums, micro: _Micro):
    grads, totals, maxima = sums
    more = self._part_sums(params, reference, micro)
    return (
      jax.tree.map(jnp.add, grads, more[0]),
      jax.tree.map(jnp.add, totals, more[1]),
      jax.tree.map(jnp.maximum, maxima, more[2]),
    )

  def _part_sums(self, params, reference, micro: _Micro):
    """(gradients, totals, maxima) of each part: [P, ...], not yet reduced."""
    gradient = jax.vmap(
      jax.grad(self._micro_loss, has_aux=True),
      in_axes=(None, None, 0),
      axis_name=_PARTS,
      spmd_axis_name='data',
    )
    parts = jax.tree.map(self._parts, micro)
    grads, (totals, maxima) = gradient(params, reference, parts)
    return grads, totals, maxima

  def _parts(self, x: jax.Array) -> jax.Array:
    """[B, T] -> [P, B / P, T], where it is."""
    parts = x.reshape(self.mesh.shape['data'], -1, *x.shape[1:])
    sharding = NamedSharding(self.mesh, PartitionSpec('data', 'fsdp'))
    return jax.lax.with_sharding_constraint(parts, sharding)

  def _micro_loss(self, params, reference, micro: _Micro):
    mask = micro.loss_mask
    logprobs, entropies = self._logprobs(params, micro, _PARTS)
    if reference is None:
      anchor = None
    else:
      anchor = jax.lax.stop_gradient(
        self._logprobs(reference, micro, _PARTS)[0]
      )
    token_loss, metrics = self._loss(
      LossInputs(
        logprobs, micro.behavior_logprobs, anchor, micro.advantages, mask
      )
    )
    weighted = jnp.where(mask > 0, token_loss, 0.0) * micro.loss_weights
    metrics = metrics | {'entropy': entropies, 'logprob': logprobs}
    metrics = jax.lax.stop_gradient(metrics)
    totals = {
      k: jnp.sum(jnp.where(mask > 0, v, 0.0)) for k, v in metrics.items()
    }
    # Minima travel as maxima of -v.
    signed = metrics | {f'-{k}': -v for k, v in metrics.items()}
    maxima = {
      k: jnp.max(jnp.where(mask > 0, v, -jnp.inf)) for k, v in signed.items()
    }
    loss = jnp.sum(weighted)
    totals |= {'loss': loss, 'tokens': jnp.sum(mask)}
    return loss, (totals, maxima)

  def _apply_program(self, state: TrainState, sums):
    grads, totals = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums[:2])
    maxima = jax.tree.map(lambda x: jnp.max(x, axis=0), sums[2])
    updates, opt_state = self._optimizer.update(
      grads, state.opt_state, state.params
    )
    params: Any = optax.apply_updates(state.params, updates)
    tokens = jnp.maximum(totals['tokens'], 1.0)
    metrics = {
      k: v if k in ('loss', 'tokens') else v / tokens for k, v in totals.items()
    }
    for k, v in maxima.items():
      metrics |= {f'{k[1:]}_min': -v} if k[0] == '-' else {f'{k}_max': v}
    metrics['grad_norm'] = optax.tree.norm(grads)
    return TrainState(params, opt_state), metrics

  def _score_program(self, params, micro: _Micro):
    return self._logprobs(params, micro)[0]

  def _logprobs(self, params, micro: _Micro, axis_name=None):
    logprobs, entropies = token_logprobs(
      self._model,
      cast(params, self.config.compute_dtype),
      micro.tokens,
      micro.segment_ids,
      micro.positions,
      micro.loss_mask,
      self._temperature,
      chunk=self.config.logprob_chunk,
      remat=self.config.remat,
      axis_name=axis_name,
    )
    # Truncated sampling renormalised what it kept; so do we.
    return logprobs - micro.kept_logmass, entropies

  # ---- plumbing

  def microbatches(self, batch: TrainBatch) -> Iterator[TrainBatch]:
    """Slices of `rows_per_microbatch` rows, the last one padded, on mesh."""
    size = self.config.rows_per_microbatch
    sharding = meshes.rows(self.mesh)

    def part(x, begin):
      x = x[begin : begin + size]
      pad = ((0, size - len(x)), (0, 0))
      return jax.device_put(np.pad(x, pad), sharding)

    for begin in range(0, len(batch.tokens), size):
      yield TrainBatch(
        **{
          f.name: part(getattr(batch, f.name), begin)
          for f in dataclasses.fields(batch)
        }
      )

  def _zero_sums(self, params: Params, micro: TrainBatch) -> Any:
    """Neutral (gradients, totals, maxima) where the real ones will be."""
    if self._zeros is None:
      shapes = jax.eval_shape(self._part_sums, params, self._reference, micro)

      def full(tree, value):
        # With a dtype: weakly typed, it would compile the program twice.
        return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), tree)

      self._zeros = jax.jit(
        lambda: tuple(map(full, shapes, (0, 0, -jnp.inf))),
        out_shardings=self._sum_shardings,
      )
    return self._zeros()

  def _abstract(self) -> TrainState:
    params = jax.eval_shape(self._model.init, jax.random.key(0))
    return TrainState(params, jax.eval_shape(self._optimizer.init, params))

  def _shardings(self) -> TrainState:
    opt_state = optax.tree.map_params(
      self._optimizer,
      lambda _, sharding: sharding,
      self._abstract().opt_state,
      self.param_shardings,
      transform_non_params=lambda _: meshes.replicated(self.mesh),
    )
    return TrainState(self.param_shardings, opt_state)


def cast(params: Params, dtype: str) -> Params:
  """Parameters in the dtype of the computation."""
  return jax.tree.map(lambda x: x.astype(dtype), params)


jax.tree_util.register_dataclass(TrainBatch)
