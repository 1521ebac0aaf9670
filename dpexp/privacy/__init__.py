"""What is released and how: groups, bounds, mechanisms, allocation, sampling, the gradient engine, the callback."""
