"""The checks of `luffy doctor`; each returns what it found, with the remedy."""
