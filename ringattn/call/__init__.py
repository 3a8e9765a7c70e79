"""What a call is: its arguments, resolved once, its plan, its comparison among ranks, and its node of the graph."""
