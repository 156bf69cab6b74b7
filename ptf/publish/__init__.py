"""The publish stage: its checks, and the card of the model."""
