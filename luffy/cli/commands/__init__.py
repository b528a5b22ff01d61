"""The commands of `luffy`: functions that return the exit code, in a module for each or for those that belong together.

`luffy.cli.main` imports the one that is asked for.
"""
