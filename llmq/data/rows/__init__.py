"""Rows of text: files, data sets of the Hub, and what names them."""
