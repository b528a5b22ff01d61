"""`python -m luffy plan CONFIG [key.path=value ...]` and `python -m luffy runs`."""

import sys

from luffy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
