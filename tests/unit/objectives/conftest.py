"""Settings of hypothesis: the first call of torch in a process takes longer than its deadline for one example."""

from hypothesis import settings

settings.register_profile("torch", deadline=None)
settings.load_profile("torch")
