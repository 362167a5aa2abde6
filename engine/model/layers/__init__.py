"""Layers that several families share: their weights, and the operations that use them."""
