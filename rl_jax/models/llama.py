"""Llama checkpoints (2, 3, 3.1, 3.2, SmolLM2 and others of this shape).

Knows what config.json, GGUF metadata and tensors of this family are called.
What a checkpoint asks for and our decoder does not compute is an error here,
never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_jax.models.base import ModelConfig
from rl_jax.models.weights import Tensor

HF_ARCHITECTURE = 'LlamaForCausalLM'
GGUF_ARCHITECTURE = 'llama'

# config.json: key -> the values that we compute; absent is the first one.
_HF_LEGAL: dict[str, tuple[Any, ...]] = {
  'hidden_act': ('silu',),
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'attention_dropout': (0, None),
  'use_sliding_window': (False, None),
  'rope_interleaved': (False, None),
  'partial_rotary_factor': (1, None),
  'quantization_config': (None,),
}
# GGUF: key, without its architecture -> likewise.
_GGUF_LEGAL: dict[str, tuple[Any, ...]] = {
  'rope.scaling.type': ('none',),
  'rope.scale_linear': (1,),
  'attention.sliding_window': (0,),
  'expert_count': (0,),
}
_LLAMA3_ROPE = (
  'factor',
  'low_freq_factor',
  'high_freq_factor',
  'original_max_position_embeddings',
)

# Parameter path, name in safetensors, name in GGUF, layout (see Tensor); the
# names continue with .weight, or .bias.
_STEM = (
  ('stem/embed', 'model.embed_tokens', 'token_embd', 'VD->VD'),
  ('stem/final_norm', 'model.norm', 'output_norm', 'D->D'),
)
_HEAD = ('stem/head', 'lm_head', 'output', 'VD->VD')
# Likewise within blocks/, model.layers.{layer} and blk.{layer}.
_BLOCK = (
  ('attention_norm', 'input_layernorm', 'attn_norm', 'D->D'),
  ('attention/q', 'self_attn.q_proj', 'attn_q', '(NH)D->DNH'),
  ('attention/k', 'self_attn.k_proj', 'attn_k', '(NH)D->DNH'),
  ('attention/v', 'self_attn.v_proj', 'attn_v', '(NH)D->DNH'),
  ('attention/out', 'self_attn.o_proj', 'attn_output', 'D(NH)->NHD'),
  ('ffn_norm', 'post_attention_layernorm', 'ffn_norm', 'D->D'),
  ('ffn/gate', 'mlp.gate_proj', 'ffn_gate', 'FD->DF'),
  ('ffn/up', 'mlp.up_proj', 'ffn_up', 'FD->DF'),
  ('ffn/down', 'mlp.down_proj', 'ffn_down', 'DF->FD'),
)
_BIASES = (
  ('attention/q_bias', 'self_attn.q_proj', 'attn_q', '(NH)->NH'),
  ('attention/k_bias', 'self_attn.k_proj', 'attn_k', '(NH)->NH'),
  ('attention/v_bias', 'self_attn.v_proj', 'attn_v', '(NH)->NH'),
)
_QK_NORMS = (
  ('attention/q_norm', 'self_attn.q_norm', 'attn_q_norm', 'H->H'),
  ('attention/k_norm', 'self_attn.k_norm', 'attn_k_norm', 'H->H'),
)
_ROTATED = ('attn_q.weight', 'attn_k.weight')  # permuted by GGUF converters


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """Of a parsed config.json; ValueError for what we do not compute."""
  _check_legal(hf, _HF_LEGAL, 'config.json: ')
  if sliding := set(hf.get('layer_types') or ()) - {'full_attention'}:
    raise ValueError(
      f'config.json: layer_types has {", ".join(sorted(sliding))}; only '
      'full_attention is supported.'
    )
  num_heads = _needed(hf, 'num_attention_heads')
  d_model = _needed(hf, 'hidden_size')
  rope_theta, rope_scaling = _rope_from_hf(hf)
  return ModelConfig(
    vocab_size=_needed(hf, 'vocab_size'),
    num_layers=_needed(hf, 'num_hidden_layers'),
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=hf.get('num_key_value_heads') or num_heads,
    head_dim=hf.get('head_dim') or d_model // num_heads,
    d_ffn=_needed(hf, 'intermediate_size'),
    rope_theta=rope_theta,
    rope_scaling=rope_scaling,
    norm_eps=_needed(hf, 'rms_norm_eps'),
    tie_embeddings=hf.get('tie_word_embeddings', False),
    max_positions=_needed(hf, 'max_position_embeddings'),
  )


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """config.json; ValueError if it cannot say what `config` is."""
  return {
    'architectures': [HF_ARCHITECTURE],
    'model_type': 'llama',
    'attention_bias': False,
    'mlp_bias': False,
    **common_to_hf(config, attention_bias=False, qk_norm=False),
  }


def from_gguf(
  fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
  """Of a file's metadata and the shapes of its tensors."""
  prefix = fields['general.architecture'] + '.'
  own = {k.removeprefix(prefix): v for k, v in fields.items()}
  _check_legal(own, _GGUF_LEGAL, f'GGUF: {prefix}')
  d_model = _needed(own, 'embedding_length', prefix)
  num_heads = _needed(own, 'attention.head_count', prefix)
  head_dim = own.get('attention.key_length', d_model // num_heads)
  for key in ('rope.dimension_count', 'attention.value_length'):
    if own.get(key, head_dim) != head_dim:
      raise ValueError(
        f'GGUF: {prefix}{key}={own[key]}: must be the head dim, {head_dim}.'
      )
  return ModelConfig(
    vocab_size=_needed(shapes, 'token_embd.weight')[0],
    num_layers=_needed(own, 'block_count', prefix),
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=own.get('attention.head_count_kv', num_heads),
    head_dim=head_dim,
    d_ffn=_needed(own, 'feed_forward_length', prefix),
    rope_theta=own.get('rope.freq_base', 10000.0),
    norm_eps=_needed(own, 'attention.layer_norm_rms_epsilon', prefix),
    tie_embeddings='output.weight' not in shapes,
    max_positions=_needed(own, 'context_length', prefix),
  )


def tensors(
  config: ModelConfig, interleaved_in_gguf: bool = True
) -> dict[str, Tensor]:
  """Parameter path -> its names in both formats and its layout."""
  rows = [*_STEM] if config.tie_embeddings else [*_STEM, _HEAD]
  blocks = [*_BLOCK]
  if config.attention_bias:
    blocks += _BIASES
  if config.qk_norm:
    blocks += _QK_NORMS
  rows += [
    (
      f'blocks/{path}',
      f'model.layers.{{layer}}.{hf}',
      f'blk.{{layer}}.{gguf}',
      layout,
    )
    for path, hf, gguf, layout in blocks
  ]
  table = {}
  for path, hf, gguf, layout in rows:
    end = '.bias' if path.endswith('_bias') else '.weight'
    rotated = (gguf + end).endswith(_ROTATED)
    table[path] = Tensor(
      hf + end, gguf + end, layout, rotated and interleaved_in_gguf
    )
  return table


def common_to_hf(
  config: ModelConfig, attention_bias: bool, qk_norm: bool
) -> dict[str, Any]:
  """Keys that the families share; the switches are what the family implies."""
  for name, implied in (
    ('attention_bias', attention_bias),
    ('qk_norm', qk_norm),
  ):
    if getattr(config, name) != implied:
      raise ValueError(
        f'model.{name}={getattr(config, name)}: {config.family} checkpoints '
        f'have {name}={implied}. Use the family that has it, such as qwen2 '
        '(attention_bias) or qwen3 (qk_norm).'
      )
  scaling = None
  if config.rope_scaling:
    values = dict(zip(_LLAMA3_ROPE, config.rope_scaling, strict=True))
    original = int(values.pop('original_max_position_embeddings'))
    scaling = {
      'rope_type': 'llama3',
      **values,
      'original_max_position_embeddings': original,
    }
  return {
    'vocab_size': config.vocab_size,
    'hidden_size': config.d_model,
    'intermediate_size': config.d_ffn,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_positions,
    'rms_norm_eps': config.norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': scaling,
    'tie_word_embeddings': config.tie_embeddings,
    # Else the reader's defaults, which are other tokenizers' ids.
    'bos_token_id': None,
    'eos_token_id': None,
  }


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, tuple[float, ...]]:
  """(theta, scaling); transformers 5 has both under `rope_parameters`."""
  rope = (hf.get('rope_scaling') or {}) | (hf.get('rope_parameters') or {})
  theta = rope.pop('rope_theta', hf.get('rope_theta', 10000.0))
  kind = rope.pop('rope_type', rope.get('type', 'default'))
  rope.pop('type', None)
  _check_legal(rope, {'partial_rotary_factor': (1, None)}, 'config.json: rope ')
  rope.pop('partial_rotary_factor', None)
  legal = {'default': (), 'llama3': _LLAMA3_ROPE}
  if kind not in legal or set(rope) != set(legal[kind]):
    raise ValueError(
      f'config.json: rope scaling of type {kind} with {sorted(rope)}; legal: '
      f'default (plain), and llama3 with {sorted(_LLAMA3_ROPE)}.'
    )
  return float(theta), tuple(float(rope[key]) for key in legal[kind])


def _check_legal(
  found: Mapping[str, Any], legal: Mapping[str, tuple[Any, ...]], where: str
) -> None:
  for key, values in legal.items():
    if found.get(key, values[0]) not in values:
      raise ValueError(
        f'{where}{key}={found[key]!r} is not supported; legal: {values[0]!r}.'
      )


def _needed(found: Mapping[str, Any], key: str, prefix: str = '') -> Any:
  if key not in found:
    raise ValueError(f'The checkpoint does not say {prefix}{key}.')
  return found[key]
