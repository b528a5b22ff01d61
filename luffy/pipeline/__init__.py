"""Caching and restart of stages, without Prefect or torch: identities, chains, plans, processes and the workspace."""
