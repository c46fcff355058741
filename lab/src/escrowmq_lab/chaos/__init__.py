"""The chaos run: producers, brokers and consumers as real processes, killed, paused, cut off and filled up at random;
then every id is checked.
"""
