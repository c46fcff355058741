"""EscrowMQ: transactional messages. The public names, grouped, nothing else."""
