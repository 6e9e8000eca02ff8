"""Batch inference gives each row its lines, in order, however often it dies."""

import fcntl
import json
import shutil

import jax
import pytest

from configs import base
from rl_jax import config as configs
from rl_jax import parts
from rl_jax.generate import generate
from rl_jax.generator.scheduler import Scheduler
from rl_jax.prompts.tokenizer import load_tokenizer
from rl_jax.saving import Saves

ROWS = [
  {'prompt': '1+2=', 'answer': '3', 'note': 'handed on'},
  {'question': '1+1='},
  {'prompt': '4+4='},
  {'prompt': 'a+1='},
  {'prompt': '12345+1='},
  *({'prompt': f'{i % 10}+{i // 10}='} for i in range(40)),
]
BAD = {1: "column 'prompt'", 3: "'a' in", 4: 'max_prompt_tokens=4'}


def tiny(**flat):
  config = base.get_config()
  config.num_steps = config.prompts_per_step = 1
  config.completions_per_prompt = 4
  config.mesh.mode = 'split'
  config.learner.rows_per_microbatch = 7  # the other devices of the tests
  config.model.tokenizer = 'chars:0123456789+='
  config.model.architecture = dict(
    num_layers=1,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ffn=24,
  )
  sums = dict(name='arithmetic', min_digits=1, max_digits=1, operators='+')
  config.prompts.train = dict(sums=dict(**sums, split='train'))
  config.prompts.heldout = dict(sums=dict(**sums, split='heldout'))
  config.prompts.max_prompt_tokens = 4
  config.sampling.max_tokens = 5
  config.generator.num_slots = 4
  config.generator.prefill_tokens = 8
  config.generator.prefill_chunk = 4
  config.learner.row_tokens = config.learner.logprob_chunk = 16
  config.evaluation.num_prompts = 2
  config.evaluation.samples_per_prompt = 2
  for name, value in flat.items():
    section, key = name.split('__')
    config[section][key] = value
  return config


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The workdir of a run that died after its first checkpoint."""
  workdir = tmp_path_factory.mktemp('run')
  s = configs.settings(tiny())
  tokenizer = load_tokenizer(s.model.tokenizer)
  model, plan, _, _ = parts.generation(s, tokenizer)
  learner = parts.rl_learner(s, model, plan)
  params = learner.init_params(jax.random.key(0))
  host = {'stream': {}, 'journal': {}, 'rollouts': {}}
  with Saves(workdir, s.checkpoint) as saves:
    saves.save('rl', 1, learner.init_state(params), host, wait=True)
  return workdir


@pytest.fixture(scope='module')
def prompts(tmp_path_factory):
  path = tmp_path_factory.mktemp('prompts') / 'in.jsonl'
  lines = [json.dumps(row) for row in ROWS] + ['', '{"prompt": ']
  path.write_text('\n'.join(lines))
  return path


@pytest.fixture(scope='module')
def folder(run, prompts, tmp_path_factory):
  """Of an undisturbed output."""
  folder = tmp_path_factory.mktemp('out')
  failed = generate(tiny(), prompts, folder / 'out.jsonl', workdir=run)
  assert failed == len(BAD) + 1
  return folder


@pytest.fixture
def whole(folder):
  return (folder / 'out.jsonl').read_bytes()


@pytest.fixture
def out(folder, tmp_path):
  """A copy of it."""
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  return tmp_path / 'out.jsonl'


def test_every_row_has_its_lines_in_order(whole):
  lines = [json.loads(line) for line in whole.splitlines()]
  wanted = []
  for i in range(len(ROWS) + 1):
    bad = i in BAD or i == len(ROWS)
    wanted += [(i, None)] if bad else [(i, 0), (i, 1)]
  assert [(x['row'], x.get('sample')) for x in lines] == wanted
  for line in lines:
    row = line['row']
    if row < len(ROWS):
      assert line.items() >= ROWS[row].items()
    if 'error' in line:
      assert BAD.get(row, 'not JSON') in line['error']
      continue
    assert line['finish_reason'] in ('stop', 'length')
    spelled = line['num_tokens'] - (line['finish_reason'] == 'stop')
    completion = line['completion'].replace('<pad>', '_')
    assert len(completion) == spelled <= 5
    assert line['logprob'] < 0
  assert len({x['completion'] for x in lines if 'error' not in x}) > 10


@pytest.mark.parametrize(
  'cut',
  [1000, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (150, -1))],
)
def test_it_goes_on_where_it_was_cut(cut, run, prompts, whole, out):
  out.write_bytes(whole[:cut])
  assert generate(tiny(), prompts, out, workdir=run) == len(BAD) + 1
  assert out.read_bytes() == whole


@pytest.mark.slow
def test_tokens_do_not_depend_on_slots(run, prompts, whole, tmp_path):
  out = tmp_path / 'out.jsonl'
  config = tiny(generator__num_slots=9, generator__steps_per_dispatch=2)
  generate(config, prompts, out, workdir=run)
  strip = lambda data: [  # noqa: E731
    {k: v for k, v in json.loads(line).items() if k != 'logprob'}
    for line in data.splitlines()
  ]
  assert strip(out.read_bytes()) == strip(whole)


def test_completions_are_drawn_as_in_evaluation(run, prompts, tmp_path):
  config = tiny(
    evaluation__temperature=0.0,
    evaluation__samples_per_prompt=1,
    evaluation__logit_bias=((3, 1e3),),  # the digit 1, again and again
    evaluation__stop_strings=('111',),
    evaluation__min_tokens=4,
    generator__top_logprobs=2,
  )
  generate(config, prompts, tmp_path / 'out.jsonl', workdir=run)
  lines = map(json.loads, (tmp_path / 'out.jsonl').read_text().splitlines())
  told = [x for x in lines if 'error' not in x]
  assert len(told) == len(ROWS) - len(BAD)
  for line in told:
    # Three of them complete the string, but four tokens are the fewest.
    assert (line['completion'], line['num_tokens']) == ('1', 4)
    assert (line['finish_reason'], line['logprob']) == ('stop', 0.0)
    assert [[first, len(rest)] for first, *rest in line['top_logprobs']] == [
      [[3, pytest.approx(0)], 1]
    ] * 4


@pytest.mark.slow
def test_prompts_are_rendered_as_in_training(run, tmp_path, monkeypatch):
  submitted, submit = [], Scheduler.submit

  def spy(self, request):
    submitted.append(request.prompt.text)
    submit(self, request)

  monkeypatch.setattr(Scheduler, 'submit', spy)
  prompts = tmp_path / 'in.jsonl'
  prompts.write_text('{"prompt": "4+4="}\n')
  config = tiny(prompts__template='1+{prompt}', prompts__max_prompt_tokens=6)
  generate(config, prompts, tmp_path / 'out.jsonl', workdir=run)
  assert submitted == ['1+4+4=']


@pytest.mark.slow
def test_another_seed_draws_other_completions(run, prompts, whole, tmp_path):
  config = tiny()
  config.seed = 1
  generate(config, prompts, tmp_path / 'out.jsonl', workdir=run)
  pairs = zip(
    whole.splitlines(),
    (tmp_path / 'out.jsonl').read_bytes().splitlines(),
    strict=True,
  )
  differ = [a != b for a, b in pairs]
  assert sum(differ) > len(differ) / 2


def test_another_call_does_not_go_on_with_the_file(
  run, prompts, whole, out, tmp_path
):
  with pytest.raises(ValueError, match=r'another config \(see .*about.json'):
    generate(tiny(evaluation__temperature=0.5), prompts, out, workdir=run)
  with pytest.raises(ValueError, match=r'another config \(see .*about.json'):
    generate(tiny(generator__kv_format='int8'), prompts, out, workdir=run)
  others = tmp_path / 'in.jsonl'
  others.write_text('{"prompt": "1+1="}\n')
  with pytest.raises(ValueError, match='another prompts_sha256 '):
    generate(tiny(), others, out, workdir=run)
  with open(out, 'a') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match='being written by another process'):
      generate(tiny(), prompts, out, workdir=run)
  assert out.read_bytes() == whole


def test_what_is_missing_is_named(prompts, tmp_path):
  out = tmp_path / 'out.jsonl'
  with pytest.raises(ValueError, match='there is no such file'):
    generate(tiny(), tmp_path / '..' / 'nowhere', out)
  with pytest.raises(ValueError, match='there is no folder'):
    generate(tiny(), prompts, tmp_path / 'nowhere' / 'out.jsonl')
  with pytest.raises(ValueError, match='is --prompts; name another'):
    generate(tiny(), prompts, prompts)
  with pytest.raises(ValueError, match=r"no column 'text'; .* answer, no"):
    generate(tiny(), prompts, out, column='text')
  with pytest.raises(ValueError, match='name the --workdir of a run'):
    generate(tiny(), prompts, out)
  with pytest.raises(ValueError, match='has no checkpoints'):
    generate(tiny(), prompts, out, workdir=tmp_path)
  assert not out.exists()
