"""Algorithms: what differs between them, and nothing else. One package each; `registry` lists them, `protocol` says what they are."""
