"""Engines that generate answers."""
