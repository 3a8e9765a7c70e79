"""One call on a rank: the handshake, the executor of its plan, and autograd."""
