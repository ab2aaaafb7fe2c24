"""Dense tasks on converted networks: feature pyramids, detection, instance segmentation.

Import from the modules: `pyramid` (any network as feature maps), `detection` (SSDLite),
`segmentation` (Mask R-CNN), `cost` (parameters and MACs), `saving`.
"""
