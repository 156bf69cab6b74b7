"""Recommendation: catalogues of items and histories of users.

Preparing data, serializing histories, semantic ids, and ranking.
"""
