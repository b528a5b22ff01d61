"""Results of many runs: a grid, a comparison of methods, a study."""
