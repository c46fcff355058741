"""What of the sides is compared: columns, samples, and the sums that an earlier audit remembers."""
