"""Errors that a user can mend. Each message is one sentence: the value, what is legal, the next step.

ForegateError
 +-- SettingError    a setting or argument out of range (also a ValueError); the command line exits 2
 +-- DataError       a data set or text that is missing or cannot be read
 +-- TraceError      a trace that is no trace, is damaged, or belongs to another model
 +-- ModelError      a model without MoE layers, or of a family that is not supported
 +-- NotFittedError  a predictor that was asked before it was fitted
 +-- BundleError     a predictor bundle that is damaged or made for another topology
 +-- StoreError      an expert store that is truncated, altered, or belongs to another model
 +-- TransferError   bytes that could not be read at the moment they were needed
 +-- ClosedError     use of something that was closed
"""

from __future__ import annotations


class ForegateError(Exception):
    """Base of every error that the command line prints as one sentence."""


class SettingError(ForegateError, ValueError):
    """Refuse a setting or argument that is out of range."""


class DataError(ForegateError):
    """Refuse a data set or text that is missing or cannot be read."""


class TraceError(ForegateError):
    """Refuse a routing trace that is damaged or belongs to another model."""


class ModelError(ForegateError):
    """Refuse a model that has no MoE layers or whose family is not supported."""


class NotFittedError(ForegateError):
    """Refuse to predict before `fit`."""


class BundleError(ForegateError):
    """Refuse a predictor bundle that is damaged or was made for another topology."""


class StoreError(ForegateError):
    """Refuse an expert store that is truncated, altered, or belongs to another model."""


class TransferError(ForegateError):
    """Report bytes that could not be read when they were needed: expert, file and offset."""


class ClosedError(ForegateError):
    """Report the use of something that was closed."""
