"""The commands of `luffy`, a module each with a function of the same name, which returns the exit code.

`luffy.cli.main` registers them. A command imports what loads slowly inside its function.
"""
