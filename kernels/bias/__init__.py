"""BiasAdd and BiasAddBackward: what runs at the speed of memory, in one pass over the data."""
