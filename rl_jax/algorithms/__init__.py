"""Algorithms: rewards -> advantages, and the loss of a token.

An algorithm is a module of this folder (or any import path) with

  @dataclasses.dataclass(frozen=True)
  class Config(base.Config): ...    # its keys under `config.algorithm`

  def advantages(rewards: np.ndarray, config: Config) -> np.ndarray:
    '''[G] float64 rewards of one group -> [G] advantages.'''

  def loss(inputs: base.LossInputs, config: Config):
    '''[B, T] loss of each token, and metrics as {name: [B, T] array}.'''

`inputs` has `logprobs`, `behavior_logprobs`, `reference_logprobs` (or None),
`advantages` and `loss_mask`, all [B, T]; `base.log_ratio(inputs)` is the first
less the second, clamped. All are pure functions of arrays. `advantages` sees
one group, of two or more rewards that are not all equal; `loss` treats each
token alone, since the [B, T] that it gets are some packed rows of a batch. (A
plugin whose tokens mix is refused when the config is read.) Masks,
normalisation over global counts, micro-batches, meshes and gradients are the
learner's business: whatever `loss` returns outside the loss mask is ignored,
and metrics are reported as mean, least and most over the tokens of the loss. So
are the keys of `base.Config`: aggregation, truncated completions and the KL to
a reference (`kl_coef`) are added to every algorithm. A plugin is tried when the
config is read, on two rewards and a few tokens, before the model is built.

A minimal plugin, `my_paper/mine.py` in a folder of PYTHONPATH, used by
`algorithm = dict(name='my_paper.mine', tau=2.0)`; inside rl_jax it would be
`algorithms/mine.py` and `name='mine'`:

  import dataclasses
  from rl_jax.algorithms import base

  @dataclasses.dataclass(frozen=True)
  class Config(base.Config):
    tau: float = 1.0

  def advantages(rewards, config):
    return (rewards - rewards.mean()) / config.tau

  def loss(inputs, config):
    return -inputs.advantages * inputs.logprobs, {}
"""

# What makes a module a plugin, see resolve.
PLUGIN = ('Config', 'advantages', 'loss')
