"""Adapters to model libraries: the only modules that import those packages."""
