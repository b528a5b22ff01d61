"""Teachers, which answer training prompts: requests, usage, and the choice of answers good enough to learn from."""
