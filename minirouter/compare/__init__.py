"""A wing of its own: the systems that the paper compares with (Tables 1 to 4), its tables and its figures."""
