"""The stage programs. They form process groups of their own, also where a person starts one below a launcher."""

import os

from luffy.pipeline.inherited_environment import drop_foreign

drop_foreign(os.environ)  # here, since a program imports its libraries, which read the environment, before it runs
