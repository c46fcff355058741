"""The parts of the sides that are compared: columns, samples, and the sums that an earlier audit remembers."""
