"""Models: one definition generates and trains, so the log-probs agree.

`base.Model` is the decoder that all families share; a family is a module of
this folder (or any import path) that says how its published checkpoints map
onto it:

  HF_ARCHITECTURE: str        # as in config.json's `architectures`
  GGUF_ARCHITECTURE: str      # as in GGUF's `general.architecture`
  def from_hf(hf: dict) -> ModelConfig: ...
  def to_hf(config: ModelConfig) -> dict: ...
  def from_gguf(fields: dict) -> ModelConfig: ...
  def tensors(config: ModelConfig) -> dict[str, Tensor]:
    '''Parameter path -> its names in both formats and how it is laid out.'''

A minimal family is a variant of another; `my_paper/llama_bias.py`:

  from rl_jax.models import llama
  from rl_jax.models.llama import from_gguf, to_hf

  HF_ARCHITECTURE, GGUF_ARCHITECTURE = 'MyForCausalLM', 'my'

  def from_hf(hf):
    return dataclasses.replace(llama.from_hf(hf), attention_bias=True)

  def tensors(config):
    return llama.tensors(config)
"""
