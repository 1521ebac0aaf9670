"""The records of each round and of preprocessing: which are sampled, and how they are loaded and put together."""
