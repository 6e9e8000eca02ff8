"""The learner: packed batches -> a gradient step, on the training mesh.

Never sees a string. `logprobs.py` holds the one place where predictions and
targets are shifted by a token; `learner.py` the update; `optimizer.py` optax;
`sft.py` supervised fine-tuning by the same update.
"""
