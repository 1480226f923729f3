"""Transformers models: loading, what their layers keep, patches, scans, quantisation."""
