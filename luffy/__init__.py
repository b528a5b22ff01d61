"""luffy: off-policy-guided reinforcement learning of language models as cached, restartable stages."""

__version__ = "0.1.0"
