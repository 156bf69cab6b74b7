"""The evaluate stage, what it measures, and the gate before publishing."""
