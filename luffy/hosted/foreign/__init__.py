"""Code that runs in the interpreter with verifiers; it imports only the standard library, verifiers and itself.

`classic_environments.py` is for versions that have `load_environment` (0.1.9 to 0.3.1), `task_sets.py` for 0.4.0.
"""
