"""What a call may say: operation tables, attributes, shapes and the objects on the wire."""
