"""The privacy plan: what is sampled, clipped and noised, and for how many rounds."""
