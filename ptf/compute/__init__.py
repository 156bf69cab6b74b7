"""Where and how training runs: processes and clusters, checkpoints, leases, heartbeats and tracking."""
