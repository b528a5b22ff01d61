"""What training minimises: pure torch functions, without engines or files.

The steps from rewards to the loss: `advantages` -> `losses` (token losses) -> `objective` (a weight for each token of
each term; their product and sum, with constant factors).

A new loss is a config class in `luffy.config.terms` and a function in `losses` that is registered for this
class and returns what it clips with its loss; a new estimator is a class in `luffy.config.group` and a function in
`advantages`. Nothing else changes.
"""
