"""Predictors of the experts that a model will need. See `base` for the contract and the horizons."""
