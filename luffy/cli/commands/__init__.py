"""The commands of `python -m luffy`, a module each: `HELP`, `add` (its arguments) and `run` (returns the exit code).

`luffy.cli.main` has the table. What loads slowly is imported where a command needs it.
"""
