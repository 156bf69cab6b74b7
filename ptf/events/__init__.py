"""Catalogues of items and histories of users: preparing data, serializing histories, semantic ids, and ranking."""
