"""Looking at a publisher from outside: is everything set up, is everything published."""
