"""Grids, comparisons of methods and studies, expanded into experiments; nothing else in `luffy.config` imports it."""
