"""Where training runs: in this process, or on Ray with DeepSpeed ranks and vLLM engines as actors.

Nothing is imported here: otherwise SFT's fingerprint (`luffy.pipeline.chain.fingerprint`) would cover code that only RL
needs.
"""
