"""Independent float64 references: the published formulas in plain torch, sharing no code with `luffy.objectives`."""
