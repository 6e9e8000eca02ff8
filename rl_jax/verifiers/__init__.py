"""Verifiers: is this completion right? The only teacher of the policy.

A verifier is a module of this folder (or any import path) with

  @dataclasses.dataclass(frozen=True)
  class Config: ...                 # its keys under `config.verifier`

  def check_answer(answer, config: Config) -> None:
    '''ValueError if the gold answer cannot be verified against.'''

  def verify(completion: str, answer, config: Config) -> Verdict:
    '''Pure, deterministic; runs in a worker process, never in the trainer.'''

  def examples(answer, config: Config) -> dict[str, str]:
    '''Completions to prove the verifier by: 'gold' must pass; 'empty',
    'wrong' and every name that starts with 'attack' must not.'''

Verifier modules import neither JAX nor the rest of rl_jax but `types`. They
see strings, never arrays. `service.py` runs them: a supervisor process on the
host, started with `subprocess`, owns the workers, kills them from outside at
the deadline and replaces them; one poisoned item costs one item. Whatever
`verify` raises is an `error` verdict, never a wrong answer. Completion and
answer reach it as JSON: any string as it was, tuples as lists.

A minimal plugin, `my_paper/exact.py`, used by `verifier = dict(name=
'my_paper.exact')`:

  import dataclasses
  from rl_jax.types import Verdict

  @dataclasses.dataclass(frozen=True)
  class Config:
    strip: bool = True

  def check_answer(answer, config):
    if not isinstance(answer, str) or not answer:
      raise ValueError(f'{answer=!r}: must be a non-empty string')

  def verify(completion, answer, config):
    text = completion.strip() if config.strip else completion
    right = text == answer
    return Verdict('pass' if right else 'fail', float(right), 'exact match')

  def examples(answer, config):
    return {'gold': answer, 'empty': '', 'wrong': answer + '0'}
"""

# What makes a module a plugin, see resolve.
PLUGIN = ('Config', 'check_answer', 'verify', 'examples')
