"""The inside of a model: what its layers compute, by name, and what follows if it is replaced.

hooks         functions at named places of the forward
activations   the cache of what they captured, under TransformerLens' names
patching      results with activations of one run in the place of another's
factored      weights by layer and head
text          text in the place of token ids
"""
