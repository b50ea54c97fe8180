"""`convgrad check`: try a whole kernel on problems of all kinds, and judge its results with the service.

`cases` draws the cases from a seed, for the service too: `draw`, `Case` and, in `problems`, `Takes` and `Problem`.
"""
