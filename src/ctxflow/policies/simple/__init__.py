"""Policies that need no tuning and are hard to beat, one module for each thing that is decided."""
