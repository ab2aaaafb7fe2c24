"""The web page: upload a picture, merge its tokens, see what becomes of them.

Import from the modules: `networks` (what can be looked at), `inspection` (what is known about one
picture), `rendering` (pictures and tables of it), `page` (the controls), `server`.
"""
