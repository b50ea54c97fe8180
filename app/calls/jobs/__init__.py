"""Jobs: requests that are kept in a folder and computed later, whether or not anybody waits for them."""
