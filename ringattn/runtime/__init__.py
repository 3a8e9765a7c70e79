"""What one call runs on a rank: the ring, the program of a rank, and its buffers."""
