"""Packed rows: where every token of every sequence goes."""

import dataclasses

import numpy as np
import pytest

from rl_jax.rollout.packing import Item, pack


def _item(length, seed=0, prompt=2, advantage=0.5, weight=0.25):
  """A sequence whose fields can all be told apart."""
  rng = np.random.default_rng(seed)
  mask = np.zeros(length, np.float32)
  mask[prompt:] = 1.0
  return Item(
    tokens=rng.integers(1, 64, length).astype(np.int32),
    loss_mask=mask,
    behavior_logprobs=rng.standard_normal(length).astype(np.float32),
    kept_logmass=rng.standard_normal(length).astype(np.float32),
    advantage=advantage,
    weight=weight,
  )


def test_two_sequences_share_a_row():
  def item(tokens, advantage):
    mask = np.array([0] + [1] * (len(tokens) - 1), np.float32)
    zeros = np.zeros(len(tokens), np.float32)
    return Item(np.array(tokens), mask, zeros, zeros, advantage, 0.5)

  batch = pack([item([8, 9], 3.0), item([5, 6, 7], -1.0)], row_tokens=6)
  np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 9, 0]])
  np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 2, 2, 0]])
  np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1, 0]])
  np.testing.assert_array_equal(batch.loss_mask, [[0, 1, 1, 0, 1, 0]])
  np.testing.assert_array_equal(batch.loss_weights, [[0, 0.5, 0.5, 0, 0.5, 0]])
  np.testing.assert_array_equal(batch.advantages, [[0, -1, -1, 0, 3, 0]])


def test_first_fit_longest_first():
  items = [_item(n, seed=n) for n in (3, 7, 5, 4, 2, 3)]
  batch = pack(items, row_tokens=8)
  # 7 leaves 1, 5 + 3 leave 0, 4 + 3 leave 1: the 2 opens a row.
  lengths = [
    [int((row == s).sum()) for s in range(1, row.max() + 1)]
    for row in batch.segment_ids
  ]
  assert lengths == [[7], [5, 3], [4, 3], [2]]


def test_a_row_may_be_filled_to_its_last_token():
  batch = pack([_item(8), _item(4, 1), _item(4, 2)], row_tokens=8)
  assert batch.tokens.shape == (2, 8)
  assert (batch.segment_ids > 0).all()


def test_the_first_row_with_room_is_taken():
  # After 5 and 4 both rows have room for 3; then the first has none for 3.
  items = [_item(n, seed=i) for i, n in enumerate((5, 4, 3, 3))]
  batch = pack(items, row_tokens=8)
  np.testing.assert_array_equal(batch.tokens[0, 5:], items[2].tokens)
  np.testing.assert_array_equal(batch.tokens[1, 4:7], items[3].tokens)


def test_every_field_comes_back():
  rng = np.random.default_rng(0)
  items = [
    _item(int(n), seed=i, advantage=i + 0.5, weight=1 / (i + 1))
    for i, n in enumerate(rng.integers(3, 17, 40))
  ]
  batch = pack(items, row_tokens=16)
  found = {}
  for r in range(len(batch.tokens)):
    for s in range(1, batch.segment_ids[r].max() + 1):
      at = (r, np.flatnonzero(batch.segment_ids[r] == s))
      assert (np.diff(at[1]) == 1).all()  # one piece
      found[batch.tokens[at].tobytes()] = at
  assert len(found) == 40
  for item in items:
    at = found[item.tokens.tobytes()]
    np.testing.assert_array_equal(
      batch.positions[at], np.arange(len(item.tokens))
    )
    mask = item.loss_mask
    for field, expected in {
      'loss_mask': mask,
      'loss_weights': mask * np.float32(item.weight),
      'advantages': mask * np.float32(item.advantage),
      'behavior_logprobs': item.behavior_logprobs,
      'kept_logmass': item.kept_logmass,
    }.items():
      np.testing.assert_array_equal(getattr(batch, field)[at], expected, field)


def test_padding_is_zero_in_every_field_and_dtypes_are_as_recorded():
  batch = pack([_item(5), _item(3, 1)], row_tokens=11)
  padding = batch.segment_ids == 0
  assert padding.sum() == 3
  for field in dataclasses.fields(batch):
    values = getattr(batch, field.name)
    assert (values[padding] == 0).all(), field.name
    integer = field.name in ('tokens', 'segment_ids', 'positions')
    assert values.dtype == (np.int32 if integer else np.float32), field.name


def test_token_ids_do_not_make_the_mask():
  # Id 0 pads rows; as a sampled token it stays a token of the loss.
  item = dataclasses.replace(_item(4), tokens=np.zeros(4, np.int32))
  batch = pack([item], row_tokens=6)
  np.testing.assert_array_equal(batch.loss_mask, [[0, 0, 1, 1, 0, 0]])
  np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 1, 0, 0]])


def test_the_same_items_give_the_same_rows():
  items = [_item(n, seed=i) for i, n in enumerate((3, 5, 5, 3, 3, 4))]
  one, two = pack(items, 8), pack(list(items), 8)
  for field in dataclasses.fields(one):
    np.testing.assert_array_equal(
      getattr(one, field.name), getattr(two, field.name)
    )
  # Equal lengths keep their order.
  np.testing.assert_array_equal(one.tokens[0, :5], items[1].tokens)
  np.testing.assert_array_equal(one.tokens[1, :5], items[2].tokens)


def test_a_sequence_longer_than_a_row_is_an_error():
  with pytest.raises(
    ValueError, match=r'sequence of 9 tokens.*row_tokens=8; raise it to .* 9'
  ):
    pack([_item(3), _item(9)], row_tokens=8)


def test_the_weights_of_a_batch_sum_to_what_the_items_say():
  items = [_item(n, seed=n, weight=1 / 12) for n in (3, 7, 5, 5)]
  batch = pack(items, row_tokens=8)
  assert batch.loss_weights.sum() == pytest.approx(1.0)
