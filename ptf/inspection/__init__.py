"""Reports of a job's data as training will see it: as values, as text and as a page."""
