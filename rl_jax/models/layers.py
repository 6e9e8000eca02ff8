"""Parts of a decoder block: parameters with named axes, norm, RoPE, SwiGLU.

Knows no mesh and no cache. A parameter carries the logical name of each of
its axes (`axes=`); `meshes.py` maps those names to mesh axes. Parameters of
blocks are stacked: their first axis is 'layers'.

Letters: B rows, T tokens, D model, H head dim, F ffn, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def param(
  rngs: nnx.Rngs,
  shape: Sequence[int],
  axes: Sequence[str],
  fan_in: int = 0,
  fill: float = 0.0,
) -> nnx.Param:
  """A float32 parameter: normal with variance 1/fan_in, or constant `fill`."""
  assert len(shape) == len(axes), (shape, axes)
  if fan_in:
    value = jax.random.normal(rngs.params(), shape) / math.sqrt(fan_in)
  else:
    value = jnp.full(shape, fill, jnp.float32)
  return nnx.Param(value, axes=tuple(axes))


_FEW_TOKENS = 64  # up to which `_times_transposed` takes its other way on CPU


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('values', 'scale'),
  meta_fields=('num_summed',),
)
@dataclasses.dataclass(frozen=True)
class Packed:
  """A matrix as the generator wants it, in place of the learner's array.

  Output channels come first, as in `[N, H, D]` of what the learner has as
  `[D, N, H]`; in int8 each of them has a scale. `generator/quantize.py` packs.
  """

  values: jax.Array  # [*outputs, *summed], of the computation's dtype or int8
  scale: jax.Array | None  # [*outputs] float32, where values are int8
  num_summed: int  # axes that a product sums over, the last ones


def product(equation: str, x: jax.Array, weight: Any, **kwargs: Any):
  """`einsum(equation, x, weight)`, where `weight` may be `Packed`.

  Packed int8 rounds x to int8 too, with one scale for each of its tokens, and
  sums as integers: weights alone in int8 would be unpacked at every step.
  """
  if not isinstance(weight, Packed):
    return jnp.einsum(equation, x, weight, **kwargs)
  outputs = weight.values.shape[: -weight.num_summed]
  batch = x.shape[: -weight.num_summed]
  x_MK = x.reshape(math.prod(batch), -1)
  weight_NK = weight.values.reshape(-1, x_MK.shape[1])
  dtype = kwargs.get('preferred_element_type', x.dtype)
  if weight.scale is None:
    result_MN = _times_transposed(x_MK, weight_NK, dtype)
  else:
    values_MK, scale_M1 = quantized(x_MK, (1,))
    total_MN = jnp.einsum(
      'MK,NK->MN', values_MK, weight_NK, preferred_element_type=jnp.int32
    )
    result_MN = total_MN * scale_M1 * weight.scale.reshape(1, -1)
  return result_MN.astype(dtype).reshape(*batch, *outputs)


def _times_transposed(
  x_MK: jax.Array, weight_NK: jax.Array, dtype: Any
) -> jax.Array:
  """x @ weight.T, [M, N]."""

  def plain(x_MK, weight_NK):
    return jnp.einsum(
      'MK,NK->MN', x_MK, weight_NK, preferred_element_type=dtype
    )

  def few_tokens(x_MK, weight_NK):
    # XLA on CPU repacks the right operand of a product at each call: better
    # the few tokens than the weights, half the time for 16 tokens. Without
    # the barriers it turns the product around again. From 16 tokens on, it
    # mostly sums in the same order as for the learner's many.
    x_KM = jax.lax.optimization_barrier(x_MK.T)
    product_NM = jnp.matmul(weight_NK, x_KM, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(product_NM).T

  if x_MK.shape[0] > _FEW_TOKENS:
    return plain(x_MK, weight_NK)
  return jax.lax.platform_dependent(
    x_MK, weight_NK, cpu=few_tokens, default=plain
  )


def quantized(
  x: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """(int8 values, float32 scale of size 1 along `axes`), x ~ values * scale.

  Symmetric, by the largest absolute value; all zeros give scale 0.
  """
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / 127.0
  # What is not finite shows: its scale is not finite, whatever the int8.
  inverse = jnp.where(scale > 0, 1.0 / scale, 0.0)
  return jnp.round(x * inverse).astype(jnp.int8), scale


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * scale over the last axis, in float32 (arXiv:1910.07467).

  The result has the dtype of `scale`, that of the computation.
  """
  x32 = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
  scale32 = jnp.expand_dims(
    scale.astype(jnp.float32), tuple(range(x.ndim - scale.ndim))
  )
  return (x32 * inverse * scale32).astype(scale.dtype)


def rope_frequencies(
  head_dim: int, theta: float, scaling: tuple[float, ...]
) -> jax.Array:
  """Radians per position of each pair of dims, [H/2] float32.

  Args:
    scaling: () for plain RoPE (arXiv:2104.09864), or Llama 3's (factor,
      low_freq_factor, high_freq_factor, original_max_positions).
  """
  frequencies = theta ** (-jnp.arange(0, head_dim, 2) / head_dim)
  if not scaling:
    return frequencies
  factor, low, high, original = scaling
  turns = original * frequencies / (2 * math.pi)  # over the original context
  smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return frequencies * (smooth + (1 - smooth) / factor)


def rope_tables(
  positions_BT: jax.Array, frequencies: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(cos, sin) of each position, both [B, T, 1, H/2] float32."""
  angles = positions_BT[:, :, None, None].astype(jnp.float32) * jnp.reshape(
    frequencies, (1, 1, 1, -1)
  )
  return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
  x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]
) -> jax.Array:
  """Rotates dims (i, i + H/2) of each head by position, in float32."""
  cos, sin = tables
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_BTNH.dtype)


class SwiGLU(nnx.Module):
  """down(silu(gate(x)) * up(x)), arXiv:2002.05202."""

  def __init__(self, rngs: nnx.Rngs, num_layers: int, dim: int, ffn: int):
    inward, axes = (num_layers, dim, ffn), ('layers', 'embed', 'ffn')
    self.gate = param(rngs, inward, axes, fan_in=dim)
    self.up = param(rngs, inward, axes, fan_in=dim)
    self.down = param(
      rngs, (num_layers, ffn, dim), ('layers', 'ffn', 'embed'), fan_in=ffn
    )

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    gate_BTF = product('BTD,DF->BTF', x_BTD, self.gate.get_value())
    up_BTF = product('BTD,DF->BTF', x_BTD, self.up.get_value())
    hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
    return product('BTF,FD->BTD', hidden_BTF, self.down.get_value())
