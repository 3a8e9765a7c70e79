"""Who computes what and sends what to whom: plans, their steps, and the algebra of rows below them."""
