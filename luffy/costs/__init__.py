"""What a run costs, measured by a few steps of its stages."""
