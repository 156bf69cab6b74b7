"""The evaluate stage, what it measures, the gate before publishing, and the replay of a run."""
