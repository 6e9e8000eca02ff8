"""What may import what: stages meet in `train.py` and nowhere else."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGES = (
  *('prompts', 'verifiers', 'models', 'generator', 'rollout'),
  *('algorithms', 'learner', 'sync'),
)
# Modules that any stage may import.
COMMON = {'types', 'resolve', 'meshes', 'metrics', 'hub'}
# Stage -> modules of other stages that it may import, and why.
ALLOWED = {
  'generator': {'models'},  # one definition generates ...
  'learner': {'models', 'algorithms.base'},  # ... and trains; Loss's contract
  'sync': {'models'},  # the parameters that it carries
}


def modules():
  for path in sorted((ROOT / 'rl_jax').rglob('*.py')):
    yield '.'.join(path.relative_to(ROOT).with_suffix('').parts), path


def imported(tree, package):
  """Dotted names of rl_jax that a module imports, wherever it does so."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        parents = package.split('.')[: 1 - node.level or None]
        base = '.'.join([*parents, *([base] if base else [])])
      # `from rl_jax.models import base` imports rl_jax.models.base.
      yield from (f'{base}.{a.name}' for a in node.names)


def strays(stage, names):
  """Those of the imported names that this stage may not import."""
  allowed = {stage} | COMMON | ALLOWED.get(stage, set())
  for name in names:
    if name.split('.')[0] == 'rl_jax':
      rest = name.removeprefix('rl_jax').removeprefix('.')
      if not any(f'{rest}.'.startswith(f'{ok}.') for ok in allowed):
        yield name


@pytest.mark.parametrize('stage', STAGES)
def test_a_stage_imports_no_other(stage):
  found = {
    module: wrong
    for module, path in modules()
    if module.split('.')[1] == stage
    if (
      wrong := [
        *strays(
          stage,
          imported(ast.parse(path.read_text()), module.rpartition('.')[0]),
        )
      ]
    )
  }
  assert not found, (
    f'{stage} may import {sorted(COMMON | ALLOWED.get(stage, set()))} only; '
    'hand the part in from train.py.'
  )


def test_the_check_itself_sees_every_form_of_import():
  source = (
    'import rl_jax.learner.sft\n'
    'from rl_jax import train, types\n'
    'from rl_jax.models import base\n'
    'from rl_jax.models.base import Model\n'
    'from .packing import pack\n'
    'from ..learner import sft\n'
    'def f():\n  from rl_jax.journal import Journal\n'
    'import numpy, rl_jaxy\n'
  )
  names = list(imported(ast.parse(source), 'rl_jax.rollout'))
  assert list(strays('rollout', names)) == [
    'rl_jax.learner.sft',
    'rl_jax.train',
    'rl_jax.models.base',
    'rl_jax.models.base.Model',
    'rl_jax.learner.sft',
    'rl_jax.journal.Journal',
  ]
  learner = ['rl_jax.algorithms.base.Loss', 'rl_jax.algorithms.grpo.loss']
  assert list(strays('learner', learner)) == learner[1:]


def test_every_folder_is_a_stage_with_a_docstring():
  folders = {p.parent.name for p in (ROOT / 'rl_jax').glob('*/__init__.py')}
  assert folders == set(STAGES)
  for module, path in modules():
    assert ast.get_docstring(ast.parse(path.read_text())), module


def test_things_have_names():
  named = {path.stem for _, path in modules()}
  assert not named & {'utils', 'util', 'helpers', 'helper', 'misc', 'common'}


def run(code):
  return subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT,
  ).stdout.split()


HEAVY = ('jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax', 'grain', 'absl')


def test_import_rl_jax_is_light():
  code = (
    'import sys, time; before = set(sys.modules); begin = time.perf_counter(); '
    'import rl_jax; print(time.perf_counter() - begin); '
    'print(*(set(sys.modules) - before))'
  )
  runs = [run(code) for _ in range(3)]
  assert min(float(seconds) for seconds, *_ in runs) < 0.3
  loaded = {name.split('.')[0] for _, *names in runs for name in names}
  assert 'rl_jax' in loaded
  assert not loaded & set(HEAVY)


def test_verifiers_import_no_jax():
  names = [m for m, _ in modules() if m.split('.')[1] == 'verifiers']
  names = [name.removesuffix('.__init__') for name in names]
  assert len(names) >= 4
  loaded = run(f'import sys, {", ".join(names)}; print(*sys.modules)')
  assert set(names) <= set(loaded)
  heavy = {*('jax', 'jaxlib', 'flax', 'optax', 'orbax', 'grain')}
  assert not heavy & {name.split('.')[0] for name in loaded}
