"""Images and labels: folders, archives, shards, COCO files, and generated pictures.

Import from the modules: `classification` (the door to labelled images), `detection` (COCO),
`shapes` (generated, no download), `loading` (batches), `config` (settings; imports nothing heavy).
"""
