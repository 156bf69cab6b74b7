"""Data: from sources to batches."""
