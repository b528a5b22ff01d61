"""Teachers: who answers training prompts, what that uses, and which answers are good enough to learn from."""
