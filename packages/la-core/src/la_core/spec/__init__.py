"""What the operators mean and what a legal call is. Knows no backend."""
