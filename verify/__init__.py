"""A verdict on somebody's result: the reference in float64, an error bound for each element, and a report."""
