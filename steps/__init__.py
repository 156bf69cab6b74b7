"""The stages of a job as plain functions (Job, Artifact) → Artifact, which flows call one by one."""
