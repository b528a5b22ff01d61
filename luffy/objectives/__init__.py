"""What training minimises: pure torch functions, without engines or files.

The steps from rewards to the loss: `advantages` (or `gae`) -> `normalisation` (a weight for each token of each term)
-> `losses` (token losses) and `modifiers` (constant factors on them) -> `objective` (their product and sum).

A new loss is a config class in `luffy.config.terms` and a function in `losses` that is registered for this
class (and, when it weighs tokens by their advantage, what counts as clipped in `inspection`); a new estimator is a
class in `luffy.config.group` and a function in `advantages`. Nothing else changes.
"""
