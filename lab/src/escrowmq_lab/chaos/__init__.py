"""The chaos run: real processes under random faults (kills, pauses, cuts, full disks), and a check of every id."""
