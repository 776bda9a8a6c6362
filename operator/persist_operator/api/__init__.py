"""The resources as users write them: specs, conditions, names, the schema they are checked against. Pure."""
