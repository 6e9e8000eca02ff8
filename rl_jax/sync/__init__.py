"""Sync: carries parameters from the training mesh to the generators.

`single_process.py` serves `mesh.mode` colocated and split, where one process
sees all devices. A mode that crosses processes adds a module with the same
`Sync` class: `send(params, policy_version) -> Sent`.
"""
