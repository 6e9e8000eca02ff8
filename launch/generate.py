"""Completes a file of prompts.

  python launch/generate.py --config=configs/smollm2_chain_sum.py \\
      --prompts=in.jsonl --out=out.jsonl

Rows of `in.jsonl` have a column `prompt` (or `--column=`). With `--workdir=` of
a run the newest checkpoint of its policy answers, else `config.model.source`.
`config.evaluation` says how completions are drawn, `samples_per_prompt`
included. The same command goes on with an `--out` that was interrupted. Rows
that cannot be completed get a line with their `error`; then the exit code is 1.
"""

import pathlib
import sys

from absl import flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # configs/ import each other

from rl_jax import command_line

_PROMPTS = flags.DEFINE_string('prompts', None, 'JSON lines.', required=True)
_OUT = flags.DEFINE_string('out', None, 'JSON lines.', required=True)
_COLUMN = flags.DEFINE_string('column', 'prompt', 'Of the prompts.')
_WORKDIR = flags.DEFINE_string('workdir', '', 'Of a run; its policy answers.')


def main() -> None:
  config = command_line.begin()
  from rl_jax.generate import generate

  failed = generate(
    config,
    pathlib.Path(_PROMPTS.value),
    pathlib.Path(_OUT.value),
    column=_COLUMN.value,
    workdir=pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None,
  )
  if failed:
    print(f'{failed} rows could not be completed.', file=sys.stderr)
    sys.exit(1)


if __name__ == '__main__':
  command_line.run(main)
