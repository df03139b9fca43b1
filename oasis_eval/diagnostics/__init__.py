"""Why a model breaks: outliers, attention sinks and depth routing, measured in one pass."""
