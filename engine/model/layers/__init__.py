"""The layers all families share: weights, and the operation that uses them."""
