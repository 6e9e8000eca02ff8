"""Every algorithm of the folder, and the docstring's, keep the contract."""

import dataclasses
import functools
import importlib
import inspect
import itertools
import pkgutil
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax import algorithms, resolve
from rl_jax.algorithms import base

NAMES = sorted(
  m.name for m in pkgutil.iter_modules(algorithms.__path__) if m.name != 'base'
)
MINE = 'my_paper.mine'


@pytest.fixture
def plugin_of(tmp_path, monkeypatch):
  """Resolves a name; `my_paper/mine.py` is the docstring's own plugin."""
  begin = 'import dataclasses\n  from rl_jax'
  contract = algorithms.__doc__ or ''
  source = '  ' + contract[contract.index(begin) :]
  folder = tmp_path / 'my_paper'
  folder.mkdir()
  (folder / 'mine.py').write_text(textwrap.dedent(source), 'utf-8')
  monkeypatch.syspath_prepend(tmp_path)
  for name in ('my_paper', MINE):  # another test file may have its own
    monkeypatch.delitem(sys.modules, name, raising=False)
  importlib.invalidate_caches()
  yield functools.partial(resolve.plugin, 'algorithms')
  for name in ('my_paper', MINE):
    sys.modules.pop(name, None)


def _inputs():
  rng = np.random.default_rng(0)
  logprobs, behavior, reference = -rng.exponential(1.0, (3, 2, 5))
  advantages = rng.standard_normal((2, 5))
  mask = np.array([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
  return base.LossInputs(
    *(
      jnp.asarray(x, jnp.float32)
      for x in (logprobs, behavior, reference, advantages, mask)
    )
  )


def _config(module, **keys):
  return resolve.settings(module.Config, keys, 'algorithm')


def test_the_folder_has_the_algorithms_that_we_ship():
  assert {'grpo', 'rloo'} <= set(NAMES)
  assert resolve.available('algorithms') == NAMES


@pytest.mark.parametrize('name', [*NAMES, MINE])
def test_config_is_the_bases_with_keys_of_its_own(plugin_of, name):
  module = plugin_of(name)
  assert issubclass(module.Config, base.Config)
  config = _config(module, kl_coef=0.1, truncated='mask')
  assert (config.kl_coef, config.truncated) == (0.1, 'mask')
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.kl_coef = 1.0
  hash(config)  # a static argument of jit
  with pytest.raises(ValueError, match=r'algorithm\.kl_coeff is not a key'):
    _config(module, kl_coeff=0.1)


@pytest.mark.parametrize('name', [*NAMES, MINE])
def test_advantages_are_centred_and_order_like_rewards(plugin_of, name):
  module = plugin_of(name)
  rewards = np.array([0.0, 1.0, 0.25, 1.0])
  before = rewards.copy()
  found = module.advantages(rewards, _config(module))
  np.testing.assert_array_equal(rewards, before)  # pure
  assert np.shape(found) == (4,)
  assert abs(np.sum(found)) < 1e-12
  assert found[0] < found[2] < found[1] == found[3]


@pytest.mark.parametrize('name', [*NAMES, MINE])
def test_loss_is_a_pure_function_of_arrays(plugin_of, name):
  module = plugin_of(name)
  config, inputs = _config(module), _inputs()
  token_loss, metrics = module.loss(inputs, config)
  assert token_loss.shape == (2, 5)
  assert token_loss.dtype == jnp.float32
  assert all(m.shape == (2, 5) for m in metrics.values())
  assert not {'entropy', 'logprob', 'loss', 'tokens'} & set(metrics)
  jitted, _ = jax.jit(module.loss, static_argnums=1)(inputs, config)
  np.testing.assert_allclose(jitted, token_loss, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('name', [*NAMES, MINE])
def test_a_token_learns_from_its_own_advantage_only(plugin_of, name):
  module = plugin_of(name)
  config = _config(module)
  inputs = _inputs()
  inputs = inputs._replace(behavior_logprobs=inputs.logprobs)

  def total(logprobs):
    token_loss, _ = module.loss(inputs._replace(logprobs=logprobs), config)
    return jnp.where(inputs.loss_mask > 0, token_loss, 0.0).sum()

  gradient = jax.grad(total)(inputs.logprobs)
  expected = np.where(inputs.loss_mask > 0, -inputs.advantages, 0)
  np.testing.assert_allclose(gradient, expected, rtol=1e-5)  # REINFORCE


@pytest.mark.parametrize('name', NAMES)
def test_what_the_mask_hides_does_not_reach_the_gradient(plugin_of, name):
  module = plugin_of(name)
  config = _config(module, kl_coef=0.5)
  inputs = _inputs()
  hidden = inputs.loss_mask == 0
  poisoned = base.LossInputs(
    *(jnp.where(hidden, jnp.nan, x) for x in inputs[:4]), inputs.loss_mask
  )

  def total(logprobs, inputs):
    logprobs = jnp.where(hidden, 0.0, logprobs)  # as token_logprobs does
    loss = base.bind(module, config)
    token_loss, _ = loss(inputs._replace(logprobs=logprobs))
    return jnp.where(hidden, 0.0, token_loss).sum()

  clean = jax.value_and_grad(total)(inputs.logprobs, inputs)
  dirty = jax.value_and_grad(total)(poisoned.logprobs, poisoned)
  np.testing.assert_array_equal(dirty[0], clean[0])
  np.testing.assert_array_equal(dirty[1], clean[1])


@pytest.mark.parametrize('name', [*NAMES, MINE])
def test_a_kl_to_the_reference_is_added_to_every_algorithm(plugin_of, name):
  module, inputs = plugin_of(name), _inputs()
  alone, _ = base.bind(module, _config(module))(inputs)
  config = _config(module, kl_coef=2.0, kl_estimator='k2')
  found, metrics = base.bind(module, config)(inputs)
  k2 = (inputs.reference_logprobs - inputs.logprobs) ** 2 / 2
  k2 = np.where(inputs.loss_mask > 0, k2, 0)
  np.testing.assert_allclose(found, alone + 2 * k2, rtol=1e-5)
  np.testing.assert_allclose(metrics['kl_reference'], k2, rtol=1e-5)


@pytest.mark.parametrize('name', [*NAMES, MINE])
def test_a_plugin_that_keeps_the_contract_passes_its_check(plugin_of, name):
  module = plugin_of(name)
  base.check_plugin(module, _config(module))
  base.check_plugin(module, _config(module, kl_coef=0.1))


@pytest.mark.parametrize(
  'name, value, message',
  [
    ('advantages', lambda rewards, config: rewards[:1], r'\(1,\) instead of'),
    ('advantages', lambda rewards, config: rewards / 0, 'inf.*, not finite'),
    ('advantages', lambda rewards, config: [None] * 2, 'not finite'),
    ('advantages', lambda rewards, config: ['a', 'b'], 'ValueError'),
    ('advantages', lambda rewards: rewards, 'TypeError'),
    ('loss', lambda i, c: (i.logprobs.sum(), {}), r'loss has shape \(\)'),
    ('loss', lambda i, c: i.logprobs, 'ValueError: too many values'),
    (
      'loss',
      lambda i, c: (i.logprobs, {'x': i.logprobs.mean()}),
      r"metric 'x' has shape \(\) for inputs of shape \(3, 5\)",
    ),
    ('loss', lambda i, c: (i.logprobs * c.nothing, {}), "no attribute 'noth"),
    (
      'loss',
      lambda i, c: (i.logprobs * (i.advantages - i.advantages.mean()), {}),
      'loss of a token changes with other tokens',
    ),
    (  # one number for a sequence: what moves both log-probs is not seen
      'loss',
      lambda i, c: (
        i.advantages * jnp.exp(base.log_ratio(i).mean(1, keepdims=True)),
        {},
      ),
      'loss of a token changes with other tokens',
    ),
  ],
)
def test_a_plugin_that_breaks_the_contract_is_told_where(
  plugin_of, monkeypatch, name, value, message
):
  module = plugin_of(MINE)
  monkeypatch.setattr(module, name, value)
  with np.errstate(all='ignore'), pytest.raises(ValueError, match=message) as e:
    base.check_plugin(module, _config(module))
  assert "'my_paper.mine'" in str(e.value)
  assert 'rl_jax/algorithms/__init__.py' in str(e.value)


def test_a_config_of_its_own_making_is_refused(plugin_of):
  module = plugin_of(MINE)
  with pytest.raises(ValueError, match='must extend'):
    base.check_plugin(module, object())


@pytest.mark.parametrize('name', NAMES)
def test_every_option_string_runs(plugin_of, name):
  module, inputs = plugin_of(name), _inputs()
  options = {
    'aggregation': tuple(base.AGGREGATIONS),
    'kl_estimator': tuple(base.KL_ESTIMATORS),
    'truncated': ('keep', 'zero', 'mask'),
    'correction': ('none', 'truncated'),
  }
  if name == 'grpo':
    options['scale'] = ('group', 'none')
  strings = {
    f.name for f in dataclasses.fields(module.Config) if f.type == 'str'
  }
  assert strings == set(options), 'a new option belongs into this test'
  for values in itertools.product(*options.values()):
    config = _config(module, kl_coef=0.1, **dict(zip(options, values)))
    assert np.isfinite(base.token_weights([3, 1], config)).all()
    assert np.isfinite(module.advantages(np.array([0.0, 1.0]), config)).all()
    token_loss, metrics = base.bind(module, config)(inputs)
    assert np.isfinite(token_loss).all()
    assert 'kl_reference' in metrics


def test_the_docstrings_plugin_computes_what_it_says(plugin_of):
  module = plugin_of(MINE)
  assert inspect.getsource(module).count('\n') <= 15
  found = module.advantages(np.array([0.0, 1.0]), _config(module, tau=2.0))
  np.testing.assert_array_equal(found, [-0.25, 0.25])


def test_an_unknown_name_lists_what_exists():
  with pytest.raises(ValueError, match=r"no 'gppo'.*Did you mean 'grpo'.*rloo"):
    resolve.plugin('algorithms', 'gppo')
