"""What SFT learns from: every token of a solution, all of them alike.

That the phase resumes, and what it leaves, is tried with the whole loop.
"""

import json
import types

import numpy as np
import pytest

from rl_jax import supervised
from rl_jax.prompts.stream import Config, PromptStream
from rl_jax.prompts.tokenizer import load_tokenizer

CHARS = load_tokenizer('chars:0123456789+=')
ROWS = [
  {'prompt': '1+2=', 'answer': '3', 'how': '3'},
  {'prompt': '10+20+30=', 'answer': '60', 'how': '30+30=60'},
]


def test_each_solution_token_weighs_the_same(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
  entry = dict(name='jsonl', path=str(path), solution='how')
  stream = PromptStream({'rows': entry}, Config(), CHARS, seed=0)
  learner = types.SimpleNamespace(row_tokens=32)
  p = types.SimpleNamespace(settings=types.SimpleNamespace(learner=learner))
  batch = supervised._batch(p, stream, stream.take(2))
  learnt = batch.loss_mask > 0
  # '3' and '30+30=60', each with its stop: 2 and 9 tokens.
  text = sorted(CHARS.decode(batch.tokens[learnt]).split('<eos>'))
  assert text == ['', '3', '30+30=60']
  np.testing.assert_allclose(batch.loss_weights[learnt], 1 / 11, rtol=1e-6)
  assert batch.loss_weights.sum() == pytest.approx(1)
  assert not batch.loss_weights[~learnt].any()
