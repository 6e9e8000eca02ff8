"""Reinforcement learning of language models against verifiable rewards.

Importing this package imports nothing heavy; each stage is imported by
`rl_jax.train`, which alone wires them.
"""

__version__ = '0.1.0'
