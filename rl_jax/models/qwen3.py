"""Qwen 3 checkpoints (dense): Llama's with RMSNorm on q and k of each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_jax.models import llama
from rl_jax.models.base import ModelConfig
from rl_jax.models.weights import Tensor

HF_ARCHITECTURE = 'Qwen3ForCausalLM'
GGUF_ARCHITECTURE = 'qwen3'


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """Of a parsed config.json; ValueError for what we do not compute."""
  if 'head_dim' not in hf:  # not d_model / num_heads in this family
    raise ValueError('config.json: head_dim is missing.')
  return dataclasses.replace(llama.from_hf(hf), qk_norm=True)


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """config.json; ValueError if it cannot say what `config` is."""
  return {
    'architectures': [HF_ARCHITECTURE],
    'model_type': 'qwen3',
    'attention_bias': False,
    'use_sliding_window': False,
    **llama.common_to_hf(config, attention_bias=False, qk_norm=True),
  }


def from_gguf(
  fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
  """Of a file's metadata and the shapes of its tensors."""
  return dataclasses.replace(llama.from_gguf(fields, shapes), qk_norm=True)


def tensors(config: ModelConfig) -> dict[str, Tensor]:
  """Parameter path -> its names in both formats and its layout."""
  return llama.tensors(config, interleaved_in_gguf=False)
