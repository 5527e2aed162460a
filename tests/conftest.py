"""Its presence puts this folder on the import path, so that tests can share the modules that lie here."""
