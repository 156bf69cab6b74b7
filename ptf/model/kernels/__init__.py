"""What computes on a device: attention, products of matrices, norms, gates, rotations and the parts of losses."""
