"""What training minimises: pure torch, knows no engine and no file.

From a preset's YAML to the tensor line: `advantages` -> `normalisation` (token weights) -> `losses` (token losses)
-> `objective` (their product). A new loss is a config class in `luffy.config.objective` and a function in `losses`.
"""
