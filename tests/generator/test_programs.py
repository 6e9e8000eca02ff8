"""The programs compiled for real TPUs; the kernel of theirs interpreted."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from rl_jax import meshes
from rl_jax.generator.kv_layout import HeadsFirst, Pages
from rl_jax.generator.paged_attention import attend_pages, tpu_kernel
from rl_jax.generator.programs import Config, Limits, Programs, Slots
from rl_jax.generator.quantize import Packing
from rl_jax.models import base

LLAMA3_8B = base.ModelConfig(
  vocab_size=128256,
  num_layers=32,
  d_model=4096,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  d_ffn=14336,
  rope_theta=5e5,
  tie_embeddings=False,
)
GIB = 2**30


@pytest.fixture
def topology(monkeypatch):
  """Makes a mesh of 8 TPU chips, which need not be here."""
  if importlib.util.find_spec('libtpu') is None:
    message = "libtpu is missing: pip install -e '.[tpu-compile]'"
    if os.environ.get('CI'):
      pytest.fail(message)
    pytest.skip(message)
  monkeypatch.setenv('TPU_SKIP_MDS_QUERY', '1')
  # Beside another process that has loaded libtpu: no chip is used here.
  monkeypatch.setenv('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

  def mesh(name):
    devices = topologies.get_topology_desc(
      platform='tpu', topology_name=name
    ).devices
    return Mesh(np.array(devices).reshape(1, 8), ('data', 'tensor'))

  return mesh


def _abstract_params(model, mesh, packing):
  """Shapes and shardings as the sync delivers them, layers stacked."""
  specs = model.specs()
  shardings = meshes.shardings(mesh, specs, meshes.GENERATION_RULES)
  params = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), specs
  )
  return {
    name: jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      jax.eval_shape(
        functools.partial(packing.pack, stacked=stacked), params[name]
      ),
      packing.shardings(shardings[name], stacked=stacked),
    )
    for name, stacked in (('stem', False), ('blocks', True))
  }


@pytest.mark.slow
def test_llama3_8b_compiles_for_tpu_and_fits(topology):
  """64 slots of 2,048 tokens in bfloat16 on 8 chips, tensor parallel.

  A chip holds an eighth of 8.03e9 parameters (1.87 GiB) and of 64 * 16 pages
  of 128 tokens (2 * 32 * 131,072 * 128 * 2 B = 2 GiB).
  """
  model = base.Model(LLAMA3_8B)
  config = Config(
    num_slots=64,
    page_size=128,
    steps_per_dispatch=32,
    prefill_tokens=1024,
    prefill_chunk=256,
    dtype='bfloat16',
    unroll_layers=False,
  )
  chips = {  # GiB of memory, and what to compile
    'v5e:2x4': (16, ('prefill', 'decode')),
    'v5p:2x2x2': (95, ('decode',)),
    'v6e:2x4': (32, ('decode',)),
  }
  for name, (gib, whats) in chips.items():
    mesh = topology(name)
    programs = Programs(
      model,
      mesh,
      config,
      num_pages=64 * 16 + 1,
      width=16,
      limits=Limits(2048, stop_ids=4),
    )
    params = _abstract_params(model, mesh, Packing())
    for what in whats:
      compiled = programs.compile(what, params)
      memory = compiled.memory_analysis()
      held = memory.argument_size_in_bytes / GIB
      peak = held + memory.temp_size_in_bytes / GIB
      # Prefill reads no head (0.12 GiB): it does not make logits.
      assert 3.7 < held < 4.0, (name, what, held)
      assert peak < gib, (name, what, peak)
      # A prompt's many tokens attend by XLA.
      kernel = 'tpu_custom_call' in compiled.as_text()
      assert kernel == (what == 'decode'), (name, what)


@pytest.mark.parametrize('weight_format', ['dtype', 'int8'])
def test_every_program_lowers_for_cuda(lab, weight_format):
  """No card is needed for it; the loop of XLA attends there too."""
  formats = {'weight_format': weight_format}
  if weight_format == 'int8':
    formats['kv_format'] = 'int8'
  engine = lab.engine(speculate=2, logit_biases=1, **formats)
  programs, config = engine._programs, engine.config
  params = lab.weights(engine, 0)
  S, W = config.num_slots, engine._width
  R, C = config.prefill_rows, config.prefill_chunk
  ints = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  slots = Slots.empty(S, W, engine.limits)
  hidden = np.zeros((R, lab.model.config.d_model), np.float32)
  arguments = {
    'prefill': (
      params,
      programs.caches,
      ints(R, C),
      ints(R),
      ints(R),
      ints(R, W),
    ),
    'first': (params, hidden, ints(S), ints(S), slots.sampling, np.int32(0)),
    'decode': (
      *(params, programs.caches, slots),
      *(slots.moving, slots.active, np.int32(0)),
    ),
    'verify': (params, programs.caches, slots, ints(S, 2), np.int32(0)),
    'copy': (programs.caches, ints(S), ints(S)),
  }
  for name, given in arguments.items():
    traced = getattr(programs, name).trace(*given)
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    assert 'stablehlo' in text, name


@pytest.mark.slow
@pytest.mark.parametrize('head_dim', [64, 128])
def test_the_tpu_kernel_agrees_with_the_loop(head_dim):
  """Interpreted on CPU, on two devices; bfloat16 inside."""
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ('data', 'tensor'))
  B, N, K, P, Z = 3, 4, 2, 8, 16
  rng = np.random.default_rng(0)
  layout = HeadsFirst('float32', head_dim)
  new = lambda heads: jnp.asarray(  # noqa: E731
    rng.standard_normal((B, 1, heads, head_dim)), jnp.float32
  )
  q, k, v = new(N), new(K), new(K)
  pool = [
    Pages(
      jnp.asarray(
        rng.standard_normal((K, P, Z, 128)) * (np.arange(128) < head_dim),
        jnp.float32,
      ),
      None,
    )
    for _ in range(2)
  ]
  table = np.array([[3, 5], [1, 0], [7, 2]], np.int32)
  positions = np.array([[20], [3], [31]], np.int32)
  valid = np.ones((B, 1), bool)
  run = lambda kernel: jax.jit(  # noqa: E731
    lambda q, k, v, pool: attend_pages(table, positions, valid, layout, kernel)(
      q, k, v, tuple(pool)
    )[0]
  )(q, k, v, pool)
  want = run(None)
  with pltpu.force_tpu_interpret_mode():
    got = run(tpu_kernel(mesh))
  np.testing.assert_allclose(got, want, atol=2e-2)
  assert np.abs(want).max() > 0.3


def test_the_tpu_kernel_is_refused_elsewhere():
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'tensor'))
  model = base.Model(base.ModelConfig())
  with pytest.raises(ValueError, match=r"attention='pallas_tpu' on cpu"):
    Programs(
      model,
      mesh,
      Config(attention='pallas_tpu'),
      num_pages=9,
      width=4,
      limits=Limits(64, stop_ids=1),
    )
