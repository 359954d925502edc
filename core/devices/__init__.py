"""The devices that come with the core: `cpu`, `deferred_cpu` (races without a GPU) and `cuda`."""
