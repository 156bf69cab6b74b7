"""Group-relative policy optimisation and its family."""
