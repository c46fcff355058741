"""Brokers, clients, network, disks and clocks in one process, one thread, one seed and virtual time;
docs/simulation.md.

It runs the product: its threads become tasks (:mod:`.scheduler`, :mod:`.threads`, :mod:`.machine`), its sockets a
network with faults (:mod:`.network`), its disk one that loses and tears. :mod:`.plan` draws the events from a seed,
:mod:`.run` executes them.
"""
