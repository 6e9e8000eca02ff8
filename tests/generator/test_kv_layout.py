"""What is put into pages is what is fetched from them, and copied whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rl_jax.generator.kv_layout import HeadsFirst, KVLayout

P, Z, K, H = 6, 4, 2, 8
LAYOUTS = [
  *(KVLayout(dtype) for dtype in ('float32', 'bfloat16', 'int8')),
  HeadsFirst('float32', H),
]


def _mesh(tensor=1):
  devices = np.array(jax.devices()[:tensor]).reshape(1, tensor)
  return Mesh(devices, ('data', 'tensor'))


def _new(layout, num_layers=0, tensor=1):
  return jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
    layout.pages(_mesh(tensor), P, Z, K, H, num_layers),
  )


def _written(layout, tokens=7):
  """Tokens 0 .. 6 of a row on pages 4 and 2."""
  pages = _new(layout)
  new = np.random.default_rng(0).standard_normal((1, tokens, K, H))
  new = new.astype(np.float32)
  at = np.arange(tokens)
  page = np.array([4, 2])[at // Z][None]
  return new, layout.write(pages, new, page, at[None] % Z)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_what_is_fetched_is_what_was_put(layout):
  new, pages = _written(layout)
  got = layout.gather(pages, jnp.array([[4, 2]]))
  assert got.shape == (1, K, 2 * Z, H)
  largest = np.abs(new).max(-1, keepdims=True)
  # Half of a step of int8; bfloat16 keeps 8 bits.
  bound = {'float32': 0, 'bfloat16': 2**-8, 'int8': 0.5001 / 127}[layout.dtype]
  error = np.abs(np.swapaxes(got, 1, 2)[:, :7].astype(np.float32) - new)
  assert (error <= bound * largest).all()
  assert (error.max() > 0) == (layout.dtype != 'float32')


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('num_layers', [0, 3])
def test_pages_are_copied_whole_in_every_layer(layout, num_layers):
  pages = _new(layout, num_layers)
  axis = bool(num_layers) + isinstance(layout, HeadsFirst)
  number = lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype)  # noqa: E731
  pages = jax.tree.map(number, pages)
  source, target = np.array([3, 0, 5]), np.array([1, 0, 2])
  copied = layout.copy(pages, source, target, stacked=bool(num_layers))
  for old, new in zip(jax.tree.leaves(pages), jax.tree.leaves(copied)):
    want = np.array(old)
    view = np.moveaxis(want, axis, 0)
    view[[1, 2]] = view[[3, 5]]
    np.testing.assert_array_equal(new, want)


def test_zeros_and_the_largest_stay_what_they_are_in_int8():
  """And a token's scale does not know its neighbours."""
  layout = KVLayout('int8')
  pages = _new(layout)
  new = np.zeros((1, 2, K, H), np.float32)
  new[0, 0, :, 3] = -1e6
  page, offset = np.array([[1, 1]]), np.array([[0, 1]])
  got = layout.gather(layout.write(pages, new, page, offset), page[:, :1])
  np.testing.assert_allclose(got[0, :, 0, 3], -1e6)
  np.testing.assert_array_equal(got[0, :, 1], 0)
  new[0, 1, :, 3] = 1e-6
  got = layout.gather(layout.write(pages, new, page, offset), page[:, :1])
  np.testing.assert_allclose(got[0, :, 1, 3], 1e-6, rtol=1e-6)


def test_what_is_not_finite_shows_in_int8():
  layout = KVLayout('int8')
  pages = _new(layout)
  new = np.ones((1, 1, K, H), np.float32)
  new[0, 0, 0, 5] = np.nan
  at = np.array([[1]])
  got = layout.gather(layout.write(pages, new, at, 0 * at), at)
  assert not np.isfinite(got[0, 0, 0]).any()
  assert np.isfinite(got[0, 1, 0]).all()


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('num_layers', [0, 3])
def test_kv_heads_are_sharded(layout, num_layers):
  pages = _new(layout, num_layers, tensor=2)
  axis = bool(num_layers) + (not isinstance(layout, HeadsFirst))
  for x in jax.tree.leaves(pages):
    whole = list(x.shape)
    whole[axis] //= 2
    assert x.addressable_shards[0].data.shape == tuple(whole)
