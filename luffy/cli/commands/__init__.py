"""The commands of `luffy`: functions that return the exit code, in a module for each or for those that belong together.

`luffy.cli.main` registers them. Imports that are slow to load are made inside the functions.
"""
