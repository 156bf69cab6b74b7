"""Previews: episodes of an online job that are played and shown, without training."""
