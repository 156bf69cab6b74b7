"""What an episode may ask of the policy: contexts, answers, and the calls that become training data."""
