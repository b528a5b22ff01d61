"""Environments of ours for the package verifiers: what is written, and the process that plays them for it.

`task_set_module.py` becomes a module of the task set and runs in the interpreter of verifiers, without luffy.
`environment_service.py` runs in luffy's own, as its child.
"""
