"""The kinds of rows on which plans act: their selection, their state now, and the operation on a batch."""
