"""Export: a bundle in the formats of other programs. `recsys export` lists them."""
