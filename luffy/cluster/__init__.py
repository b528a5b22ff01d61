"""Where training runs: in this process, or on Ray with DeepSpeed ranks and vLLM engines as actors.

Nothing is imported here: SFT's fingerprint (`luffy.pipeline.chain.fingerprint`) would cover what RL alone needs.
"""
