"""The decoder that all families share: RMSNorm, RoPE, GQA, SwiGLU.

Parameters are data: a nested dict of arrays,

  {'stem': {'embed', 'final_norm', 'head'?}, 'blocks': ...}

where `blocks` is either one dict of arrays stacked by layer (the learner:
scanned, so that compile time does not grow with depth) or a tuple of one dict
a layer (the generator on CPU: unrolled, since scanning copies weights). The
same code runs both; the dtype of the arrays is the dtype of the computation.

Left out: dropout (no RL recipe uses it), mixture of experts, sliding windows.

Letters: B rows, T tokens, D model, V vocab, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rl_jax.models import layers
from rl_jax.models.attention import Attend, Attention

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and switches of a decoder; see `llama.py` for published ones."""

  family: str = 'llama'  # module of models/ that maps checkpoints
  vocab_size: int = 256
  num_layers: int = 2
  d_model: int = 64
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 16
  d_ffn: int = 128
  rope_theta: float = 10000.0
  rope_scaling: tuple[float, ...] = ()  # see layers.rope_frequencies
  norm_eps: float = 1e-5
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = False
  max_positions: int = 8192  # trained context; only exports tell it on

  def __post_init__(self):
    for name in ('vocab_size', 'num_layers', 'd_model', 'd_ffn', 'num_heads'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'model.architecture.{name}={getattr(self, name)}: must be >= 1.'
        )
    if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'model.architecture.num_heads={self.num_heads} must be a multiple of '
        f'model.architecture.num_kv_heads={self.num_kv_heads}.'
      )
    if self.head_dim < 2 or self.head_dim % 2:
      raise ValueError(
        f'model.architecture.head_dim={self.head_dim}: must be >= 2 and '
        'even, for RoPE.'
      )
    for name in ('rope_theta', 'norm_eps', 'max_positions'):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(
          f'model.architecture.{name}={getattr(self, name)}: must be > 0 '
          'and finite.'
        )
    legal = [
      isinstance(x, int | float) and 0 < x < math.inf for x in self.rope_scaling
    ]
    rising = len(legal) == 4 and self.rope_scaling[1] < self.rope_scaling[2]
    if legal and not (all(legal) and rising):
      raise ValueError(
        f'model.architecture.rope_scaling={self.rope_scaling}: must be () or '
        'the four positive numbers of Llama 3: factor, low < high, original '
        'positions.'
      )


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Shape and logical axis names of one parameter."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]


class Stem(nnx.Module):
  """What lies before and after the blocks."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
    V, D = config.vocab_size, config.d_model
    self.eps = config.norm_eps
    self.embed = layers.param(rngs, (V, D), ('vocab', 'embed'), fan_in=D)
    self.final_norm = layers.param(rngs, (D,), ('embed',), fill=1.0)
    if not config.tie_embeddings:
      self.head = layers.param(rngs, (V, D), ('vocab', 'embed'), fan_in=D)
    self.tied = config.tie_embeddings

  def encode(self, tokens_BT: jax.Array) -> jax.Array:
    # The residual stream stays float32: in bfloat16 its rounding, twice a
    # layer, is most of what generator and learner disagree by.
    embed_VD = self.embed.get_value()
    if isinstance(embed_VD, layers.Packed):
      rows_BTD = jnp.take(embed_VD.values, tokens_BT, axis=0)
      rows_BTD = rows_BTD.astype(jnp.float32)
      if embed_VD.scale is None:
        return rows_BTD
      return rows_BTD * jnp.take(embed_VD.scale, tokens_BT)[..., None]
    return jnp.take(embed_VD, tokens_BT, axis=0).astype(jnp.float32)

  def normalise(self, x_BTD: jax.Array) -> jax.Array:
    return layers.rms_norm(x_BTD, self.final_norm[...], self.eps)

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    weight_VD = self.embed if self.tied else self.head
    return layers.product(
      'BTD,VD->BTV',
      x_BTD,
      weight_VD.get_value(),
      preferred_element_type=jnp.float32,
    )


class Block(nnx.Module):
  """Pre-norm attention and SwiGLU with residuals; parameters stacked."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
    L, D = config.num_layers, config.d_model
    self.eps = config.norm_eps
    named = ('layers', 'embed')
    self.attention_norm = layers.param(rngs, (L, D), named, fill=1.0)
    self.attention = Attention(rngs, config)
    self.ffn_norm = layers.param(rngs, (L, D), named, fill=1.0)
    self.ffn = layers.SwiGLU(rngs, L, D, config.d_ffn)

  def __call__(
    self,
    x_BTD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
    cache: Any,
  ) -> tuple[jax.Array, Any]:
    h = layers.rms_norm(x_BTD, self.attention_norm[...], self.eps)
    out_BTD, cache = self.attention(h, rope, attend, cache)
    x_BTD = x_BTD + out_BTD
    h = layers.rms_norm(x_BTD, self.ffn_norm[...], self.eps)
    return x_BTD + self.ffn(h), cache


class Model:
  """A decoder as pure functions of its parameters."""

  def __init__(self, config: ModelConfig):
    self.config = config
    abstract = nnx.eval_shape(lambda: _modules(config, jax.random.key(0)))
    self._defs, self._states = {}, {}
    for name, module in abstract.items():
      self._defs[name], self._states[name] = nnx.split(module)

  def init(self, key: jax.Array) -> Params:
    """Random float32 parameters, blocks stacked by layer."""
    modules = _modules(self.config, key)
    return {
      name: nnx.to_pure_dict(nnx.state(module))
      for name, module in modules.items()
    }

  def specs(self) -> Params:
    """The tree of `init` with a ParamSpec at each leaf."""

    def spec(variable):
      axes = variable.get_metadata()['axes']
      return ParamSpec(tuple(variable.get_value().shape), axes)

    return {
      name: nnx.to_pure_dict(
        jax.tree.map(spec, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
      )
      for name, state in self._states.items()
    }

  def hidden(
    self,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend: Attend,
    caches: Any = None,
    remat: bool = False,
  ) -> tuple[jax.Array, Any]:
    """Final hidden states (normalised) and the updated caches.

    Args:
      params: stacked or unrolled, see the module docstring.
      tokens_BT: int32.
      positions_BT: int32, position of each token in its sequence.
      attend: see `attention.py`.
      caches: one cache a layer: a tuple where blocks are unrolled, else a
        pytree with a leading layer axis; None without a cache.
      remat: recompute each block in the backward pass instead of storing it.
    """
    config = self.config
    stem = self._merge('stem', params['stem'])
    frequencies = layers.rope_frequencies(
      config.head_dim, config.rope_theta, config.rope_scaling
    )
    rope = layers.rope_tables(positions_BT, frequencies)

    def layer(x_BTD, block_and_cache):
      weights, cache = block_and_cache
      return self._merge('blocks', weights)(x_BTD, rope, attend, cache)

    if remat:
      layer = jax.checkpoint(layer)
    x_BTD = stem.encode(tokens_BT)
    blocks = params['blocks']
    if isinstance(blocks, tuple):
      caches = caches if caches is not None else (None,) * len(blocks)
      updated = []
      for weights, cache in zip(blocks, caches, strict=True):
        x_BTD, cache = layer(x_BTD, (weights, cache))
        updated.append(cache)
      caches = tuple(updated)
    else:
      x_BTD, caches = jax.lax.scan(layer, x_BTD, (blocks, caches))
    return stem.normalise(x_BTD), caches

  def logits(self, params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] float32 of hidden states."""
    return self._merge('stem', params['stem']).logits(hidden_BTD)

  def _merge(self, name: str, weights: Params) -> Any:
    """The module `name` around `weights`."""
    return nnx.merge(self._defs[name], nnx.State(weights))


def unroll(params: Params) -> Params:
  """Stacked blocks -> a tuple of one dict a layer."""
  blocks = params['blocks']
  num_layers = jax.tree.leaves(blocks)[0].shape[0]
  return params | {
    'blocks': tuple(
      jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(num_layers)
    )
  }


def _modules(config: ModelConfig, key: jax.Array) -> dict[str, nnx.Module]:
  rngs = nnx.Rngs(params=key)
  return {'stem': Stem(rngs, config), 'blocks': Block(rngs, config)}
