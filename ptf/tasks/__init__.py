"""Tasks of the shipped configs: their data, rewards and environments."""
