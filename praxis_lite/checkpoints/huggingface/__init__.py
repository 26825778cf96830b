"""Models on disk as Hugging Face keeps them: which field and which tensor is what of ours.

It is said in `families/`, a table per family. Never imports transformers or torch.
"""
