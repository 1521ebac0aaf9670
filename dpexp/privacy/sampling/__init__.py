"""The records of each round: which are sampled, and how they are loaded."""
