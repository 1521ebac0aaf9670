"""What is trained: data, models and Lightning modules. Ordinary training code that knows nothing of privacy."""
