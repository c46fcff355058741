"""The kinds of rows on which plans act: how they are chosen, how they stand now, and what is done to a batch of them."""
