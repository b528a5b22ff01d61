"""Where training runs: in this process, or on Ray with DeepSpeed ranks and vLLM engines as actors."""
