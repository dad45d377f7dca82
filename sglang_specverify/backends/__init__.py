"""Translate SGLang's batches into kernel calls. A subclass of a built-in backend for each base; no mathematics."""
