"""JetStream's own orchestrator and gRPC server around our engine.

In a process of its own: JetStream sets up the root logger, and kills the
process it is in when one of its threads fails.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

SERVED = """
import json
import logging
from concurrent import futures

import grpc
import jax
import portpicker

jax.config.update('jax_platforms', 'cpu')
from rl_jax.generator import jetstream  # before JetStream's own modules
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from rl_jax.prompts.tokenizer import load_tokenizer
from rl_jax.types import Prompt, Request, SamplingParams
from tests.generator.conftest import Lab

lab = Lab()
engine = lab.engine(prefill_tokens=12, steps_per_dispatch=4)
params = lab.weights(engine, 0)
letters = ''.join(chr(c) for c in range(33, 33 + 62))  # 64 tokens, as the model
tokenizer = load_tokenizer('chars:' + letters)
sampling = SamplingParams(temperature=0.0, max_tokens=1, stop_ids=(1,))

texts = [letters[i : i + 3 + i % 5] for i in range(0, 40, 5)]
wanted = []
for i, text in enumerate(texts):
  prompt = Prompt(i, '', text, tokenizer.encode(text), None)
  request = Request(prompt, 1, SamplingParams(10, 0.0, stop_ids=(1,)), 0)
  (done,) = lab.run(engine, [request], scheduler=lab.scheduler(engine)).values()
  wanted.append([t for t in done.tokens.tolist() if t != 1])

adapter = jetstream.JetStreamEngine(engine, params, tokenizer, sampling)
port = portpicker.pick_unused_port()
server = jetstream.serve(adapter, port)
channel = grpc.insecure_channel(f'localhost:{port}')
stub = jetstream_pb2_grpc.OrchestratorStub(channel)
DecodeRequest = jetstream_pb2.DecodeRequest

def ask(i):
  if i % 2:
    content = {'text_content': DecodeRequest.TextContent(text=texts[i])}
  else:
    ids = tokenizer.encode(texts[i]).tolist()
    content = {'token_content': DecodeRequest.TokenContent(token_ids=ids)}
  request = DecodeRequest(max_tokens=10, **content)
  got, text = [], ''
  for reply in stub.Decode(request, timeout=60):
    for sample in reply.stream_content.samples:
      got += sample.token_ids
      text += sample.text
  return got, text

live = stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
for _ in range(2):  # slots are filled again
  with futures.ThreadPoolExecutor(8) as pool:
    replies = list(pool.map(ask, range(8)))
server.stop()

records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger('rl_jax').addHandler(handler)
encode = adapter.build_tokenizer(None).encode
cut = [encode('ABCDEFGH'[:n], max_prefill_length=6) for n in (6, 8)]
print('RESULT' + json.dumps({
  'live': live,
  'cut': [tokenizer.decode(ids[:length]) for ids, length in cut],
  'told': records,
  'wanted': wanted,
  'got': [r[0] for r in replies],
  'texts': [r[1] for r in replies],
  'decoded': [tokenizer.decode(r[0]) for r in replies],
}))
"""


@pytest.mark.slow
def test_served_by_jetstream():
  if importlib.util.find_spec('jetstream') is None:
    message = 'pip install --no-deps google-jetstream==0.2.2'
    if os.environ.get('CI'):
      pytest.fail(message)
    pytest.skip(message)
  done = subprocess.run(
    [sys.executable, '-c', SERVED],
    capture_output=True,
    text=True,
    timeout=240,
    cwd=ROOT,
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  (line,) = [x for x in done.stdout.splitlines() if x.startswith('RESULT')]
  result = json.loads(line.removeprefix('RESULT'))
  assert result['live']
  assert result['cut'] == ['ABCDEF', 'CDEFGH']
  assert result['told'] == [
    'a prompt of 8 tokens loses its first 2: 6 is the most.'
  ]
  for got, wanted, text, decoded in zip(
    result['got'],
    result['wanted'],
    result['texts'],
    result['decoded'],
    strict=True,
  ):
    # The overshoot: JetStream ends a request at the end of a dispatch.
    assert len(wanted) <= len(got) < len(wanted) + 4 + 1
    assert got[: len(wanted)] == wanted
    assert text in ('', decoded)  # ids alone where ids were sent
  assert any(result['texts'])
