"""A verifier that does what the completion says, to try the service with."""

import builtins
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys

from rl_jax.types import Verdict


@dataclasses.dataclass(frozen=True)
class Config:
  right: str = 'right'
  lengths: tuple[int, ...] = (1, 2)


def check_answer(answer, config):
  if answer == 'bad':
    raise ValueError('this answer is bad')


def examples(answer, config):
  if answer == 'no wrong example':
    return {'gold': 'right', 'empty': ''}
  kinds = {'gold': 'right', 'empty': '', 'wrong': 'wrong', 'attack': 'x'}
  return kinds | (answer if isinstance(answer, dict) else {})


def verify(completion, answer, config):
  if completion == 'raise':
    raise KeyError('no such thing')
  if completion == 'sys.exit':
    sys.exit(0)
  if completion == 'os._exit':
    os._exit(0)
  if completion == 'segfault':
    ctypes.string_at(0)
  if completion == 'power':
    return 9**9 ** len('nine long') > answer  # does not end, nor look up
  if completion == 'stop':
    os.kill(os.getpid(), signal.SIGSTOP)
  if completion == 'no verdict':
    return 1.0
  if completion == 'print':
    print('x' * (1 << 20), file=sys.stderr)
  if completion == 'spoil':
    builtins.repr = lambda _: 'spoiled'
    raise RuntimeError('spoiled')
  if completion == 'modules':
    return Verdict('pass', 1.0, ' '.join(sys.modules))
  if completion == 'environment':
    return Verdict('pass', 1.0, ' '.join(os.environ))
  if completion == 'settings':
    return Verdict('pass', 1.0, repr(config))
  if completion == 'wait':  # for the fifo `answer` to be written to
    with open(answer) as f:
      return Verdict('pass', 1.0, f.read())
  if completion == 'grandchild':
    fifo, _ = answer
    child = subprocess.Popen(['sleep', '600'])
    with open(fifo, 'w') as f:
      f.write(str(child.pid))
    signal.pause()
  if completion == 'hang once':  # tells its pid, then hangs; not again
    fifo, mark = answer
    if not os.path.exists(mark):
      with open(mark, 'w'), open(fifo, 'w') as f:
        f.write(str(os.getpid()))
      signal.pause()
    return Verdict('pass', 1.0, 'second attempt')
  if completion == 'lenient':
    return Verdict('fail', 0.0, completion, lenient_pass=True)
  right = completion == config.right
  return Verdict('pass' if right else 'fail', float(right), completion)
