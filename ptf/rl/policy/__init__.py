"""What an episode may ask of the policy: contexts, responses, and the calls that become training data."""
