"""What is trained: data, models and Lightning modules. It neither samples, clips nor adds noise."""
