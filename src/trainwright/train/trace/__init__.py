"""Every collective of a step as the program makes it: which, where, on whose ranks, and beside what."""
