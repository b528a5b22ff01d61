"""Environments: what answers the policy between its turns, and how episodes are played."""
