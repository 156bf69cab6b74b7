"""Environments that an agent acts in."""
