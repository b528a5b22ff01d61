"""What several runs say together: sweeps and the leaderboard. Not part of the keys of stages that evaluate."""
