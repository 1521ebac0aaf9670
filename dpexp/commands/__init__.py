"""Commands, and how a job is put together from its configuration."""
