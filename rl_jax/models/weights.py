"""Checkpoints <-> sharded parameters: safetensors and GGUF in, safetensors out.

Knows file formats, tensor names and layouts; what a family calls its tensors
is in the family's module. Knows no mesh: where a parameter goes is a tree of
shardings that the caller made. Loading goes leaf by leaf, and each device
reads only its own part: the host holds one leaf's local shards and one tensor
at a time. Left out: pickled checkpoints (they run code), quantised
safetensors, tokenizers.

Letters in layouts: N heads (query or key/value), H head dim, D model, F ffn,
V vocab; L layers are separate tensors in files and the first axis of ours.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from rl_jax import hub, resolve
from rl_jax.models import base, layers

Index = tuple[slice, ...]  # explicit start and stop, step 1

SAFETENSORS_TYPES = ('F32', 'F16', 'BF16')
GGUF_TYPES = (
  *('F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1'),
  *('Q4_K', 'Q6_K'),
)
SAVE_DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}
MAX_FILE_BYTES = 4 * 10**9
# Tensors that some writers add and that no parameter corresponds to.
_BUFFERS = re.compile(r'(.*rotary_emb\.inv_freq|rope_freqs\.weight)$')


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a parameter is found in files, and how it lies there.

  `layout` maps the dims of the file's tensor to those of our parameter (of
  one layer); dims that are one in the file are in brackets.

  Example: Tensor('model.layers.{layer}.self_attn.q_proj.weight',
                  'blk.{layer}.attn_q.weight', '(NH)D->DNH')
  """

  hf: str
  gguf: str
  layout: str
  # GGUF has dims (0, H/2, 1, H/2 + 1, ...) of each head next to each other,
  # as ggml rotates neighbours where we rotate halves.
  interleaved_in_gguf: bool = False

  @functools.cached_property
  def _groups(self) -> tuple[str, ...]:
    file = self.layout.partition('->')[0]
    return tuple(a or b for a, b in re.findall(r'\((\w+)\)|(\w)', file))

  @property
  def _ours(self) -> str:
    return self.layout.partition('->')[2]

  def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in the file of a parameter of `shape` (of one layer)."""
    sizes = dict(zip(self._ours, shape, strict=True))
    return tuple(math.prod(sizes[d] for d in g) for g in self._groups)

  def read(
    self,
    fetch: Callable[[Index], np.ndarray],
    shape: tuple[int, ...],
    index: Index,
    interleaved: bool = False,
  ) -> np.ndarray:
    """Part `index` of our parameter, from `fetch` of parts of the file's."""
    sizes = dict(zip(self._ours, shape, strict=True))
    wanted = dict(zip(self._ours, index, strict=True))
    parts, split = [], []
    for outer, *inner in self._groups:  # inner dims are fetched whole
      step, part = math.prod(sizes[d] for d in inner), wanted.pop(outer)
      parts.append(slice(part.start * step, part.stop * step))
      split += [part.stop - part.start, *(sizes[d] for d in inner)]
    values = fetch(tuple(parts)).reshape(split)
    dims = ''.join(self._groups)
    if interleaved:
      order = np.arange(sizes['H']).reshape(-1, 2).T.ravel()
      values = values.take(order, dims.index('H'))
    values = values.transpose([dims.index(d) for d in self._ours])
    return values[tuple(wanted.get(d, slice(None)) for d in self._ours)]

  def to_file(self, values: np.ndarray) -> np.ndarray:
    """The file's tensor (safetensors) of a parameter of one layer."""
    dims = ''.join(self._groups)
    moved = values.transpose([self._ours.index(d) for d in dims])
    return moved.reshape(self.file_shape(values.shape))


def families() -> dict[str, ModuleType]:
  """The families of this folder: modules that know a checkpoint format."""
  names = resolve.available('models')
  return {name: resolve.plugin('models', name) for name in names}


def read_config(source: str, family: str = '') -> base.ModelConfig:
  """Sizes and switches of a checkpoint, without reading its weights.

  Args:
    source: see `hub.locate`.
    family: module that maps the checkpoint; '' goes by its architecture.

  Raises:
    ValueError: unknown architecture, or something that we do not compute.
  """
  path = hub.locate(source)
  if path.suffix == '.gguf':
    file = _Gguf(path)
    architecture = str(file.fields.get('general.architecture'))
    family = family or _family('GGUF_ARCHITECTURE', architecture, path)
    module = resolve.plugin('models', family)
    config = module.from_gguf(file.fields, file.shapes)
    if 'rope_freqs.weight' in file.shapes:
      # Llama 3.1 and later: the file has only the resulting factors. The
      # settings are the published ones; `load` checks them against these.
      factor = float(file.fetch_all('rope_freqs.weight').max())
      config = dataclasses.replace(
        config, rope_scaling=(factor, 1.0, 4.0, 8192.0)
      )
  else:
    if not (path / 'config.json').is_file():
      raise ValueError(f'{path}: no config.json, so no model is described.')
    try:
      hf = json.loads((path / 'config.json').read_text('utf-8'))
      architecture = ', '.join(list(hf.get('architectures') or ['none']))
      family = family or _family('HF_ARCHITECTURE', architecture, path)
      config = resolve.plugin('models', family).from_hf(hf)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
      raise ValueError(f'{path}/config.json: {type(e).__name__}: {e}') from e
  return dataclasses.replace(config, family=family)


def load(
  source: str,
  model: base.Model,
  shardings: Any,
  dtype: Any = jnp.float32,
) -> base.Params:
  """Parameters of `model` from a checkpoint, read straight into place.

  Args:
    source: see `hub.locate`.
    model: usually of `read_config(source)`.
    shardings: the tree of `model.specs()` with a sharding at each leaf.
    dtype: of the arrays.

  Raises:
    ValueError: tensors missing, unexpected (all are listed), of another shape
      or of a type that we do not read; nothing is loaded by halves.
  """
  path = hub.locate(source)
  in_gguf = path.suffix == '.gguf'
  file = _Gguf(path) if in_gguf else _Safetensors(path)
  table = _table(model)
  _check_names(file, model, table, in_gguf)

  def leaf(key_path, spec: base.ParamSpec, sharding):
    tensor = table[_joined(key_path)]
    return _load_leaf(file, tensor, spec, sharding, dtype, in_gguf)

  return jax.tree_util.tree_map_with_path(leaf, model.specs(), shardings)


def save_hf(
  directory: str | os.PathLike[str],
  model: base.Model,
  params: base.Params,
  *,
  dtype: str = 'float32',
  extra: Mapping[str, Any] | None = None,
) -> None:
  """Writes a directory that `transformers` opens, all of it or nothing.

  Args:
    directory: new or empty; tokenizer files are added by others, afterwards.
    model: of `params`.
    params: blocks stacked by layer.
    dtype: 'float32' or 'bfloat16'.
    extra: more keys of config.json, such as the tokenizer's `eos_token_id`.

  Raises:
    ValueError: the directory has files, or the format cannot say what this
      model is.
  """
  directory = pathlib.Path(directory)
  if dtype not in SAVE_DTYPES:
    raise ValueError(f'{dtype=}: must be one of {", ".join(SAVE_DTYPES)}.')
  if directory.exists() and (
    not directory.is_dir() or any(directory.iterdir())
  ):
    raise ValueError(
      f'{str(directory)!r} exists and is not an empty directory: name another '
      'one, or remove it first.'
    )
  family = resolve.plugin('models', model.config.family)
  config = family.to_hf(model.config) | {'torch_dtype': dtype} | (extra or {})
  partial = directory.with_name(f'.{directory.name}.partial')
  shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
  partial.mkdir(parents=True)
  try:
    _write_safetensors(partial, model, params, np.dtype(SAVE_DTYPES[dtype]))
    _write_json(partial / 'config.json', config)
    for written in partial.iterdir():
      with open(written, 'rb') as f:
        os.fsync(f.fileno())
    os.replace(partial, directory)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


class _File(Protocol):
  shapes: dict[str, tuple[int, ...]]

  def fetch(self, name: str, index: Index) -> np.ndarray:
    """A part of a tensor; only that part is read, where the format can."""
    ...


class _Safetensors:
  """model.safetensors, or the files that model.safetensors.index.json names."""

  def __init__(self, directory: pathlib.Path):
    self.shapes: dict[str, tuple[int, ...]] = {}
    self._paths: dict[str, pathlib.Path] = {}
    paths = [directory / 'model.safetensors']
    index = directory / 'model.safetensors.index.json'
    if not paths[0].is_file() and index.is_file():
      names = set(json.loads(index.read_text('utf-8'))['weight_map'].values())
      paths = [directory / name for name in sorted(names)]
    for path in paths:
      if not path.is_file():
        raise ValueError(
          f'{path} is missing: weights must be safetensors (a single file, or '
          'several with an index) or GGUF; convert others with transformers.'
        )
      self._scan(path)

  def _scan(self, path: pathlib.Path) -> None:
    with _open_safetensors(path) as file:
      for name in file.keys():  # noqa: SIM118  not a dict
        found = file.get_slice(name)
        if found.get_dtype() not in SAFETENSORS_TYPES:
          raise ValueError(
            f'{path}: {name} is {found.get_dtype()}; legal: '
            f'{", ".join(SAFETENSORS_TYPES)}.'
          )
        self.shapes[name] = tuple(found.get_shape())
        self._paths[name] = path

  def fetch(self, name: str, index: Index) -> np.ndarray:
    with _open_safetensors(self._paths[name]) as file:
      return file.get_slice(name)[index]


class _Gguf:
  """A GGUF file; tensors are dequantised to float32."""

  def __init__(self, path: pathlib.Path):
    reader = hub.open_gguf(path)
    if reader.byte_order == 'S':
      raise ValueError(f'{path}: GGUF of the other byte order; convert it.')
    self.fields: dict[str, Any] = {
      name: field.contents()
      for name, field in reader.fields.items()
      if not name.startswith('tokenizer.')  # long, and slow to decode
    }
    self._tensors = {t.name: t for t in reader.tensors}
    for t in reader.tensors:
      if t.tensor_type.name not in GGUF_TYPES:
        raise ValueError(
          f'{path}: {t.name} is {t.tensor_type.name}; legal: '
          f'{", ".join(GGUF_TYPES)}.'
        )
    self.shapes: dict[str, tuple[int, ...]] = {
      t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors
    }

  def fetch(self, name: str, index: Index) -> np.ndarray:
    tensor = self._tensors[name]
    data, kind = np.asarray(tensor.data), tensor.tensor_type
    quantised = data.dtype == np.uint8
    block, size = gguf.GGML_QUANT_SIZES[kind] if quantised else (1, 1)
    *rows, columns = index
    first, last = columns.start // block, -(-columns.stop // block)
    data = data[(*rows, slice(first * size, last * size))]  # whole blocks
    values = gguf.quants.dequantize(np.ascontiguousarray(data), kind)
    return values[
      ..., columns.start - first * block : columns.stop - first * block
    ]

  def fetch_all(self, name: str) -> np.ndarray:
    return self.fetch(name, tuple(slice(0, n) for n in self.shapes[name]))


def _open_safetensors(path: pathlib.Path) -> Any:
  try:
    return safetensors.safe_open(path, framework='numpy')
  except safetensors.SafetensorError as e:
    raise ValueError(f'{path} is no readable safetensors file: {e}.') from e


def _family(attribute: str, architecture: str, path: pathlib.Path) -> str:
  known = {getattr(m, attribute): name for name, m in families().items()}
  if architecture not in known:
    raise ValueError(
      f'{path}: architecture {architecture}; known: '
      f'{", ".join(sorted(known))}. For another one, write a family (see '
      'rl_jax/models/__init__.py) and name its import path.'
    )
  return known[architecture]


def _table(model: base.Model) -> dict[str, Tensor]:
  """Parameter path -> Tensor, exactly one for each parameter."""
  family = resolve.plugin('models', model.config.family)
  table = family.tensors(model.config)
  flat, _ = jax.tree_util.tree_flatten_with_path(model.specs())
  paths = {_joined(key_path) for key_path, _ in flat}
  if paths != set(table):
    raise ValueError(
      f'{family.__name__}.tensors(): lacks {sorted(paths - set(table))}, has '
      f'unknown {sorted(set(table) - paths)}.'
    )
  return table


def _joined(key_path: Any) -> str:
  return '/'.join(str(key.key) for key in key_path)


def _per_layer(
  name: str, spec: base.ParamSpec
) -> tuple[list[str], tuple[int, ...]]:
  """Names of the tensors that make up a parameter, and the shape of each."""
  if spec.axes[0] != 'layers':
    return [name], spec.shape
  names = [name.format(layer=i) for i in range(spec.shape[0])]
  return names, spec.shape[1:]


def _check_names(
  file: _File, model: base.Model, table: Mapping[str, Tensor], in_gguf: bool
) -> None:
  """ValueError unless the file has the model's tensors and no others."""
  expected: dict[str, tuple[int, ...]] = {}
  flat, _ = jax.tree_util.tree_flatten_with_path(model.specs())
  for key_path, spec in flat:
    tensor = table[_joined(key_path)]
    names, shape = _per_layer(tensor.gguf if in_gguf else tensor.hf, spec)
    expected |= dict.fromkeys(names, tensor.file_shape(shape))
  problems = [f'missing {name}' for name in expected if name not in file.shapes]
  head = _tied_head(model, table, in_gguf)
  for name, shape in file.shapes.items():
    if name in expected:
      if shape != expected[name]:
        problems.append(f'{name} has shape {shape}, expected {expected[name]}')
    elif head and name == head[0]:
      if not _equal(file, *head):
        problems.append(
          f'{name} differs from {head[1]}, though the config ties them '
          '(tie_word_embeddings)'
        )
    elif not _BUFFERS.match(name):
      problems.append(f'unexpected {name}')
  if 'rope_freqs.weight' in file.shapes and not _same_rope(file, model.config):
    problems.append(
      'rope_freqs.weight is not what '
      f'rope_scaling={model.config.rope_scaling} gives'
    )
  if problems:
    raise ValueError(
      'The checkpoint does not fit the model:\n  ' + '\n  '.join(problems)
    )


def _tied_head(
  model: base.Model, table: Mapping[str, Tensor], in_gguf: bool
) -> tuple[str, str] | None:
  """Names of a head that would repeat the embedding, and of the embedding."""
  if not model.config.tie_embeddings:
    return None
  untied = dataclasses.replace(model.config, tie_embeddings=False)
  family = resolve.plugin('models', untied.family)
  head, embed = family.tensors(untied)['stem/head'], table['stem/embed']
  return (head.gguf, embed.gguf) if in_gguf else (head.hf, embed.hf)


def _equal(file: _File, a: str, b: str) -> bool:
  if file.shapes[a] != file.shapes.get(b):
    return False
  rows, columns = file.shapes[a]
  parts = (
    (slice(i, min(i + 4096, rows)), slice(0, columns))
    for i in range(0, rows, 4096)
  )
  return all(np.array_equal(file.fetch(a, p), file.fetch(b, p)) for p in parts)


def _same_rope(file: _File, config: base.ModelConfig) -> bool:
  """Whether the file's divisors of the RoPE frequencies are the config's."""
  count = config.head_dim // 2
  if file.shapes['rope_freqs.weight'] != (count,):
    return False
  plain = layers.rope_frequencies(config.head_dim, config.rope_theta, ())
  scaled = layers.rope_frequencies(
    config.head_dim, config.rope_theta, config.rope_scaling
  )
  divisors = file.fetch('rope_freqs.weight', (slice(0, count),))
  return np.allclose(divisors, plain / scaled, rtol=1e-4)


def _load_leaf(
  file: _File,
  tensor: Tensor,
  spec: base.ParamSpec,
  sharding: Any,
  dtype: Any,
  in_gguf: bool,
) -> jax.Array:
  names, shape = _per_layer(tensor.gguf if in_gguf else tensor.hf, spec)
  stacked = spec.axes[0] == 'layers'

  @functools.cache  # replicas ask for the same part
  def part(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    index = tuple(slice(*b) for b in bounds)
    wanted = names[index[0]] if stacked else names
    values = np.empty([b - a for a, b in bounds], dtype)
    for i, name in enumerate(wanted):
      values[i if stacked else ...] = tensor.read(
        functools.partial(file.fetch, name),
        shape,
        index[1:] if stacked else index,
        interleaved=in_gguf and tensor.interleaved_in_gguf,
      )
    return values

  def callback(index: Any) -> np.ndarray:
    bounds = (s.indices(n)[:2] for s, n in zip(index, spec.shape))
    return part(tuple(bounds))

  # `dtype=`: a process without a shard of its own has nothing to infer from.
  return jax.make_array_from_callback(
    spec.shape, sharding, callback, dtype=dtype
  )


def _write_safetensors(
  directory: pathlib.Path,
  model: base.Model,
  params: base.Params,
  dtype: np.dtype,
) -> None:
  """One file, or several of at most MAX_FILE_BYTES with an index."""
  files: list[list[str]] = [[]]
  total = room = 0
  for name, shape in _saved_shapes(model):
    size = math.prod(shape) * dtype.itemsize
    if files[-1] and room < size:
      files.append([])
    room = (room if files[-1] else MAX_FILE_BYTES) - size
    files[-1].append(name)
    total += size
  tensors = _saved_tensors(model, params, dtype)
  weight_map = {}
  for i, names in enumerate(files, 1):
    file = f'model-{i:05}-of-{len(files):05}.safetensors'
    if len(files) == 1:
      file = 'model.safetensors'
    safetensors.numpy.save_file(
      {name: next(tensors) for name in names},
      directory / file,
      metadata={'format': 'pt'},  # what transformers looks for
    )
    weight_map |= dict.fromkeys(names, file)
  if len(files) > 1:
    _write_json(
      directory / 'model.safetensors.index.json',
      {'metadata': {'total_size': total}, 'weight_map': weight_map},
    )


def _saved_shapes(model: base.Model) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Name and shape of each tensor, in the order of `_saved_tensors`."""
  table = _table(model)
  flat, _ = jax.tree_util.tree_flatten_with_path(model.specs())
  for key_path, spec in flat:
    tensor = table[_joined(key_path)]
    names, shape = _per_layer(tensor.hf, spec)
    for name in names:
      yield name, tensor.file_shape(shape)


def _saved_tensors(
  model: base.Model, params: base.Params, dtype: np.dtype
) -> Iterator[np.ndarray]:
  table = _table(model)
  flat, _ = jax.tree_util.tree_flatten_with_path(model.specs())
  leaves = jax.tree.structure(model.specs()).flatten_up_to(params)
  for (key_path, spec), leaf in zip(flat, leaves, strict=True):
    values = np.asarray(leaf)  # the whole leaf, on this host
    for layer in values if spec.axes[0] == 'layers' else [values]:
      moved = table[_joined(key_path)].to_file(layer)
      yield np.ascontiguousarray(moved, dtype)


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2) + '\n', 'utf-8')
