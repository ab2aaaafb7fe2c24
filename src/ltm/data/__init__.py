"""Images in, batches out: folders, archives, tar shards, Hugging Face, and generated pictures.

Import from the modules: `datasets` (open labelled images), `decoding` (read one image), `limits`,
`loading` (batches), `transforms`, `shapes` (generated, no download), `config` (settings; imports
nothing heavy).
"""
