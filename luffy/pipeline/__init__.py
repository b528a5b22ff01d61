"""Stage identity, chains, plans, processes and the workspace: all of caching and restart, without Prefect or torch."""
