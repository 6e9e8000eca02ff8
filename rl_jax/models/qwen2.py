"""Qwen 2 and 2.5 checkpoints: Llama's with biases on q, k and v."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_jax.models import llama
from rl_jax.models.base import ModelConfig
from rl_jax.models.weights import Tensor

HF_ARCHITECTURE = 'Qwen2ForCausalLM'
GGUF_ARCHITECTURE = 'qwen2'


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """Of a parsed config.json; ValueError for what we do not compute."""
  # The architecture implies the biases; a key that repeats it changes nothing.
  rest = {k: v for k, v in hf.items() if k != 'attention_bias'}
  return dataclasses.replace(llama.from_hf(rest), attention_bias=True)


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """config.json; ValueError if it cannot say what `config` is."""
  return {
    'architectures': [HF_ARCHITECTURE],
    'model_type': 'qwen2',
    'use_sliding_window': False,
    **llama.common_to_hf(config, attention_bias=True, qk_norm=False),
  }


def from_gguf(
  fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
  """Of a file's metadata and the shapes of its tensors."""
  config = llama.from_gguf(fields, shapes)
  return dataclasses.replace(config, attention_bias=True)


def tensors(config: ModelConfig) -> dict[str, Tensor]:
  """Parameter path -> its names in both formats and its layout."""
  return llama.tensors(config, interleaved_in_gguf=False)
