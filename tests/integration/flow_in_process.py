"""`luffy ARGUMENT ...` with its stages in this one process, one at a time: `python flow_in_process.py ARGUMENT ...`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["TQDM_DISABLE"] = "1"  # what a stage prints would go to its log
from support.stages import in_process

from luffy.cli.main import main

if __name__ == "__main__":
    with in_process():
        sys.exit(main(sys.argv[1:]))
