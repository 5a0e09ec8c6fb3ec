"""One set of weights for the replicas of a Process on one GPU."""
