"""The web page: upload a picture, merge its tokens, see what becomes of them.

| module | holds |
|---|---|
| `server` | serves the page |
| `page` | its controls, what they call, and which uploads it takes |
| `networks` | the networks that can be looked at, and their merging copies |
| `inspection` | all that is known about one picture |
| `rendering` | pictures and tables of it |
"""
