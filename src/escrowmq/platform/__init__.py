"""The seams to the machine: disk, clock and process. Everything above is given these; tests give their twins."""
