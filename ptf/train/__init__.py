"""Offline training: the trainer and its step, what it reads, what it starts from, and what it exports."""
