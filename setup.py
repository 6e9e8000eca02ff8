"""Packaging. Tool settings live in pyproject.toml."""

import pathlib

from setuptools import find_packages, setup

setup(
  name='rl_jax',
  version='0.1.0',
  description='RL of language models against verifiable rewards, in JAX.',
  long_description=pathlib.Path('README.md').read_text('utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=find_packages(include=['rl_jax', 'rl_jax.*']),
  package_data={'rl_jax': ['py.typed']},
  install_requires=[
    'absl-py',
    'flax>=0.12.8',
    'gguf>=0.19',
    'grain>=0.2.18',
    'huggingface_hub>=1.0',
    'jax>=0.10.2',
    'jinja2>=3.1',
    'ml-collections>=1.1',
    'numpy>=2.0',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8',
    'safetensors>=0.6',
    'tensorboard>=2.20',
    'tokenizers>=0.22',
  ],
  extras_require={
    # Serves by JetStream; brings TensorFlow. For less: generator/jetstream.py.
    'jetstream': ['google-jetstream==0.2.2'],
    'reasoning-gym': ['reasoning-gym==0.1.25'],
    'test': [
      'grpcio>=1.70',
      'hypothesis>=6.100',
      'portpicker>=1.6',
      'prometheus-client>=0.21',
      'pytest>=9.0',
      'pytest-xdist>=3.6',
      'reasoning-gym==0.1.25',
      'shortuuid>=1.0',
      'tiktoken>=0.9',
    ],
    # Compiles for TPUs that are not there; the version that jax asks for.
    'tpu-compile': ['jax[tpu]'],
    'lint': ['pyright==1.1.414', 'ruff==0.17.6'],
  },
)
