"""Rollouts: completions become verified groups, groups become packed rows.

`worker.py` drives the generator and the verifier in a thread; `buffer.py`
bounds how far it may run ahead; `packing.py` lays sequences into rows. All of
them get the generator, tokenizer and verifier handed in.
"""
