"""Many runs in one command: comparisons of methods with tuned arms, grids, and studies.

Each is expanded here into experiments; nothing else in `luffy.config` imports this package.
"""
