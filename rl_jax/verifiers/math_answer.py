r"""Is the completion's number the gold number? Exactly, or not at all.

Knows numbers: signed integers, decimals, fractions (`1/2`, `\frac12`, mixed
`2\frac{2}{3}` and `2 2/3`), thousands separators, money, percent, scientific
notation, a unit behind the number, `x=11`. Values are `int` or `Fraction`,
never float, and no text is ever evaluated: `13=12`, `100 \bmod 12`, `5!` or
`9^{9^9}` is not a number and so a wrong answer. Knows no sets, intervals,
matrices or expressions: a gold answer of such a kind is refused at load.

What counts as the answer (`extract`); in every mode it must be one number as
a whole, so `41,42,43` and `41 or 42` are wrong:

  auto         the first of the following that the completion has, whether or
               not a number stands there: the last top-level box, the last
               `####`, a completion that is a number, the last 'answer is'
  boxed        the last top-level `\boxed{...}` or `\fbox{...}`; `\boxed 5` too
  hash         the rest of the line behind the last `####`
  whole        the whole completion
  last_number  the last number anywhere; lenient, for untrained base models

Of several boxes the last counts, of nested ones the outer. A box that nobody
closes reaches to the end of the completion.

Units: a unit is compared only where both sides have one. Percent: a gold
answer of 50% accepts 50%, 50 and 1/2; a gold answer of 50 refuses 50%.
Separators: `1,000`, `1{,}000`, `1,\!000`, `1\,000` and `1 000` are 1000;
`32, 349` is a pair, `12,34` and `1.000,99` are nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from fractions import Fraction

from rl_jax.types import Verdict

EXTRACT = ('auto', 'boxed', 'hash', 'whole', 'last_number')

# Bounds that hold before anything is computed: no number that passes them has
# more than a few hundred digits.
MAX_NUMBER_CHARS = 200
MAX_EXPONENT = 300


@dataclasses.dataclass(frozen=True)
class Config:
  extract: str = 'auto'  # where the answer stands, see above
  max_chars: int = 4096  # of a longer completion only this end is searched

  def __post_init__(self):
    if self.extract not in EXTRACT:
      raise ValueError(
        f'verifier.extract={self.extract!r}: must be one of {EXTRACT}.'
      )
    if self.max_chars < 1:
      raise ValueError(
        f'verifier.max_chars={self.max_chars}: must be >= 1, as 4096.'
      )


def check_answer(answer: str | int, config: Config) -> None:
  """ValueError unless the gold answer holds exactly one number."""
  del config  # what a gold answer may be is the same in every mode
  _gold(answer)


def verify(completion: str, answer: str | int, config: Config) -> Verdict:
  """Whether the completion's number equals the gold one.

  Raises:
    ValueError: the gold answer is no number; a completion never raises.
  """
  _, gold = _gold(answer)
  tail = completion[-config.max_chars :].translate(_MINUS)
  text = (_extract(tail, config.extract) or '').strip()
  if _is(text, gold):
    return Verdict('pass', 1.0, f'exact: {text}')
  reason = f'wrong: {text[:80]}' if text else 'no answer found'
  last = _extract(tail, 'last_number') or ''
  return Verdict('fail', 0.0, reason, lenient_pass=_is(last, gold))


def examples(answer: str | int, config: Config) -> dict[str, str]:
  """Completions that prove the verifier on this row."""
  text, gold = _gold(answer)
  wrap = {
    'hash': '#### {}',
    'whole': '{}',
    'last_number': '{}',
  }.get(config.extract, r'\boxed{{{}}}').format
  wrong = f'{gold.value + 1}{"%" if gold.unit == "%" else ""}'
  return {
    'gold': wrap(text),
    'empty': '',
    'wrong': wrap(wrong),
    'attack: many answers': f'{wrap(text)}\n{wrap(wrong)}',
    'attack: list': wrap(f'{text}, {wrong}'),
    'attack: either': wrap(f'{text} or {wrong}'),
    'attack: restated': wrap(f'{text}+{wrong}-{wrong}'),
    'attack: never ends': wrap(f'9**9**{wrong}'),
  }


@dataclasses.dataclass(frozen=True)
class Number:
  """An exact value and the unit behind it: '' if none, '%' for percent."""

  value: int | Fraction
  unit: str = ''


# All patterns are ASCII: `\d` is 0-9 and nothing else.
_PLAIN = re.compile(r'-?\d{1,40}', re.ASCII)
_GROUPED = '|'.join(
  rf'[1-9]\d{{0,2}}(?:{separator}\d{{3}})+'
  for separator in (',', r'\{,\}', r',\\!', r'\\,', r'\\?\ ')
)
_DECIMAL = rf'(?:(?:{_GROUPED}|\d+)(?:\.\d+)?|\.\d+)'
_TEX_ARGUMENT = rf'(?:\{{\s*([-+]?{_DECIMAL})\s*\}}|(\d))'
_POWER = r'[-+]?\d{1,9}'
_TEX_FRACTION = (
  rf'(?:(\d+)\s*)?\\[cdt]?frac\s*{_TEX_ARGUMENT}\s*{_TEX_ARGUMENT}'
)
_SLASHED = rf'(?:(\d+)\s+(?=[1-9]))?({_DECIMAL})\s*/\s*({_DECIMAL})'
_SCIENTIFIC = (
  rf'({_DECIMAL})(?:[eE]({_POWER})|\s*(?:\\times|\\cdot|[x*×])\s*'
  rf'10\s*\^\s*(?:\{{\s*({_POWER})\s*\}}|({_POWER})))?'
)
_SIGN = re.compile(r'\\?\$\s*[-+]\s*|[-+]?\s*(?:\\?\$)?\s*', re.ASCII)
_FORMS = tuple(
  re.compile(form, re.ASCII) for form in (_TEX_FRACTION, _SLASHED, _SCIENTIFIC)
)
_ANYWHERE = re.compile(
  rf'(?:(?<![\w.)}}])[-+])?(?:\\?\$)?'
  rf'(?:{_TEX_FRACTION}|{_SLASHED}|{_SCIENTIFIC})(?:\s*\\?%)?',
  re.ASCII,
)
_TEXT_UNIT = re.compile(
  r'(?:\s|~|\\[ ,;:])*\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}(\^[23])?',
  re.ASCII,
)
_WORDS = re.compile(
  r'[A-Za-z]+(?:\^[23])?(?:(?: | ?/ ?)[A-Za-z]+(?:\^[23])?){0,3}'
)
# Words behind a number that change its value, or join it to another one.
_NOT_UNIT = re.compile(
  r'\b(?:and|or|not|but|to|of|mod|plus|minus|times|over|e|i|pi|sqrt|log|ln|sin'
  r'|cos|tan|squared|cubed|factorial|half|halves|divided|multiplied|negative'
  r'|zero|oh|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve'
  r'|[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|bn|mn'
  r'|(?:lakh|crore|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh'
  r'|twelfth|[a-z]+teenth|[a-z]+tieth|hundredth|thousandth|millionth'
  r'|dozen|hundred|thousand|million|billion|trillion)s?)\b',
  re.ASCII | re.IGNORECASE,
)
# Units that may follow without a space; other letters there are variables.
_ATTACHED = re.compile(
  r'[mck]m|[mk]g|[mc]l|kWh?|[kMG]B|Hz|min|hrs?|sec|mph|ft|lb|oz|yd', re.ASCII
)
_MINUS = {ord('\u2212'): '-', ord('\u2013'): '-'}  # minus sign, en dash
_TEX_SPACE = r'(?:\s|~|\\[ ,;:!]|\\q?quad\b|\\displaystyle\b)*'
_PADDED = re.compile(rf'{_TEX_SPACE}(.*?){_TEX_SPACE}', re.DOTALL)
_WRAPPED = re.compile(
  r'\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|\{(.*)\}'
  r'|\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{(.*)\}',
  re.DOTALL,
)
_ASSIGNED = re.compile(
  r'[A-Za-z](?:_\{?[A-Za-z0-9]\}?)?\s*=([^=]+)|([^=]+)=\s*[A-Za-z]', re.ASCII
)
_BOXES = re.compile(
  r'(?P<box>\\(?:boxed|fbox)\s*\{)'
  r'|\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<bare>[^\s${}\\]+)'
  r'|\\.|(?P<brace>[{}])',
  re.ASCII | re.DOTALL,
)
_ANSWER_IS = re.compile(r'answer\s+is\b:?\s*', re.ASCII | re.IGNORECASE)
_SENTENCE_END = re.compile(r'\.\s|\n')


def parse(text: str) -> Number | None:
  """The number that `text` is as a whole, or None; never raises."""
  if len(text) > MAX_NUMBER_CHARS:
    return None
  if _PLAIN.fullmatch(text):
    return Number(int(text))
  text = _unwrapped(text.translate(_MINUS))
  if assigned := _ASSIGNED.fullmatch(text):
    text = _unwrapped(assigned[1] or assigned[2])
  sign = _SIGN.match(text)
  assert sign is not None  # it matches the empty string too
  for form in _FORMS:
    match = form.match(text, sign.end())
    unit = match and _unit(text[match.end() :], money='$' in sign[0])
    if match is None or unit is None:
      continue
    value = _value(form, match)
    if value is None:
      return None
    return Number(-value if '-' in sign[0] else value, unit)
  return None


def _unwrapped(text: str) -> str:
  """`text` without the markup around the whole of it and a last period."""
  while True:
    padded = _PADDED.fullmatch(text.strip().removesuffix('.'))
    assert padded is not None  # it matches any text
    text = padded[1]
    match = _WRAPPED.fullmatch(text)
    if match is None:
      return text
    text = match[match.lastindex or 0]


def _value(form: re.Pattern, match: re.Match[str]) -> int | Fraction | None:
  """The exact value of a match of one of _FORMS; None if there is none."""
  groups = [group for group in match.groups() if group is not None]
  if form is _FORMS[-1]:
    value, power = _decimal(groups[0]), int(groups[1] if groups[1:] else 0)
    if abs(power) > MAX_EXPONENT:
      return None
    return value * Fraction(10) ** power if power else value
  whole = _decimal(groups.pop(0)) if match[1] is not None else 0
  top, bottom = map(_decimal, groups)
  if bottom == 0 or (match[1] is not None and (top < 0 or bottom < 0)):
    return None
  return whole + Fraction(top) / bottom


def _decimal(text: str) -> int | Fraction:
  digits, _, decimals = re.sub(r'[^-0-9.]', '', text).partition('.')
  if not decimals:
    return int(digits)
  return Fraction(int(digits + decimals), 10 ** len(decimals))


def _unit(text: str, money: bool) -> str | None:
  """The unit that all of `text` is, '' for none; None if it is no unit."""
  text = re.sub(r'\^\{([23])\}', r'^\1', text)
  bare = text.strip()
  if match := _TEXT_UNIT.fullmatch(text):
    words = match[1].strip() + (match[2] or '')
  elif bare in ('%', r'\%'):
    words = 'percent'
  elif bare in ('°', r'^\circ', r'^{\circ}'):
    words = 'degree'
  elif bare and (
    not _ATTACHED.fullmatch(bare) if text == bare else not bare[1:2].isalpha()
  ):
    return None  # 10x and 10 x are products, 10 cm is not
  else:
    words = bare
  if words and not _WORDS.fullmatch(words):
    return None
  if _NOT_UNIT.search(words):
    return None
  unit = '%' if words == 'percent' else words.replace(' ', '')
  if len(unit) > 2:
    unit = unit.removesuffix('s')
  if not money:
    return unit
  return None if unit == '%' else 'dollar' + unit.removeprefix('dollar')


def _is(text: str, gold: Number) -> bool:
  number = parse(text)
  return number is not None and _equal(number, gold)


def _equal(number: Number, gold: Number) -> bool:
  if gold.unit == '%' and not number.unit:
    return number.value in (gold.value, Fraction(gold.value) / 100)
  if number.unit == '%' and gold.unit != '%':
    return False
  if number.unit and gold.unit and number.unit != gold.unit:
    return False
  return number.value == gold.value


def _gold(answer: str | int) -> tuple[str, Number]:
  if type(answer) not in (str, int):
    raise ValueError(
      f'{answer=!r}: must be a string or an int; write 0.5 as the string '
      "'0.5', since a float is not exact."
    )
  return _gold_of_text(str(answer))


@functools.lru_cache(maxsize=4096)  # a group shares its gold answer
def _gold_of_text(answer: str) -> tuple[str, Number]:
  text = _boxed(answer)
  if text is None:
    text = answer.rpartition('####')[2]
  text = text.strip()
  number = parse(text)
  if number is None:
    raise ValueError(
      f'answer={answer[-MAX_NUMBER_CHARS:]!r}: must be one number, or text '
      r"with one behind its last '####' or in its last \boxed{}; leave the row "
      'out, or use a verifier that knows more than numbers.'
    )
  return text, number


def _extract(text: str, mode: str) -> str | None:
  """Where `mode` says that the answer stands; None if the text lacks it."""
  if mode == 'auto':
    if (content := _boxed(text)) is not None:
      return content
    if (content := _hashed(text)) is not None:
      return content
    return text if parse(text.strip()) is not None else _stated(text)
  if mode == 'boxed':
    return _boxed(text)
  if mode == 'hash':
    return _hashed(text)
  if mode == 'whole':
    return text
  numbers = [match[0] for match in _ANYWHERE.finditer(text)]
  return numbers[-1] if numbers else None


def _boxed(text: str) -> str | None:
  """What stands in the last top-level box."""
  if '\\boxed' not in text and '\\fbox' not in text:
    return None
  content, depth, start = None, 0, 0
  for match in _BOXES.finditer(text):
    if match.lastgroup == 'box':
      start = start if depth else match.end()
      depth += 1
    elif match.lastgroup == 'bare' and not depth:
      content = match['bare']
    elif match.lastgroup == 'brace' and depth:
      depth += 1 if match[0] == '{' else -1
      content = content if depth else text[start : match.start()]
  return text[start:] if depth else content


def _hashed(text: str) -> str | None:
  _, mark, rest = text.rpartition('####')
  return rest.strip().partition('\n')[0] if mark else None


def _stated(text: str) -> str | None:
  """The rest of the sentence behind the last 'answer is'."""
  end = max((m.end() for m in _ANSWER_IS.finditer(text)), default=None)
  return None if end is None else _SENTENCE_END.split(text[end:], 1)[0]
