"""The noise, and the secret random numbers that it is drawn from."""
