"""Models answer prompts: what is asked, how, and where the answers are kept."""
