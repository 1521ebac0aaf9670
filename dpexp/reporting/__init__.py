"""Terminal output, figures, model cards and report pages."""
