"""The modules of the page, in Node and in a browser."""
