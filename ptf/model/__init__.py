"""The decoder: its parts, model families, sharding, losses and checkpoint conversion."""
