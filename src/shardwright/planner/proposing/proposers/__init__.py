"""Ways to propose one candidate for each table, one proposal after the other."""
