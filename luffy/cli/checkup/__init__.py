"""What `luffy doctor` looks at; each check returns what it found, with the remedy."""
