"""`ptf serve`: a model at an address, for people and products; nothing is trained."""
