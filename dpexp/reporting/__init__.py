"""Terminal output, figures and model cards."""
