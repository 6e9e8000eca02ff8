"""Prompts: where rows come from, and how they become tokens.

A source is a module of this folder (or any import path) with

  @dataclasses.dataclass(frozen=True)
  class Config: ...            # its keys, in an entry of `prompts.train`

  def rows(config: Config) -> Sequence[Row]:
    '''Random access and a length; row i is always the same row.'''

Entries have a label each, so that every key can be set from the command line
(`--config.prompts.train.sums.max_digits=3`); `weight` is a source's share of
the training prompts and belongs to the stream, not to the source:

  prompts = dict(
    max_prompt_tokens=16,
    train=dict(sums=dict(name='arithmetic', weight=2.0),
               gcds=dict(name='reasoning_gym', task='gcd')),
    heldout=dict(sums=dict(name='arithmetic', split='heldout')))

`stream.py` shuffles, mixes and tokenises sources into a resumable stream of
`types.Prompt`; `tokenizer.py` holds tokenisers and chat templates.

A minimal plugin, `my_paper/echo.py`, used by `prompts.train = dict(echo=
dict(name='my_paper.echo', num_rows=10))`:

  import dataclasses
  from rl_jax.prompts.base import Row

  @dataclasses.dataclass(frozen=True)
  class Config:
    num_rows: int = 100

  def rows(config):
    return [Row(f'Say {i}', str(i)) for i in range(config.num_rows)]
"""

PLUGIN = ('Config', 'rows')  # what makes a module a plugin, see resolve
