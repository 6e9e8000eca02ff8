"""Models: one definition generates and trains, so the log-probs agree.

`base.Model` is the decoder that all families share; a family is a module of
this folder (or any import path) that says how its published checkpoints map
onto it:

  HF_ARCHITECTURE: str        # as in config.json's `architectures`
  GGUF_ARCHITECTURE: str      # as in GGUF's `general.architecture`
  def from_hf(hf: Mapping) -> ModelConfig:
    '''Of config.json; ValueError for what the decoder does not compute.'''
  def to_hf(config: ModelConfig) -> dict:
    '''config.json; ValueError if it cannot say what `config` is.'''
  def from_gguf(fields: Mapping, shapes: Mapping) -> ModelConfig:
    '''Of GGUF metadata, and of the shapes of the tensors in the file.'''
  def tensors(config: ModelConfig) -> dict[str, Tensor]:
    '''Parameter path -> its names in both formats and its layout.'''

`weights.py` reads and writes files with it, and fills in `config.family`.

A minimal family is a variant of another; `my_paper/wide_heads.py`, used by
`weights.read_config(source, family='my_paper.wide_heads')`:

  import dataclasses
  from rl_jax.models import llama
  from rl_jax.models.llama import from_gguf, tensors, to_hf

  HF_ARCHITECTURE, GGUF_ARCHITECTURE = 'WideHeadsForCausalLM', 'wide_heads'

  def from_hf(hf):
    return dataclasses.replace(llama.from_hf(hf), head_dim=hf['wide_head'])
"""

# What makes a module a plugin, see resolve.
PLUGIN = (
  'HF_ARCHITECTURE',
  'GGUF_ARCHITECTURE',
  'from_hf',
  'to_hf',
  'from_gguf',
  'tensors',
)
