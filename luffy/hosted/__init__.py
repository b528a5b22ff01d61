"""Environments of other packages, which run in a Python interpreter of their own.

`verifiers_host.py` is run by that interpreter; `verifiers_process.py` starts it and talks to it.
"""
