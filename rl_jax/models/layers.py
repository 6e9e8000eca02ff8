"""Parts of a decoder block: parameters with named axes, norm, RoPE, SwiGLU.

Knows no mesh and no cache. A parameter carries the logical name of each of
its axes (`axes=`); `meshes.py` maps those names to mesh axes. Parameters of
blocks are stacked: their first axis is 'layers'.

Letters: B rows, T tokens, D model, H head dim, F ffn, L layers.
"""

from __future__ import annotations

import dataclasses
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
  """A weight as int8 times a float32 scale for each of its output channels.

  Stands where an array does; `generator/quantize.py` makes it.
  """

  values: jax.Array  # int8, shape of the weight
  scale: jax.Array  # float32, that shape with 1 along what `product` sums over


def product(
  equation: str, x: jax.Array, weight: jax.Array | Quantized, **kwargs: Any
) -> jax.Array:
  """`einsum(equation, x, weight)`, where `weight` may be quantised.

  Then x is rounded to int8 too, with one scale for each of its tokens, and the
  products are summed as integers: weights alone in int8 would be unpacked to
  float32 at every step, slower than if they had been kept so.
  """
  if not isinstance(weight, Quantized):
    return jnp.einsum(equation, x, weight, **kwargs)
  inputs, out = equation.split('->')
  left, right = inputs.split(',')
  summed = set(left) & set(right) - set(out)
  axes = tuple(i for i, letter in enumerate(left) if letter in summed)
  values, x_scale = quantized(x, axes)
  total = jnp.einsum(
    equation, values, weight.values, preferred_element_type=jnp.int32
  )
  kept_left = ''.join(c for c in left if c not in summed)
  kept_right = ''.join(c for c in right if c not in summed)
  scale = jnp.einsum(
    f'{kept_left},{kept_right}->{out}',
    x_scale.squeeze(axes),
    weight.scale.squeeze(
      tuple(i for i, letter in enumerate(right) if letter in summed)
    ),
  )
  return (total * scale).astype(kwargs.get('preferred_element_type', x.dtype))


def quantized(
  x: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """(int8 values, float32 scale of size 1 along `axes`), x ~ values * scale.

  Symmetric, by the largest absolute value; all zeros give scale 0.
  """
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / 127.0
  # A value that is not finite stays so: its scale is not, whatever the int8.
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
