"""Our own search: a proven bound, a start from its relaxation, then moves that help the ranks that
are worst off. It knows blocks, loads and capacities; what a table is stays outside."""
