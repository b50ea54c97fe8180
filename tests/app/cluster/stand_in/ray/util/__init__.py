"""Nothing but the stand-in of a module in it."""
