"""Container images: the engine, OCI layouts, registries."""
