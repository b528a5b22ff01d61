"""The commands of `luffy`: one module each, with a function of the same name that returns the exit code.

`luffy.cli.main` registers them. Imports that are slow to load are made inside the functions.
"""
