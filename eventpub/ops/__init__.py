"""Operating a publisher from outside: setup checks, status, comparison, repair."""
