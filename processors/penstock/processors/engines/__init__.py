"""Engines: what runs models. This package holds what its subpackages share.

`process` holds what every local engine's process needs, `text` and `images` the backends inside it. `remote` and
`managed` speak to servers over HTTP.
"""
