"""WHERE arrays live: meshes, mappings, rules, padding, batches.

Never sees a layer, a model or a step.
"""
