"""What one call runs on a rank: the handshake, the executor of the plan, and autograd."""
