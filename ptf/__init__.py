"""ptf: a post-training framework for large language models."""
