"""Reinforcement learning: a controller over groups of processes that train, generate and score."""
