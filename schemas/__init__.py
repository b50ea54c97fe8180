"""The operations and their calls: operation tables, attributes, shapes, and objects on the wire."""
