"""Terminal output, figures and model cards; which trial of a sweep is best, and which tie with it."""
