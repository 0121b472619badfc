"""Parsl's own test suite, run with ctxflow's executor on the embedded engine.

pytest SITE-PACKAGES/parsl/tests -k "not cleannet" --config tests/parsl_suite/embedded.py
"""

from parsl.config import Config

from ctxflow import ContextExecutor


def fresh_config():
    return Config(executors=[ContextExecutor(site="local", workers=2)])


config = fresh_config()
