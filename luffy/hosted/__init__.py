"""Environments of other packages, which run in a Python interpreter of their own.

`verifiers_process.py` starts that interpreter and talks to it; `verifiers_host.py` and `foreign/` are what it runs.
"""
