"""Engines that generate responses."""
