"""Bridges to other libraries: their models in as jobs, our plans out as theirs."""
