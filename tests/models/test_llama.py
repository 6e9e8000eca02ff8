"""The three families: what they accept, refuse and write."""

import dataclasses

import pytest

from rl_jax.models import base, llama, qwen2, qwen3, weights

# As published (meta-llama/Llama-3.2-1B-Instruct).
LLAMA_3_2_1B = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'bos_token_id': 128000,
  'eos_token_id': [128001, 128008, 128009],
  'head_dim': 64,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'intermediate_size': 8192,
  'max_position_embeddings': 131072,
  'mlp_bias': False,
  'model_type': 'llama',
  'num_attention_heads': 32,
  'num_hidden_layers': 16,
  'num_key_value_heads': 8,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_scaling': {
    'factor': 32.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': True,
  'vocab_size': 128256,
}
# As published (Qwen/Qwen2.5-0.5B-Instruct).
QWEN_2_5_HALF_B = {
  'architectures': ['Qwen2ForCausalLM'],
  'attention_dropout': 0.0,
  'hidden_act': 'silu',
  'hidden_size': 896,
  'intermediate_size': 4864,
  'max_position_embeddings': 32768,
  'max_window_layers': 21,
  'num_attention_heads': 14,
  'num_hidden_layers': 24,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_theta': 1000000.0,
  'sliding_window': 32768,
  'tie_word_embeddings': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
# As published (Qwen/Qwen3-0.6B).
QWEN_3_0_6B = {
  'architectures': ['Qwen3ForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'head_dim': 128,
  'hidden_act': 'silu',
  'hidden_size': 1024,
  'intermediate_size': 3072,
  'max_position_embeddings': 40960,
  'max_window_layers': 28,
  'num_attention_heads': 16,
  'num_hidden_layers': 28,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-06,
  'rope_scaling': None,
  'rope_theta': 1000000,
  'sliding_window': None,
  'tie_word_embeddings': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
PUBLISHED = {
  'llama': (llama, LLAMA_3_2_1B),
  'qwen2': (qwen2, QWEN_2_5_HALF_B),
  'qwen3': (qwen3, QWEN_3_0_6B),
}
GGUF_FIELDS = {
  'general.architecture': 'llama',
  'llama.block_count': 30,
  'llama.context_length': 8192,
  'llama.embedding_length': 576,
  'llama.feed_forward_length': 1536,
  'llama.attention.head_count': 9,
  'llama.attention.head_count_kv': 3,
  'llama.attention.layer_norm_rms_epsilon': 1e-5,
  'llama.rope.freq_base': 100000.0,
  'llama.rope.dimension_count': 64,
}
GGUF_SHAPES = {'token_embd.weight': (49152, 576)}


def test_llama_config_is_read():
  assert llama.from_hf(LLAMA_3_2_1B) == base.ModelConfig(
    vocab_size=128256,
    num_layers=16,
    d_model=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    d_ffn=8192,
    rope_theta=500000.0,
    rope_scaling=(32.0, 1.0, 4.0, 8192.0),
    norm_eps=1e-5,
    tie_embeddings=True,
    max_positions=131072,
  )


def test_qwen_configs_are_read():
  two, three = qwen2.from_hf(QWEN_2_5_HALF_B), qwen3.from_hf(QWEN_3_0_6B)
  assert (two.attention_bias, two.qk_norm) == (True, False)
  assert (three.attention_bias, three.qk_norm) == (False, True)
  assert (two.head_dim, three.head_dim) == (64, 128)  # 1024 / 16 is 64
  assert two.rope_scaling == three.rope_scaling == ()


def test_absent_keys_mean_what_transformers_means():
  hf = dict(LLAMA_3_2_1B)
  for key in (
    *('num_key_value_heads', 'head_dim', 'tie_word_embeddings'),
    *('rope_theta', 'rope_scaling'),
  ):
    del hf[key]
  config = llama.from_hf(hf)
  assert config.num_kv_heads == 32
  assert config.head_dim == 64
  assert not config.tie_embeddings
  assert config.rope_theta == 10000.0


@pytest.mark.parametrize('name', PUBLISHED)
def test_rope_parameters_of_transformers_5_mean_the_same(name):
  family, hf = PUBLISHED[name]
  scaling = hf.get('rope_scaling') or {'rope_type': 'default'}
  newer = {k: v for k, v in hf.items() if not k.startswith('rope_')}
  newer['rope_parameters'] = {**scaling, 'rope_theta': hf['rope_theta']}
  assert family.from_hf(newer) == family.from_hf(hf)


@pytest.mark.parametrize('name', PUBLISHED)
def test_what_we_write_is_read_as_the_same_config(name):
  family, hf = PUBLISHED[name]
  config = dataclasses.replace(family.from_hf(hf), family=name)
  written = family.to_hf(config)
  assert dataclasses.replace(family.from_hf(written), family=name) == config
  for key in set(hf) & set(written) - {'bos_token_id', 'eos_token_id'}:
    assert written[key] == hf[key], key


@pytest.mark.parametrize(
  ('name', 'change', 'message'),
  [
    ('llama', {'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported"),
    ('llama', {'attention_bias': True}, 'attention_bias=True'),
    ('llama', {'mlp_bias': True}, 'mlp_bias=True'),
    ('llama', {'attention_dropout': 0.1}, 'attention_dropout=0.1'),
    ('llama', {'quantization_config': {'bits': 4}}, 'quantization_config='),
    ('llama', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
    ('qwen2', {'use_sliding_window': True}, 'use_sliding_window=True'),
    (
      'qwen3',
      {'layer_types': ['full_attention', 'sliding_attention']},
      'layer_types has sliding_attention',
    ),
    ('qwen3', {'attention_bias': True}, 'attention_bias=True'),
    ('qwen2', {'rope_scaling': {'type': 'yarn', 'factor': 4.0}}, 'type yarn'),
    ('llama', {'rope_scaling': {'rope_type': 'llama3'}}, r'llama3 with \[\]'),
    (
      'llama',
      {'rope_scaling': None, 'rope_parameters': {'full_attention': {}}},
      r"default with \['full_attention'\]",
    ),
    (
      'qwen2',
      {'rope_parameters': {'rope_theta': 1e4, 'partial_rotary_factor': 0.5}},
      'partial_rotary_factor=0.5',
    ),
  ],
)
def test_what_we_do_not_compute_is_refused(name, change, message):
  family, hf = PUBLISHED[name]
  with pytest.raises(ValueError, match=message):
    family.from_hf(hf | change)


def test_a_missing_size_is_named():
  hf = {k: v for k, v in LLAMA_3_2_1B.items() if k != 'hidden_size'}
  with pytest.raises(ValueError, match='does not say hidden_size'):
    llama.from_hf(hf)
  hf = {k: v for k, v in QWEN_3_0_6B.items() if k != 'head_dim'}
  with pytest.raises(ValueError, match='head_dim is missing'):
    qwen3.from_hf(hf)


@pytest.mark.parametrize(
  ('family', 'switch'),
  [
    (llama, {'attention_bias': True}),
    (llama, {'qk_norm': True}),
    (qwen2, {}),
    (qwen3, {}),
  ],
)
def test_a_config_that_the_format_cannot_say_is_not_written(family, switch):
  config = dataclasses.replace(base.ModelConfig(), **switch)
  with pytest.raises(ValueError, match=r'attention_bias=|qk_norm='):
    family.to_hf(config)


def test_gguf_metadata_is_read():
  assert llama.from_gguf(GGUF_FIELDS, GGUF_SHAPES) == base.ModelConfig(
    vocab_size=49152,
    num_layers=30,
    d_model=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    d_ffn=1536,
    rope_theta=100000.0,
    norm_eps=1e-5,
    tie_embeddings=True,
    max_positions=8192,
  )
  untied = GGUF_SHAPES | {'output.weight': (49152, 576)}
  assert not llama.from_gguf(GGUF_FIELDS, untied).tie_embeddings
  renamed = {k.replace('llama', 'qwen3'): v for k, v in GGUF_FIELDS.items()}
  renamed |= {'general.architecture': 'qwen3'}
  renamed['qwen3.attention.key_length'] = 128
  renamed['qwen3.rope.dimension_count'] = 128
  config = qwen3.from_gguf(renamed, GGUF_SHAPES)
  assert (config.head_dim, config.qk_norm) == (128, True)


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('llama.rope.scaling.type', 'yarn'),
    ('llama.expert_count', 8),
    ('llama.attention.sliding_window', 4096),
    ('llama.rope.dimension_count', 32),
    ('llama.attention.value_length', 32),
  ],
)
def test_gguf_metadata_that_we_do_not_compute_is_refused(key, value):
  with pytest.raises(ValueError, match=key):
    llama.from_gguf(GGUF_FIELDS | {key: value}, GGUF_SHAPES)


@pytest.mark.parametrize('name', PUBLISHED)
@pytest.mark.parametrize('tie', [True, False])
def test_every_family_keeps_the_contract(name, tie):
  assert set(weights.families()) == set(PUBLISHED)
  family, hf = PUBLISHED[name]
  config = family.from_hf(hf | {'tie_word_embeddings': tie})
  table = family.tensors(config)
  assert ('stem/head' in table) == (not tie)
  specs = base.Model(config).specs()
  for path, tensor in table.items():
    spec = specs
    for key in path.split('/'):
      spec = spec[key]
    shape = spec.shape[1:] if spec.axes[0] == 'layers' else spec.shape
    assert len(tensor.layout.partition('->')[2]) == len(shape), path
    for file_name in (tensor.hf, tensor.gguf):
      assert ('{layer}' in file_name) == (spec.axes[0] == 'layers'), path


def test_only_llama_is_permuted_in_gguf():
  for name, (family, hf) in PUBLISHED.items():
    table = family.tensors(family.from_hf(hf))
    permuted = {p for p, t in table.items() if t.interleaved_in_gguf}
    expected = {'blocks/attention/q', 'blocks/attention/k'}
    assert permuted == (expected if name == 'llama' else set())
