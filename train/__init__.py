"""Training predictors with Lightning and exporting them."""
