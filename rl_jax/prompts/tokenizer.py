"""Text to token ids and back, and messages to text by a chat template.

Knows `tokenizers` and jinja2; knows no stream, no model, no torch. A
tokeniser is built from an alphabet ('chars:0123456789+='), from a GGUF file
or from a Hugging Face directory, and can be saved as the latter.

Special tokens written in a text are parsed, since chat templates write them;
so a prompt that spells `<|im_end|>` ends its message, as in Hugging Face.
`strftime_now` is left out of the templates on purpose: a prompt that depends
on the day makes a resumed run differ from an uninterrupted one, and templates
that ask whether it exists then use their own fixed date.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
  AddedToken,
  Regex,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

from rl_jax import hub

_CHARS = 'chars:'
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_ROLES = ('bos', 'eos', 'pad', 'unk')


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A `tokenizers` pipeline with what it leaves unsaid: stops and template.

  Example: load_tokenizer('chars:0123456789+=').encode('1+2=') is [3 12 4 13].
  """

  pipeline: tokenizers.Tokenizer
  special: Mapping[str, str]  # 'bos', 'eos', 'pad', 'unk' -> token
  stop_ids: tuple[int, ...]  # any of them ends a completion
  chat_template: str = ''  # jinja2; empty: the tokeniser has none
  add_bos: bool = False  # whether a sequence opens with the bos token
  # Of a character tokeniser: character -> id. Empty: encodes any text.
  alphabet: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if not self.stop_ids:
      raise ValueError('the tokeniser names no eos token: nothing would stop.')
    if self.add_bos and 'bos' not in self.special:
      raise ValueError('the tokeniser adds a bos token but names none.')

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest id; a model's embedding may be larger."""
    return max(self.pipeline.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def pad_id(self) -> int:
    """Fills arrays. It may equal a stop id: masks come from lengths."""
    if 'pad' in self.special:
      return _id(self.pipeline, self.special['pad'])
    return self.stop_ids[0]

  def encode(self, text: str, *, continues: bool = False) -> np.ndarray:
    """[T] int32. No special token is added, but bos where `add_bos`.

    Args:
      text: a rendered chat template or raw text; special tokens are parsed.
      continues: the text goes on after other tokens, so bos is not added.
    """
    return self.encode_batch([text], continues=continues)[0]

  def encode_batch(
    self, texts: Sequence[str], *, continues: bool = False
  ) -> list[np.ndarray]:
    """As `encode`, for many texts at once."""
    if self.alphabet:
      return [self._spell(text) for text in texts]
    rows = [
      e.ids
      for e in self.pipeline.encode_batch_fast(texts, add_special_tokens=False)
    ]
    if self.add_bos and not continues:
      bos = _id(self.pipeline, self.special['bos'])
      rows = [ids if ids[:1] == [bos] else [bos, *ids] for ids in rows]
    return [np.array(ids, np.int32) for ids in rows]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """The text of `ids`, special tokens as they are spelled.

    Nothing is left out: what is verified is all that was drawn.
    """
    return self.pipeline.decode(
      [int(i) for i in ids], skip_special_tokens=False
    )

  def render(self, messages: list[dict[str, Any]]) -> str:
    """`messages` by the chat template, up to where the model is to answer."""
    if not self.chat_template:
      raise ValueError(
        'the tokeniser has no chat template: set chat=False, or name an '
        'instruction-tuned model.'
      )
    names = {f'{role}_token': token for role, token in self.special.items()}
    try:
      return _compiled(self.chat_template).render(
        messages=messages, add_generation_prompt=True, **names
      )
    except jinja2.TemplateError as e:
      raise ValueError(f'the chat template refuses {messages!r}: {e}') from e

  def save(self, directory: str | pathlib.Path) -> None:
    """Writes files that `load_tokenizer` and `transformers` open."""
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    self.pipeline.save(str(path / 'tokenizer.json'))
    config = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False,
      'add_bos_token': self.add_bos,
      **{f'{role}_token': token for role, token in self.special.items()},
    }
    if self.chat_template:
      config['chat_template'] = self.chat_template
    _write_json(path / 'tokenizer_config.json', config)
    _write_json(
      path / 'generation_config.json', {'eos_token_id': list(self.stop_ids)}
    )

  def _spell(self, text: str) -> np.ndarray:
    """As the pipeline does, but many times faster on short texts."""
    try:
      return np.array([self.alphabet[char] for char in text], np.int32)
    except KeyError as e:
      raise ValueError(
        f'{e.args[0]!r} in {text!r} is not in the alphabet '
        f'{"".join(self.alphabet)!r}; add it to the tokeniser source '
        f"'{_CHARS}...'."
      ) from e


def load_tokenizer(source: str) -> Tokenizer:
  """The tokeniser that `source` names.

  Args:
    source: 'chars:' and an alphabet (ids: 0 pad, 1 eos, then the characters
      in order), or whatever `hub.locate` takes.
  """
  if source.startswith(_CHARS):
    return _from_chars(source.removeprefix(_CHARS))
  path = hub.locate(source)
  return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _id(pipeline: tokenizers.Tokenizer, token: str) -> int:
  i = pipeline.token_to_id(token)
  if i is None:
    raise ValueError(f'the special token {token!r} is not in the vocabulary.')
  return i


def _from_chars(chars: str) -> Tokenizer:
  if not chars or len(set(chars)) != len(chars):
    raise ValueError(
      f"'{_CHARS}{chars}': must list at least one character, each once."
    )
  vocab = {token: i for i, token in enumerate(['<pad>', '<eos>', *chars])}
  pipeline = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token='<pad>'))
  pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
  pipeline.decoder = decoders.Fuse()
  pipeline.add_special_tokens(['<pad>', '<eos>'])
  return Tokenizer(
    pipeline,
    {'pad': '<pad>', 'eos': '<eos>'},
    (1,),
    alphabet=_alphabet(pipeline),
  )


# GGUF ------------------------------------------------------------------------

# How many digits make a token is all in which llama 3 and qwen 2 differ.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def _bytes_after(first: Any) -> Any:
  """`first` cuts the text, then bytes become the letters of the vocabulary."""
  return pre_tokenizers.Sequence(
    [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
  )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
  'gpt-2': lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
  'smollm': lambda: pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  ),
  'llama-bpe': lambda: _bytes_after(
    pre_tokenizers.Split(Regex(_WORDS % '{1,3}'), 'isolated')
  ),
  'qwen2': lambda: _bytes_after(
    pre_tokenizers.Split(Regex(_WORDS % ''), 'isolated')
  ),
}


def _from_gguf(path: pathlib.Path) -> Tokenizer:
  fields = hub.open_gguf(path).fields

  def get(key: str, default: Any = None) -> Any:
    field = fields.get(f'tokenizer.{key}')
    return default if field is None else field.contents()

  tokens = get('ggml.tokens', [])
  pipeline = _bpe(path, get, tokens)
  special = {
    role: tokens[i]
    for role, key in zip(_ROLES, ('bos', 'eos', 'padding', 'unknown'))
    if (i := get(f'ggml.{key}_token_id')) is not None
  }
  stops = [get(f'ggml.{key}_token_id') for key in ('eos', 'eot', 'eom')]
  # The format's default where a file says nothing: llama 3 opens with bos.
  add_bos = get('ggml.add_bos_token', get('ggml.pre') == 'llama-bpe')
  if add_bos and 'bos' in special:
    pipeline.post_processor = _bos_processor(pipeline, special['bos'])
  return Tokenizer(
    pipeline,
    special,
    tuple(dict.fromkeys(i for i in stops if i is not None)),
    chat_template=get('chat_template', ''),
    add_bos=bool(add_bos),
  )


def _bpe(
  path: pathlib.Path, get: Callable[..., Any], tokens: list[str]
) -> tokenizers.Tokenizer:
  """Byte-level BPE from GGUF metadata."""
  kind, pre = get('ggml.model'), get('ggml.pre')
  if kind != 'gpt2' or pre not in _PRE_TOKENIZERS:
    raise ValueError(
      f'{path}: tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={pre!r}. '
      f"Legal: model 'gpt2' with pre one of {', '.join(_PRE_TOKENIZERS)}; use "
      "the model's Hugging Face directory instead."
    )
  merges = [tuple(merge.split(' ')) for merge in get('ggml.merges', [])]
  pipeline = tokenizers.Tokenizer(
    models.BPE(
      {token: i for i, token in enumerate(tokens)},
      merges,
      ignore_merges=pre == 'llama-bpe',  # a whole word in the vocabulary wins
    )
  )
  if pre == 'qwen2':
    pipeline.normalizer = normalizers.NFC()
  pipeline.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  pipeline.decoder = decoders.ByteLevel()
  types = get('ggml.token_type', [])
  for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    pipeline.add_tokens(
      [
        AddedToken(token, normalized=False, special=special)
        for token, type_ in zip(tokens, types)
        if type_ == kind
      ]
    )
  return pipeline


def _bos_processor(pipeline: tokenizers.Tokenizer, bos: str) -> Any:
  """So that a saved copy opens with bos in other libraries too."""
  return processors.TemplateProcessing(
    single=f'{bos} $A',
    pair=f'{bos} $A {bos} $B',
    special_tokens=[(bos, _id(pipeline, bos))],
  )


# Hugging Face directory ------------------------------------------------------


def _from_directory(path: pathlib.Path) -> Tokenizer:
  if not (path / 'tokenizer.json').is_file():
    raise ValueError(
      f'{path}: has no tokenizer.json; save it with a fast tokeniser.'
    )
  pipeline = tokenizers.Tokenizer.from_file(str(path / 'tokenizer.json'))
  pipeline.no_truncation()
  pipeline.no_padding()
  config = {
    **_read_json(path / 'special_tokens_map.json'),
    **_read_json(path / 'tokenizer_config.json'),
  }
  special = {
    role: token['content'] if isinstance(token, dict) else token
    for role in _ROLES
    if (token := config.get(f'{role}_token')) is not None
  }
  return Tokenizer(
    pipeline,
    special,
    _stop_ids(pipeline, special, path),
    chat_template=_template(path, config),
    add_bos=_adds_bos(pipeline, special, config),
    alphabet=_alphabet(pipeline),
  )


def _alphabet(pipeline: tokenizers.Tokenizer) -> dict[str, int]:
  """Characters and ids of a character tokeniser; empty for any other."""
  if not isinstance(pipeline.model, models.WordLevel):
    return {}
  vocab = sorted(pipeline.get_vocab().items(), key=lambda item: item[1])
  return {token: i for token, i in vocab if len(token) == 1}


def _stop_ids(
  pipeline: tokenizers.Tokenizer, special: Mapping[str, str], path: pathlib.Path
) -> tuple[int, ...]:
  """The eos token, then those of the generation config."""
  stops = _read_json(path / 'generation_config.json').get('eos_token_id') or []
  stops = stops if isinstance(stops, list) else [stops]
  eos = [_id(pipeline, special['eos'])] if 'eos' in special else []
  return tuple(dict.fromkeys([*eos, *stops]))


def _template(path: pathlib.Path, config: Mapping[str, Any]) -> str:
  file = path / 'chat_template.jinja'
  if file.is_file():
    return file.read_text(encoding='utf-8')
  template = config.get('chat_template') or ''
  if isinstance(template, list):  # several, by name
    template = {t['name']: t['template'] for t in template}.get('default', '')
  return template


def _adds_bos(
  pipeline: tokenizers.Tokenizer,
  special: Mapping[str, str],
  config: Mapping[str, Any],
) -> bool:
  """What the config says, else what the pipeline itself does."""
  if config.get('add_bos_token') is not None:
    return config['add_bos_token']
  return special.get('bos') in pipeline.encode('').tokens


# Chat templates --------------------------------------------------------------


class _Generation(Extension):
  """`{% generation %}` marks the assistant's text for training; here it is
  only text: what is trained comes from the tokens that were sampled."""

  tags = {'generation'}  # noqa: RUF012  as jinja2 declares it

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, 'jinja2.ext.loopcontrols'],
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _raise_exception
  return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
  """Plain JSON: jinja2's own filter escapes for HTML."""
  return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """{} where a directory lacks an optional file."""
  if not path.is_file():
    return {}
  return json.loads(path.read_text(encoding='utf-8'))


def _write_json(path: pathlib.Path, value: Any) -> None:
  path.write_text(
    json.dumps(value, ensure_ascii=False, indent=2) + '\n', encoding='utf-8'
  )
