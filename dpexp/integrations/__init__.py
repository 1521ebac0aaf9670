"""Private training in the trainers of other libraries."""
