"""How weights travel from the policy to the engines, and how that is verified."""
