"""What a person looks at: the terminal, figures, pages."""
