import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.models.attention import segment_attention


def _attend(segments, q, k, v):
  return jax.jit(segment_attention(jnp.asarray(segments)))(q, k, v, None)[0]


def _qkv(B, T, N, K, H, seed=0):
  rng = np.random.default_rng(seed)
  return [
    jnp.asarray(rng.standard_normal((B, T, heads, H)), jnp.float32)
    for heads in (N, K, K)
  ]


def _plain(q_TNH, k_SKH, v_SKH):
  """One causal sequence, with loops."""
  T, N, H = q_TNH.shape
  group = N // k_SKH.shape[1]
  out = np.zeros((T, N, H))
  for t in range(T):
    for n in range(N):
      keys, values = k_SKH[: t + 1, n // group], v_SKH[: t + 1, n // group]
      scores = np.array([np.dot(q_TNH[t, n], k) / np.sqrt(H) for k in keys])
      weights = np.exp(scores - scores.max())
      out[t, n] = (weights / weights.sum()) @ values
  return out


def test_two_tokens_by_hand():
  # Scores of token 1: 0 and ln 3 after scaling by 1/sqrt(4): weights 1/4, 3/4.
  k = jnp.zeros((1, 2, 1, 4)).at[0, 1, 0, 0].set(2 * np.log(3.0))
  q = jnp.zeros((1, 2, 1, 4)).at[:, :, :, 0].set(1.0)
  v = jnp.array([1.0, 5.0]).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 1, 4))
  attend = segment_attention(jnp.ones((1, 2), jnp.int32))
  out, cache = attend(q, k, v, 'cache')
  np.testing.assert_allclose(out[0, :, 0, 0], [1.0, 4.0], rtol=1e-6)
  assert cache == 'cache'


def test_grouped_queries_share_the_key_heads_in_order():
  q, k, v = _qkv(1, 5, N=6, K=2, H=4)
  out = _attend([[1] * 5], q, k, v)
  expected = _plain(*(np.asarray(x[0]) for x in (q, k, v)))
  np.testing.assert_allclose(out[0], expected, atol=1e-5)


def test_packed_segments_equal_separate_sequences():
  q, k, v = _qkv(1, 9, N=4, K=2, H=4)
  out = _attend([[1, 1, 1, 2, 2, 2, 2, 0, 0]], q, k, v)
  for part in (slice(0, 3), slice(3, 7)):
    expected = _plain(*(np.asarray(x[0, part]) for x in (q, k, v)))
    np.testing.assert_allclose(out[0, part], expected, atol=1e-5)


def test_padding_is_finite_and_touches_no_real_token():
  q, k, v = _qkv(1, 6, N=2, K=2, H=4)
  segments = [[1, 1, 1, 1, 0, 0]]

  def real(k, v):
    return jnp.sum(_attend(segments, q, k, v)[:, :4] ** 2)

  assert jnp.isfinite(_attend(segments, q, k, v)).all()
  for gradient in jax.jit(jax.grad(real, argnums=(0, 1)))(k, v):
    assert jnp.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 4:], 0)
    assert (gradient[:, :4] != 0).any()


def test_bfloat16_stays_close_to_float32():
  q, k, v = (x.astype(jnp.bfloat16) for x in _qkv(1, 64, 2, 1, 64))
  out = _attend([[1] * 64], q, k, v)
  assert out.dtype == jnp.bfloat16
  exact = _attend([[1] * 64], *(x.astype(jnp.float32) for x in (q, k, v)))
  np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


@pytest.mark.parametrize('offset', [1, 51, 77])
def test_a_segment_is_attended_to_alike_wherever_it_stands(offset):
  """Bit by bit: the generator has it at 0, a packed row of the learner not."""
  rng = np.random.default_rng(0)
  T, length = 128, 51
  q, k, v = (
    rng.standard_normal((2, length, heads, 64)).astype(np.float32)
    for heads in (9, 3, 3)
  )

  @jax.jit
  def attend(segments, *arrays):
    return segment_attention(segments)(*arrays, None)[0]

  def at(offset):
    place = slice(offset, offset + length)
    segments = np.zeros((2, T), np.int32)
    segments[:, place] = 1
    arrays = [np.zeros((2, T, *x.shape[2:]), np.float32) for x in (q, k, v)]
    for array, x in zip(arrays, (q, k, v), strict=True):
      array[:, place] = x
    return np.asarray(attend(segments, *arrays))[:, place]

  np.testing.assert_array_equal(at(offset), at(0))
