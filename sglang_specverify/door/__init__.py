"""How the plugin gets into SGLang: the choice and its resolution, the factories, and the handshake between processes."""
