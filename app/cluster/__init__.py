"""The engine that computes on the machines of a Ray cluster; imported only where it is chosen."""
