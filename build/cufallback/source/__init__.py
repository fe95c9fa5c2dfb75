"""From a recipe's source pin to a verified tree, and the list of everything that tree would fetch."""
