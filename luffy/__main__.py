"""`python -m luffy COMMAND ...`, for where the console script `luffy` is not on the path."""

from luffy.cli.main import script

if __name__ == "__main__":
    script()
