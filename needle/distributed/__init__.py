"""Many processes, one training: ranks, what they say to each other, and how they are started."""
